"""The records that a broker writes when it gets a streamlet from another broker, before it takes the first chunk.

A streamlet that moves brings along the progress of its producers: without it, a chunk that is sent twice would be
stored twice. So the index has this progress durably, and the ordinals at which the entries continue, before the new
owner reports that it has opened the streamlet. The record of this module says up to which interval that was done. An
owner that crashed before does not become the owner by its registration, but only by a repeated order.

    "h" stream u64, streamlet u32         first group id u64 of the interval; per entry, ordinal u64 of its first record

The record also has the group id and the ordinals: the map of intervals may become simpler, and before the new owner has
stored its first chunk, it has no other evidence that other brokers have used the ids and ordinals before.
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
    """The last interval of a streamlet that was handed over to this broker."""

    first_group_id: int = 0
    """First group of the interval; 0: the broker never got one."""
    first_records: tuple[int, ...] = ()
    """Ordinal of the first record, by entry; empty: all 0."""


def put_handed_over(stream_id: int, streamlet_id: int, first_group_id: int, first_records: Sequence[int]) -> Change:
    """Return the change that records that this broker has everything it needs to own an interval."""
    value = b"".join(_NUMBER.pack(number) for number in (first_group_id, *first_records))
    return sealed(_KEY.pack(b"h", stream_id, streamlet_id), value)


def handed_over(index: SegmentIndex, stream_id: int, streamlet_id: int) -> HandedOver:
    """Return the index's record of the last handover."""
    for _, value in index.records(_KEY.pack(b"h", stream_id, streamlet_id)):
        first_group_id, *first_records = (number for (number,) in _NUMBER.iter_unpack(value))
        return HandedOver(first_group_id, tuple(first_records))
    return HandedOver()


def begins_with(before: HandedOver, entry: EntryRecord) -> bool:
    """Whether an entry starts where the streamlet was handed over, so none of its data here was removed."""
    return before.first_group_id > 1 and entry.start == (before.first_group_id, 1, 0)


def producers_of(state: common_pb2.StreamletState) -> dict[int, ProducerRecord]:
    """Return the progress of the producers at the old owner."""
    return {each.producer_id: ProducerRecord(each.producer_epoch, each.next_sequence) for each in state.producers}


def digests_of(state: common_pb2.StreamletState) -> dict[int, Digests]:
    """Return the digests of the producers' last chunks at the old owner, as far as it had them."""
    return {
        each.producer_id: Digests(each.producer_epoch, each.next_sequence, each.digests)
        for each in state.producers
        if each.HasField("digests")
    }


def changes_for(
    index: SegmentIndex, stream_id: int, state: common_pb2.StreamletState, held: Holding, *, known: bool
) -> list[Change]:
    """Return the changes that the index needs before the last interval of `held` is opened.

    `known`: the streamlet has older intervals here, so its entries continue from their present state.
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
