"""The kinds of members: how the messages of brokers and backups name them, and how their records change. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kera.v1 import common_pb2, coordinator_pb2

RecordT = TypeVar("RecordT", coordinator_pb2.RegisterBrokerRequest, coordinator_pb2.RegisterBackupRequest)
InfoT = TypeVar("InfoT", common_pb2.BrokerInfo, common_pb2.BackupInfo)

FENCED = "fenced:"
"""How the stored `launch_id` of a member begins whose last launch is fenced; that launch's own follows."""


@dataclass(frozen=True, slots=True)
class MemberKind(Generic[RecordT, InfoT]):
    """The kind of a member, with the names that its messages use."""

    noun: str
    """In words, and in the names of fields: a broker's registration has `broker`, which has `broker_id`."""
    new_record: type[RecordT]
    new_info: type[InfoT]
    of_request: tuple[Any, ...] = ("chosen_id",)
    """Fields of a registration that are for this once, and not stored."""
    passing: tuple[str, ...] = ()
    """Fields of its description that hold for a moment: registrations and heartbeats tell them, nothing stores them."""

    def info(self, record: RecordT) -> InfoT:
        """The description within a registration."""
        info: InfoT = getattr(record, self.noun)
        return info

    def id_and_epoch(self, record: RecordT) -> tuple[int, int]:
        """The id of the registered member, and the epoch of its launch."""
        info = self.info(record)
        return getattr(info, f"{self.noun}_id"), getattr(info, f"{self.noun}_epoch")

    def set_id_and_epoch(self, record: RecordT, member_id: int, epoch: int) -> None:
        """Say who it is, and which launch of it."""
        info = self.info(record)
        setattr(info, f"{self.noun}_id", member_id)
        setattr(info, f"{self.noun}_epoch", epoch)

    def changed(self, record: RecordT, **fields: Any) -> RecordT:
        """A copy of a registration, with these fields of the description within it."""
        changed = self.new_record()
        changed.CopyFrom(record)
        for field, value in fields.items():
            setattr(self.info(changed), field, value)
        return changed

    def fenced(self, record: RecordT, epoch: int) -> RecordT:
        """The record of a member none of whose launches before `epoch` may do anything any more."""
        changed = self.changed(record, restarting=False)
        if not changed.launch_id.startswith(FENCED):
            changed.launch_id = FENCED + changed.launch_id
        member_id, _ = self.id_and_epoch(record)
        self.set_id_and_epoch(changed, member_id, epoch)
        return changed


BROKER = MemberKind(
    "broker",
    coordinator_pb2.RegisterBrokerRequest,
    common_pb2.BrokerInfo,
    of_request=("chosen_id", "held_streams", "known_coordinator_epoch"),
)
BACKUP = MemberKind(
    "backup",
    coordinator_pb2.RegisterBackupRequest,
    common_pb2.BackupInfo,
    passing=("free_memory_bytes", "free_disk_bytes"),
)


def forgotten_record(member_id: int, directory_id: str) -> bytes:
    """The record of a member that is gone for good: it may not come back."""
    return json.dumps({"id": member_id, "directory_id": directory_id}).encode()


def read_forgotten(value: bytes) -> tuple[int, str]:
    """The opposite of `forgotten_record`."""
    record = json.loads(value)
    return record["id"], record["directory_id"]
