"""Checks that every record can be read, before a coordinator relies on its metadata. Pure.

The store has its own checksums, so a damaged record has another cause: a ZooKeeper node that was edited by hand, or an
incomplete copy of a directory. The coordinator refuses such metadata and names the record. It never leaves a record
out: without it, it could forget a stream or a user's rights, or give an id that is in use to another.

Records under keys that are not listed here are left alone. The census (``store/census``) notices records that were
removed or exchanged; this module also reports missing records on which others depend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError, Message

from kera.coordinator.access.records import DEFAULT_QUOTA, RULES, TOKENS, USERS, VERSION
from kera.coordinator.cluster.feature_level import FEATURE_LEVEL_KEY
from kera.coordinator.cluster.keys import (
    HANDED_OVER,
    HANDOVERS,
    MOVES,
    RECOVERIES,
    STARTS,
    STREAMS,
    forgotten_prefix,
    last_id,
    members_prefix,
)
from kera.coordinator.cluster.member_kinds import BACKUP, BROKER, read_forgotten
from kera.coordinator.consumer_groups.registry import CONSUMER_GROUPS
from kera.coordinator.consumer_groups.uses import CLOCK, USES
from kera.coordinator.latency.records import CONSTRAINTS
from kera.coordinator.operations.drops import DROPS
from kera.coordinator.operations.producer_owners import BLOCKS, CLAIMS
from kera.coordinator.operations.producers import PRODUCERS
from kera.coordinator.schemas.records import SCHEMAS, SUBJECTS
from kera.coordinator.store.leadership import LEADER, epoch_of
from kera.coordinator.store.metadata import MetadataDamaged
from kera.coordinator.store.metadata_copy import CLUSTER_ID
from kera.v1 import access_pb2, broker_pb2, common_pb2, consumer_group_pb2, coordinator_pb2, latency_pb2, schema_pb2

_Check = Callable[[bytes], object]
"""Reads a value; raises one of `_UNREADABLE` if it cannot."""
_UNREADABLE = (DecodeError, ValueError, LookupError, TypeError)


def _message(kind: type[Message], *, named: bool = False) -> _Check:
    """`named`: the message has a name or an id, so an empty value is damaged, though it parses."""

    def check(value: bytes) -> None:
        kind.FromString(value)
        if named and not value:
            raise ValueError("it is empty")

    return check


def _fields(*names: str) -> _Check:
    """Return the check of a JSON object that must have these fields."""

    def check(value: bytes) -> None:
        found = json.loads(value)
        for name in names:
            found[name]

    return check


_BELOW: Mapping[str, _Check] = {
    STREAMS: _message(common_pb2.StreamInfo, named=True),
    HANDOVERS: _message(common_pb2.StreamletState),
    STARTS: _message(broker_pb2.TakeOverStream),
    MOVES: _message(coordinator_pb2.Move),
    HANDED_OVER: _message(coordinator_pb2.HandedOver),
    RECOVERIES: _message(coordinator_pb2.RecoveryInfo, named=True),
    CONSUMER_GROUPS: _message(consumer_group_pb2.StreamletProgress, named=True),
    USES: _message(consumer_group_pb2.ConsumerGroupUse, named=True),
    USERS: _message(access_pb2.UserRecord, named=True),
    RULES: _message(access_pb2.AccessRule, named=True),
    TOKENS: _message(access_pb2.TokenRecord, named=True),
    SCHEMAS: _message(schema_pb2.SchemaRecord, named=True),
    SUBJECTS: _message(schema_pb2.SubjectRecord, named=True),
    CONSTRAINTS: _message(latency_pb2.LatencyConstraintRecord, named=True),
    PRODUCERS: _message(coordinator_pb2.ProducerRecord, named=True),
    DROPS: _fields("stream_id", "broker_ids"),
    BLOCKS: _fields("last_id", "principal"),
    CLAIMS: _fields("number", "principal"),
    "last/": int,
    **{members_prefix(kind.noun): _message(kind.new_record, named=True) for kind in (BROKER, BACKUP)},
    **{forgotten_prefix(kind.noun): read_forgotten for kind in (BROKER, BACKUP)},
}
"""The checks by prefix of the key."""
_SINGLE: Mapping[str, _Check] = {
    VERSION: int,
    CLOCK: int,
    FEATURE_LEVEL_KEY: int,
    DEFAULT_QUOTA: _message(access_pb2.Quota),
    CLUSTER_ID: bytes.decode,
    LEADER: epoch_of,
}


def check_records(records: Mapping[str, bytes]) -> None:
    """Read all `records`. Raises `MetadataDamaged` for the first record that cannot be read, or that is missing."""
    for key, value in records.items():
        check = _SINGLE.get(key) or next((each for below, each in _BELOW.items() if key.startswith(below)), None)
        if check is None:
            continue
        try:
            check(value)
        except _UNREADABLE as error:
            raise _damaged(key, f"cannot be read ({error})") from error
    if not records.get(CLUSTER_ID) and records.keys() - {LEADER}:
        raise _damaged(CLUSTER_ID, "is missing, and there are others: it would become another cluster")
    for noun in (BROKER.noun, BACKUP.noun):
        _check_last_id(records, noun)


def _check_last_id(records: Mapping[str, bytes], noun: str) -> None:
    """Raise `MetadataDamaged` if the id of a known member would be given again."""
    known = [int(key.rpartition("/")[2], 16) for key in records if key.startswith(members_prefix(noun))]
    last = int(records.get(last_id(noun), b"0"))
    if known and max(known) > last:
        raise _damaged(last_id(noun), f"says {last}, and there is a {noun} {max(known)}: its id would be given again")


def _damaged(key: str, problem: str) -> MetadataDamaged:
    return MetadataDamaged(
        f"the metadata are damaged: record {key} {problem}; put a copy back with kera cluster restore FILE --force",
        key=key,
    )
