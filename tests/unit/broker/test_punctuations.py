"""Punctuations of producers are written once, and acknowledged when they are as durable as asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kera.broker.log.watermarks import watermark_of
from kera.broker.serving import write
from kera.broker.serving.limits import ServingLimits
from kera.core.base.ids import Position
from kera.core.errors import (
    ArenaFull,
    InvalidArgument,
    KeraError,
    NotOwner,
    Recovering,
    StreamletOutOfRange,
    TimestampAhead,
    UnknownStream,
)
from kera.core.format.chunk import HEADER_BYTES, encode_header, iterate_chunks
from kera.core.format.punctuation import encode_punctuation, is_punctuation
from kera.core.rpc import Reply, api
from kera.v1 import common_pb2
from tests.unit.broker.moving_support import Cluster
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, SLOT_BYTES, STREAM_ID, Broker, Engine, chunk, stream_info
from tests.unit.broker.test_epochs import EPOCHS, MS, NOW_US, described, sent, set_time
from tests.unit.broker.test_service_replicated import ReplicatedBroker, turn

BY_PRODUCERS = EPOCHS | {"punctuation": common_pb2.PUNCTUATION_PRODUCERS, "timestamp_ahead_max_ms": 0}


def open_broker(engine: Engine, limits: ServingLimits | None = None, **config: Any) -> Broker:
    set_time(engine, NOW_US)
    return Broker(engine, stream_info(**(BY_PRODUCERS | config)), limits=limits)


async def punctuate(broker: Broker, time_us: int, *streamlets: int, **fields: Any) -> Any:
    """The answer for each streamlet: the code of its error, or how many entries, and how many were written to."""
    request = api.PUNCTUATE.request(
        stream_id=fields.pop("stream_id", STREAM_ID), streamlet_ids=streamlets or [0], timestamp_us=time_us, **fields
    )
    response = await broker.ask(api.PUNCTUATE, request)
    return [each.error.code or (each.entries, each.written) for each in response.streamlets]


def log_of(broker: Broker, entry: int = 0, streamlet: int = 0) -> list[tuple[bool, int]]:
    found = broker.streams.streamlet(STREAM_ID, streamlet).entries[entry]
    return [
        (is_punctuation(header), header.max_timestamp_us)
        for segment in found.tail
        for header, _ in iterate_chunks(segment.slot.view, 0, segment.head)
    ]


async def test_a_punctuation_goes_to_written_entries_that_are_behind_its_time(engine: Engine) -> None:
    broker = open_broker(engine, entries=3)
    broker.append(sent(100, 0), chunk(2, 0, min_timestamp_us=300, max_timestamp_us=300))
    free = engine.arena.free_slots
    assert await punctuate(broker, 200) == [(2, 1)]
    assert log_of(broker, 1) == [(False, 100), (True, 200)]
    assert log_of(broker, 2) == [(False, 300)], "that one has got so far"
    assert log_of(broker, 0) == [], "and nothing was ever written to this one"
    assert engine.arena.free_slots == free
    entry = await described(broker)
    assert (entry.next_record, entry.HasField("watermark_us")) == (0, False)


async def test_repeated_or_older_punctuations_are_not_written(engine: Engine) -> None:
    broker = open_broker(engine)
    broker.append(sent(100, 0))
    assert [await punctuate(broker, time_us) for time_us in (200, 200, 150, 0, 201)] == [
        [(1, 1)],
        [(1, 0)],
        [(1, 0)],
        [(1, 0)],
        [(1, 1)],
    ]
    assert log_of(broker) == [(False, 100), (True, 200), (True, 201)]
    assert broker.counters.punctuations == 2
    broker.append(sent(5, 1))
    assert log_of(broker)[-1] == (False, 5), "what comes later may be older: it counts as late"


async def test_a_later_promise_replaces_the_time_of_a_punctuation(engine: Engine) -> None:
    broker = open_broker(engine, punctuation=common_pb2.PUNCTUATION_CLOCK, timestamp_ahead_max_ms=5000)
    broker.append(sent(NOW_US, 0))
    set_time(engine, NOW_US + 9000 * MS)
    promised_us = (await described(broker)).promised_us
    assert await punctuate(broker, NOW_US + 1) == [(1, 1)]
    assert log_of(broker) == [(False, NOW_US), (True, promised_us)], "else its place would be another one"
    assert await punctuate(broker, promised_us + 6000 * MS) == [(1, 1)], "at most so far ahead of the clock"
    assert await punctuate(broker, promised_us + 6000 * MS + 1) == [TimestampAhead.code]
    assert await punctuate(broker, (1 << 63) - 1) == [TimestampAhead.code]


async def test_a_time_too_far_ahead_is_refused_also_for_an_empty_streamlet(engine: Engine) -> None:
    broker = open_broker(engine, timestamp_ahead_max_ms=5000)
    assert await punctuate(broker, NOW_US + 5000 * MS) == [(0, 0)]
    assert await punctuate(broker, NOW_US + 5000 * MS + 1) == [TimestampAhead.code]


@pytest.mark.parametrize("time_us", [-1, -(1 << 63)])
async def test_a_time_before_1970_is_refused(engine: Engine, time_us: int) -> None:
    broker = open_broker(engine)
    with pytest.raises(InvalidArgument, match="since 1970"):
        await punctuate(broker, time_us)


async def test_invalid_requests_to_punctuate_are_refused(engine: Engine) -> None:
    broker = open_broker(
        engine, owners=(BROKER_ID, BROKER_ID, BROKER_ID + 1), limits=ServingLimits(described_entries_max=1)
    )
    cases: list[tuple[type[KeraError], dict[str, Any]]] = [
        (UnknownStream, {"stream_id": 99}),
        (InvalidArgument, {"durability": 77}),
    ]
    for error, fields in cases:
        with pytest.raises(error):
            await punctuate(broker, 5, **fields)
    with pytest.raises(InvalidArgument, match="at least one streamlet"):
        await broker.ask(api.PUNCTUATE, api.PUNCTUATE.request(stream_id=STREAM_ID))
    with pytest.raises(InvalidArgument, match="65536 streamlets"):
        await punctuate(broker, 5, *range(65537))
    broker.append(sent(1, 0))
    assert await punctuate(broker, 5, 0, 2, 7) == [(1, 1), NotOwner.code, StreamletOutOfRange.code]
    assert await punctuate(broker, 6, 0, durability=common_pb2.DURABILITY_REPLICATED) == [InvalidArgument.code]
    for many in ((0, 0), (0,) * 65536):
        with pytest.raises(InvalidArgument, match="1 entries"):
            await punctuate(broker, 5, *many)
    broker.streams.get(STREAM_ID).alter(_altered(epoch_ms=0))
    with pytest.raises(InvalidArgument, match="has no epochs"):
        await punctuate(broker, 5)


def _altered(**config: Any) -> common_pb2.StreamInfo:
    info: common_pb2.StreamInfo = stream_info(**(BY_PRODUCERS | config))
    info.config_version = 1
    return info


async def test_a_sealed_streamlet_takes_no_punctuation(engine: Engine) -> None:
    broker = open_broker(engine)
    broker.append(sent(1, 0))
    broker.streams.streamlet(STREAM_ID, 0).seal()
    assert await punctuate(broker, 5) == [NotOwner.code]
    broker.streams.streamlet(STREAM_ID, 0).unseal()
    assert await punctuate(broker, 5) == [(1, 1)]


async def test_an_entry_with_an_unsure_end_takes_no_punctuation_yet(engine: Engine) -> None:
    broker = open_broker(engine)
    broker.append(sent(1, 0))
    entry: Any = broker.streams.streamlet(STREAM_ID, 0).entries[0]
    entry.unsure = object()
    assert await punctuate(broker, 5) == [Recovering.code]
    assert log_of(broker) == [(False, 1)]


@pytest.mark.parametrize("room", [CHUNK_BYTES, HEADER_BYTES, 0])
async def test_a_punctuation_ends_a_full_segment_or_begins_the_next_one(engine: Engine, room: int) -> None:
    broker = open_broker(engine)
    broker.append(sent(1, 0, size=SLOT_BYTES - room))
    assert await punctuate(broker, 5) == [(1, 1)]
    broker.append(sent(6, 1, size=CHUNK_BYTES))
    assert log_of(broker) == [(False, 1), (True, 5), (False, 6)]
    heads = [segment.head for segment in broker.streams.streamlet(STREAM_ID, 0).entries[0].tail]
    assert heads[0] == (SLOT_BYTES if room == HEADER_BYTES else SLOT_BYTES - room + (HEADER_BYTES if room else 0))
    assert (await described(broker)).next_record == 2


async def test_a_punctuation_waits_for_room(make_engine: MakeEngine) -> None:
    broker = open_broker(make_engine(2), limits=ServingLimits(room_wait_ms=60_000))
    broker.paused = True
    broker.append(sent(1, 0, size=SLOT_BYTES), sent(2, 1, size=SLOT_BYTES))
    asked = asyncio.ensure_future(punctuate(broker, 5))
    await turn()
    assert not asked.done()
    broker.resume()
    assert await asked == [(1, 1)]


async def test_each_of_many_silent_entries_gets_a_punctuation_in_a_small_memory(make_engine: MakeEngine) -> None:
    broker = open_broker(make_engine(4), entries=40)
    for producer in range(40):
        (status,) = (await _told(broker.write(chunk(producer, 0, min_timestamp_us=1, max_timestamp_us=1)))).statuses
        assert not status.HasField("error")
    assert await punctuate(broker, 5) == [(40, 40)]
    assert await punctuate(broker, 5) == [(40, 0)]
    streamlet = broker.streams.streamlet(STREAM_ID, 0)
    assert {watermark_of(entry) for entry in streamlet.entries} == {5}


async def _told(result: Any) -> Any:
    return (result if isinstance(result, Reply) else await result).message


async def test_a_punctuation_without_room_is_refused_after_a_while(make_engine: MakeEngine) -> None:
    broker = open_broker(make_engine(1), limits=ServingLimits(room_wait_ms=1))
    broker.paused = True
    broker.append(sent(1, 0, size=SLOT_BYTES))
    assert await punctuate(broker, 5) == [ArenaFull.code]
    assert log_of(broker) == [(False, 1)]


async def test_a_punctuation_at_level_persisted_is_acknowledged_when_it_is_on_disk(engine: Engine) -> None:
    broker = open_broker(engine, durability=common_pb2.DURABILITY_PERSISTED)
    broker.paused = True
    broker.write(sent(1, 0))
    asked = [asyncio.ensure_future(punctuate(broker, 5)) for _ in range(2)]
    await turn()
    assert [each.done() for each in asked] == [False, False], "the second one finds it, and it is not durable yet"
    broker.resume()
    assert sorted([await each for each in asked]) == [[(1, 0)], [(1, 1)]], "one of them wrote it"
    for segment in broker.streams.streamlet(STREAM_ID, 0).entries[0].tail:
        engine.memory.close(segment)
    broker.resume()
    assert await punctuate(broker, 5) == [(1, 0)], "all of it is on disk"
    assert await punctuate(broker, 6) == [(1, 1)]


async def test_a_punctuation_of_a_replicated_stream_is_acknowledged_when_backups_have_it(engine: Engine) -> None:
    set_time(engine, NOW_US)
    broker = ReplicatedBroker(engine, **BY_PRODUCERS)
    written = broker.begin(sent(1, 0))
    first = asyncio.ensure_future(punctuate(broker, 5))
    again = asyncio.ensure_future(punctuate(broker, 5))
    await turn()
    assert (first.done(), again.done()) == (False, False)
    broker.wire.run()
    await written
    assert [await first, await again] == [[(1, 1)], [(1, 0)]]
    entry = broker.streams.streamlet(STREAM_ID, 0).entries[0]
    assert entry.end == Position(1, 1, CHUNK_BYTES + HEADER_BYTES)
    assert await punctuate(broker, 5) == [(1, 0)], "at once"


async def test_a_broker_whose_lease_is_over_writes_no_punctuation(engine: Engine) -> None:
    set_time(engine, NOW_US)
    broker = ReplicatedBroker(engine, **(BY_PRODUCERS | {"durability": common_pb2.DURABILITY_LEADER}))
    broker.append(sent(1, 0))
    broker.broker.lease.renew(0.0, 1)
    assert await punctuate(broker, 5) == ["unavailable"]
    assert log_of(broker) == [(False, 1)]


async def test_a_replaced_launch_refuses_punctuations(engine: Engine) -> None:
    broker = open_broker(engine)
    broker.append(sent(1, 0))
    broker.broker.writer.fence()
    assert await punctuate(broker, 5) == [NotOwner.code]


async def test_after_a_move_a_punctuation_goes_to_entries_with_records_elsewhere(make_engine: MakeEngine) -> None:
    engines = make_engine(16), make_engine(16)
    for engine in engines:
        set_time(engine, NOW_US)
    cluster = Cluster(*engines, **(BY_PRODUCERS | {"entries": 2}))
    cluster.owner.append(chunk(2, 0, min_timestamp_us=7, max_timestamp_us=7))
    await cluster.move(2)
    assert await punctuate(cluster.brokers[1], 9) == [NotOwner.code]
    assert await punctuate(cluster.owner, 9) == [(1, 1)]
    assert (log_of(cluster.owner, 0), log_of(cluster.owner, 1)) == ([(True, 9)], [])
    cluster.owner.append(chunk(2, 1, min_timestamp_us=8, max_timestamp_us=8))
    assert log_of(cluster.owner, 0) == [(True, 9), (False, 8)]
    assert (await described(cluster.owner)).next_record == 2


@pytest.mark.parametrize("producer", [0, 2])
async def test_a_repeated_chunk_is_found_among_punctuations(engine: Engine, producer: int) -> None:
    broker = open_broker(engine)
    sent_by = [chunk(producer, number, min_timestamp_us=1, max_timestamp_us=1) for number in range(4)]
    first = []
    for number, data in enumerate(sent_by):
        (status,) = broker.append(data)
        first.append((status.group_id, status.segment_id, status.position, status.first_record))
        assert await punctuate(broker, 10 * (number + 1)) == [(1, 1)]
    for data, place in zip(sent_by, first, strict=True):
        (status,) = broker.append(data)
        assert (status.error.code, status.duplicate) == ("", True)
        assert (status.group_id, status.segment_id, status.position, status.first_record) == place


def framed(flags: int, *, records: int = 1, first_us: int = 7, last_us: int = 7, payload: bytes = b"x" * 64) -> bytes:
    """A chunk with right checksums."""
    return encode_header(payload, 1, flags, records, STREAM_ID, 0, 1, 1, 0, 0, 2, 5, first_us, last_us) + payload


HOSTILE = [
    *(encode_punctuation(STREAM_ID, 0, time_us, 5) for time_us in (0, 7, (1 << 63) - 1)),
    *(framed(flags, records=records) for flags in (4, 5, 6, 7, 255) for records in (0, 1)),
    *(framed(flags, records=0, payload=b"") for flags in (0, 2, 4)),
    framed(0, records=0),
    framed(0, payload=b""),
    framed(0, first_us=8),
]
"""Chunks that no client may send."""


@pytest.mark.parametrize("in_c", [True, False], ids=["native", "Python"])
@pytest.mark.parametrize("number", range(len(HOSTILE)))
async def test_chunks_that_no_client_may_send_are_refused(
    engine: Engine, in_c: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_c:
        monkeypatch.setattr(write, "native", None)
    broker = open_broker(engine)
    broker.append(sent(1, 0))
    statuses = broker.append(sent(2, 1), HOSTILE[number], sent(3, 2))
    assert [status.error.code for status in statuses] == ["", InvalidArgument.code, ""]
    assert log_of(broker) == [(False, 1), (False, 2), (False, 3)]
