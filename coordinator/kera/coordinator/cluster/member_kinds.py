"""The kinds of members: how the messages of brokers and backups name them, and how their records change. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kera.v1 import common_pb2, coordinator_pb2

RecordT = TypeVar("RecordT", coordinator_pb2.RegisterBrokerRequest, coordinator_pb2.RegisterBackupRequest)
InfoT = TypeVar("InfoT", common_pb2.BrokerInfo, common_pb2.BackupInfo)

FENCED = "fenced:"
"""Prefix of the stored `launch_id` of a member whose last launch is fenced; that launch's own id follows."""


@dataclass(frozen=True, slots=True)
class MemberKind(Generic[RecordT, InfoT]):
    """A kind of member, with the names that its messages use."""

    noun: str
    """The kind's name for people and in field names: a broker's registration has `broker`, which has `broker_id`."""
    new_record: type[RecordT]
    new_info: type[InfoT]
    of_request: tuple[Any, ...] = ("chosen_id",)
    """Fields that concern only this one registration, and are not stored."""
    passing: tuple[str, ...] = ()
    """Fields of its description that change all the time: registrations and heartbeats carry them, and nothing stores
    them.
    """

    def info(self, record: RecordT) -> InfoT:
        """Return the description within a registration."""
        info: InfoT = getattr(record, self.noun)
        return info

    def id_and_epoch(self, record: RecordT) -> tuple[int, int]:
        """Return the id of the registered member, and the epoch of its launch."""
        info = self.info(record)
        return getattr(info, f"{self.noun}_id"), getattr(info, f"{self.noun}_epoch")

    def set_id_and_epoch(self, record: RecordT, member_id: int, epoch: int) -> None:
        """Set the member's id, and the epoch of its launch."""
        info = self.info(record)
        setattr(info, f"{self.noun}_id", member_id)
        setattr(info, f"{self.noun}_epoch", epoch)

    def changed(self, record: RecordT, **fields: Any) -> RecordT:
        """Return a copy of a registration with these fields of its description changed."""
        changed = self.new_record()
        changed.CopyFrom(record)
        for field, value in fields.items():
            setattr(self.info(changed), field, value)
        return changed

    def fenced(self, record: RecordT, epoch: int) -> RecordT:
        """Return the record of a member after all its launches before `epoch` are fenced."""
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
    """Return the record of a forgotten member, which may not come back."""
    return json.dumps({"id": member_id, "directory_id": directory_id}).encode()


def read_forgotten(value: bytes) -> tuple[int, str]:
    """Parse a record of `forgotten_record`: return the member's id and the id of its data directory."""
    record = json.loads(value)
    return record["id"], record["directory_id"]
