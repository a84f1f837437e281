"""The native core's way of chunks into memory, beside the one in Python: both do the same with whatever comes.

Two brokers are sent the same requests, of good chunks and of all that may be wrong with one. Everything that can be
seen of them has to be equal: answers, segments byte by byte, producers, counters, and what goes to backups.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from kera.broker.replication.limits import ReplicationLimits
from kera.broker.serving import write
from kera.core.checksum import crc32c
from kera.core.chunk import HEADER_BYTES, HEADER_CRC_AT, LEAN_VERSION, PLACEMENT_AT, VERSIONS, Codec, encode_payload
from kera.core.ids import PRODUCER_IDS
from kera.core.native import native
from kera.core.payload import encode_lean
from kera.core.rpc import Reply
from kera.core.schema import DEFAULT_SCHEMA
from kera.core.settings import MIB
from kera.v1 import common_pb2
from tests.native_twins import needs_native
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.replication_support import EPOCH, ModelBackup, Wire
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, Broker, chunk, stream_info

pytestmark = needs_native

LEADER, REPLICATED, PERSISTED = (
    common_pb2.DURABILITY_LEADER,
    common_pb2.DURABILITY_REPLICATED,
    common_pb2.DURABILITY_PERSISTED,
)
STREAMS = {
    7: {"entries": 2},
    8: {"entries": 1, "durability": PERSISTED},
    9: {"entries": 2, "replication": 2, "durability": REPLICATED},
    10: {"entries": 1, "replication": 2, "durability": LEADER},
    11: {"entries": 1, "replication": 1, "durability": PERSISTED},
}
STREAMLETS = 3
"""Of each stream; the last one is another broker's."""
SLOTS = 64
REQUESTS = 60
FIELDS = (
    (4, 1),
    (5, 1),
    (6, 2),
    (8, 4),
    (12, 4),
    (16, 8),
    (24, 4),
    (28, 4),
    (32, 8),
    (40, 4),
    (44, 4),
    (48, 8),
    (64, 8),
    (72, 8),
)
"""Of a header that a producer fills: where they are, and their bytes."""
PRODUCERS = (PRODUCER_IDS[0], PRODUCER_IDS[0] + 1, 1, 2)


class Reader:
    """Waits; it may be told of several chunks at once."""

    def __init__(self) -> None:
        self.told = False

    def wake(self) -> None:
        self.told = True


class Side:
    """One of the two brokers, with backups."""

    def __init__(self, make_engine: MakeEngine, *, lag_bytes_max: int = 1 << 30) -> None:
        # No batch becomes full: the native core adds runs of chunks to it, and Python each by itself.
        limits = ReplicationLimits(MIB, lag_bytes_max=lag_bytes_max)
        self.engine = engine = make_engine(SLOTS, random=Random(1), limits=limits)
        engine.replication.begin(EPOCH, [])
        self.wire = Wire(engine.replication, [ModelBackup(number + 1, segment_bytes=MIB) for number in range(2)])
        self.wire.connect()
        self.wire.run()
        self.broker = Broker(engine, pump=self.wire.pump, check_payloads=True)
        self.broker.paused = True
        owners = (*(BROKER_ID,) * (STREAMLETS - 1), BROKER_ID + 1)
        self.broker.broker.registered(
            BROKER_ID, [stream_info(stream_id, owners=owners, **config) for stream_id, config in STREAMS.items()]
        )
        self.reader = Reader()
        for stream_id in (7, 9):
            for entry in self.broker.streams.streamlet(stream_id, 0).entries:
                entry.waiters.add(self.reader)  # type: ignore[arg-type]
        self.replies: list[Any] = []

    def send(self, data: list[bytes], durability: int) -> None:
        self.reader.told = False
        self.replies.append(self.broker.write(*data, durability=durability))

    async def go_on(self) -> None:
        self.wire.run()
        self.engine.run()
        await asyncio.sleep(0)

    async def finish(self) -> list[bytes]:
        async with asyncio.timeout(20):
            while not all(isinstance(reply, Reply) or reply.done() for reply in self.replies):
                await self.go_on()
        return [
            bytes((reply if isinstance(reply, Reply) else await reply).message.SerializeToString(deterministic=True))
            for reply in self.replies
        ]

    def seen(self) -> Iterator[Any]:
        """All that can be seen, in parts."""
        yield dataclasses.asdict(self.broker.counters)
        yield self.reader.told
        for stream in self.broker.streams:
            for streamlet in stream.streamlets.values():
                yield streamlet.records_appended, streamlet.bytes_appended, list(streamlet.producers.items())
                for entry in streamlet.entries:
                    yield entry.next_record, entry.end
                    for key, segment in sorted(entry.resident.items()):
                        yield key, {name: seen_of(segment, name) for name in segment.__slots__ if name != "entry"}
                        yield bytes(segment.slot.view[: segment.head]), segment.slot.content
        for backup in self.wire.backups.values():
            yield {id_: bytes(replica.data) for id_, replica in backup.replicas.items()}


def seen_of(segment: Any, name: str) -> Any:
    value = getattr(segment, name)
    return value.index if name == "slot" else value


BATCH = pa.RecordBatch.from_pylist([{"timestamp": n, "value": bytes([n]) * n} for n in range(30)], DEFAULT_SCHEMA)
CODECS = (Codec.NONE, Codec.NONE, Codec.LZ4)


def good(random: Random, **fields: Any) -> bytes:
    """A chunk that there is nothing wrong with, but perhaps its fields."""
    codec, version, rows = random.choice(CODECS), random.choice(VERSIONS), random.randrange(1, BATCH.num_rows)
    batch = BATCH.slice(0, rows)
    made = encode_lean(batch, codec) if version == LEAN_VERSION else encode_payload(batch, codec)
    assert made is not None
    data = bytes(memoryview(made))
    header = {"record_count": rows, "codec": codec, "version": version, "max_timestamp_us": rows} | fields
    return chunk(size=HEADER_BYTES + len(data), fill=data, min_timestamp_us=0, **header)


def repaired(data: bytearray) -> bytes:
    """With the header's checksum that its bytes have now."""
    struct.pack_into("<I", data, HEADER_CRC_AT, crc32c(data[:HEADER_CRC_AT]))
    return bytes(data)


def spoilt(random: Random, data: bytes) -> bytes:
    """Something is wrong with it, or it only looks so."""
    changed = bytearray(data)
    match random.randrange(6):
        case 0:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
            return bytes(changed)
        case 1:
            at = random.randrange(HEADER_CRC_AT)
            changed[at] ^= 1 << random.randrange(8)
            return repaired(changed)
        case 2:
            at = random.randrange(HEADER_BYTES, len(changed))
            changed[at] ^= 1 << random.randrange(8)
            struct.pack_into("<I", changed, HEADER_CRC_AT - 4, crc32c(changed[HEADER_BYTES:]))
            return repaired(changed)
        case 3:
            return data[: random.randrange(len(data))]
        case 4:
            at, width = random.choice(FIELDS)
            changed[at : at + width] = random.choice([bytes(width), b"\xff" * width, random.randbytes(width)])
            return repaired(changed)
        case _:
            changed[PLACEMENT_AT + random.randrange(HEADER_BYTES - PLACEMENT_AT)] = 1
            return bytes(changed)


class Counting:
    """The native core, and how many chunks it has appended."""

    def __init__(self) -> None:
        self.chunks = 0

    def append_chunks(self, *arguments: Any) -> Any:
        assert native is not None
        result = native.append_chunks(*arguments)
        self.chunks += result[2]
        return result


class Producers:
    """What comes to the brokers: mostly what is next, in requests of any number of chunks."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.following: dict[tuple[int, int, int], int] = {}
        self.epochs: dict[int, int] = dict.fromkeys(PRODUCERS, 0)

    def chunk(self, stream_id: int, streamlet_id: int, producer_id: int) -> bytes:
        random, key = self.random, (stream_id, streamlet_id, producer_id)
        sequence = self.following.get(key, 0)
        kind = random.random()
        if kind < 0.85:
            self.following[key] = sequence + 1
        elif kind < 0.9:
            sequence = max(0, sequence + random.choice([-2, -1, 1, 1 << 40]))
        elif kind < 0.92:
            self.epochs[producer_id] += 1
            self.following = {each: at for each, at in self.following.items() if each[2] != producer_id}
            sequence = 0
        made = good(
            random,
            stream_id=stream_id,
            streamlet_id=streamlet_id,
            producer=producer_id,
            producer_epoch=self.epochs[producer_id],
            sequence=sequence,
            schema_id=1 if random.random() < 0.98 else 2,
        )
        return spoilt(random, made) if random.random() < 0.03 else made

    def request(self) -> tuple[list[bytes], int]:
        random = self.random
        data: list[bytes] = []
        while len(data) < random.choice([1, 2, 5, 20]):
            stream_id = random.choice([*STREAMS, *STREAMS, 99])
            streamlet_id = random.choice([0, 0, 0, 1, 1, 2, STREAMLETS])
            producer_id = random.choice(PRODUCERS)
            data += [self.chunk(stream_id, streamlet_id, producer_id) for _ in range(random.choice([1, 1, 2, 6]))]
        return data, random.choice([0, 0, 0, LEADER, REPLICATED, PERSISTED])


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
async def test_both_do_the_same_with_whatever_comes(
    seed: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    lag_bytes_max = random.choice([4 * CHUNK_BYTES, 1 << 30])
    counting = Counting()
    monkeypatch.setattr(write, "native", counting)
    by_native = Side(make_engine, lag_bytes_max=lag_bytes_max)
    monkeypatch.setattr(write, "native", None)
    by_python = Side(make_engine, lag_bytes_max=lag_bytes_max)
    producers = Producers(random)
    for _ in range(REQUESTS):
        data, durability = producers.request()
        for side in (by_native, by_python):
            side.send(data, durability)
        if random.random() < 0.3:
            await by_native.go_on()
            await by_python.go_on()
        assert list(by_native.seen()) == list(by_python.seen())
    assert await by_native.finish() == await by_python.finish()
    assert list(by_native.seen()) == list(by_python.seen())
    assert by_native.broker.counters.chunks_appended > REQUESTS
    assert by_native.broker.counters.chunks_refused > REQUESTS // 2
    assert counting.chunks > by_native.broker.counters.chunks_appended // 8


async def test_nothing_of_what_was_looked_at_is_kept(make_engine: MakeEngine) -> None:
    side = Side(make_engine)
    streamlet = side.broker.streams.streamlet(7, 0)
    random = Random(1)
    kept: list[int] = []
    for sequence in range(12):
        data = [good(random, stream_id=7, producer=PRODUCERS[0], sequence=sequence)]
        side.send([*data, *data, b"no chunk"], 0)
        segment = streamlet.entries[0].tail[-1]
        kept.append(
            sum(map(sys.getrefcount, (streamlet, segment, segment.slot, segment.slot.view, segment.chunk_ends)))
        )
    assert len(set(kept[4:])) == 1


@pytest.mark.parametrize(
    "arguments", [(), (1,) * 8, ((), None, b"", 0, 0, 0, 0, 0), ((1,) * 6, None, b"", 0, 0, 0, 0, 0)]
)
def test_a_call_that_is_none_is_refused(arguments: tuple[Any, ...]) -> None:
    assert native is not None
    with pytest.raises(TypeError):
        native.append_chunks(*arguments)


@pytest.mark.parametrize("change", [{3: -1}, {4: -1}])
def test_places_before_the_start_are_refused(change: dict[int, int]) -> None:
    assert native is not None
    arguments: list[Any] = [({}, None, None, tuple, 0, True), None, b"x", 0, 1, 0, 0, 0]
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(ValueError, match="negative"):
        native.append_chunks(*arguments)


def test_beyond_the_end_there_is_nothing() -> None:
    assert native is not None
    door: tuple[Any, ...] = ({}, None, None, tuple, 0, True)
    assert native.append_chunks(door, None, b"x" * 200, 100, 9, 0, 0, 0) == (100, b"", 0, 0, 0)
    assert native.append_chunks(door, None, b"", 0, 9, 0, 0, 0) == (0, b"", 0, 0, 0)
    assert native.append_chunks(door, None, b"x", 1 << 62, 9, 0, 0, 0) == (1 << 62, b"", 0, 0, 0)


def test_what_the_broker_should_have_and_has_not_is_an_error_and_nothing_is_appended() -> None:
    assert native is not None
    data = good(Random(1), stream_id=7)
    door = ({7: object()}, None, None, tuple, 0, True)
    with pytest.raises(AttributeError):
        native.append_chunks(door, None, data, 0, 9, 0, 0, 0)
