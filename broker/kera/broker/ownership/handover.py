"""The records that a broker writes when it gets a streamlet from another one, before it takes the first chunk.

A streamlet that moves brings along how far its producers have got: without that, a chunk that was sent twice would be
stored twice. So it is durable in the index, with the ordinals at which the entries go on, before the new owner says
that it has opened the streamlet. The record of this module says up to which interval that was done: an owner that
crashed before is not made the owner by its registration, but only by being told again.

    "h" stream u64, streamlet u32         first group id u64 of the interval; per entry, ordinal u64 of its first record

Group ids and ordinals are in it, too: the map of intervals may become simpler, and until the new owner has stored its
first chunk, nothing else of it says that they were given elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kera.broker.log.intervals import Holding
from kera.broker.records import Change, Digests, EntryRecord, ProducerRecord
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import put_digests, put_entry, put_producer, sealed
from kera.core.base.ids import EntryId, Position
from kera.v1 import common_pb2

_KEY = struct.Struct(">cQI")
_NUMBER = struct.Struct("<Q")


class HandedOver(NamedTuple):
    """The last interval that this broker got of a streamlet."""

    first_group_id: int = 0
    """0: it never got one."""
    first_records: tuple[int, ...] = ()
    """Per entry; empty: all 0."""


def put_handed_over(stream_id: int, streamlet_id: int, first_group_id: int, first_records: Sequence[int]) -> Change:
    """The change that says that this broker has what it needs to own an interval."""
    value = b"".join(_NUMBER.pack(number) for number in (first_group_id, *first_records))
    return sealed(_KEY.pack(b"h", stream_id, streamlet_id), value)


def handed_over(index: SegmentIndex, stream_id: int, streamlet_id: int) -> HandedOver:
    """The index's record of the handover."""
    for _, value in index.records(_KEY.pack(b"h", stream_id, streamlet_id)):
        first_group_id, *first_records = (number for (number,) in _NUMBER.iter_unpack(value))
        return HandedOver(first_group_id, tuple(first_records))
    return HandedOver()


def begins_with(before: HandedOver, entry: EntryRecord) -> bool:
    """Whether an entry starts here where the streamlet was handed over, and not where anything was removed."""
    return before.first_group_id > 1 and entry.start == (before.first_group_id, 1, 0)


def producers_of(state: common_pb2.StreamletState) -> dict[int, ProducerRecord]:
    """How far the producers had got at the old owner."""
    return {each.producer_id: ProducerRecord(each.producer_epoch, each.next_sequence) for each in state.producers}


def digests_of(state: common_pb2.StreamletState) -> dict[int, Digests]:
    """Digests of the producers' last chunks at the old owner; empty where it had none."""
    return {
        each.producer_id: Digests(each.producer_epoch, each.next_sequence, each.digests)
        for each in state.producers
        if each.HasField("digests")
    }


def changes_for(
    index: SegmentIndex, stream_id: int, state: common_pb2.StreamletState, held: Holding, *, known: bool
) -> list[Change]:
    """The changes that the index needs before the last interval of `held` is opened.

    `known`: the streamlet has older intervals here, so its entries go on from what they are.
    """
    last = held.intervals[-1]
    changes = [
        put_producer(stream_id, state.streamlet_id, producer_id, record)
        for producer_id, record in producers_of(state).items()
    ]
    changes += put_digests(stream_id, state.streamlet_id, digests_of(state))
    changes += () if known or not held.inherits else _entries(index, stream_id, state, held)
    return [
        *changes,
        put_handed_over(
            stream_id, state.streamlet_id, max(last.first_group_id, state.next_group_id), state.next_records
        ),
    ]


def _entries(index: SegmentIndex, stream_id: int, state: common_pb2.StreamletState, held: Holding) -> Iterable[Change]:
    last = held.intervals[-1]
    for number in range(len(state.next_records)):
        entry_id = EntryId(stream_id, state.streamlet_id, number)
        if index.entry(entry_id) is None:
            first = max(last.first_record(number), state.next_records[number])
            start = Position(max(last.start.group_id, state.next_group_id), 1, 0)
            yield put_entry(entry_id, EntryRecord(start, first, first))
