"""Support for tests of the native core: two brokers that get the same requests, with good and bad chunks."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping
from random import Random
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from kera.broker.log.progress import SegmentProgress
from kera.broker.log.segment import Segment
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.serving.limits import ServingLimits
from kera.core.base.ids import PRODUCER_IDS
from kera.core.base.settings import MIB
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import (
    HEADER_BYTES,
    HEADER_CRC_AT,
    LEAN_VERSION,
    PLACEMENT_AT,
    VERSIONS,
    Codec,
    encode_payload,
)
from kera.core.format.payload import encode_lean
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import Reply
from kera.v1 import common_pb2
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.replication_support import EPOCH, ModelBackup, Wire
from tests.unit.broker.support import BROKER_ID, Broker, chunk, stream_info

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
"""The number of streamlets of each stream; the last one belongs to another broker."""
SLOTS = 64
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
"""The fields of a header that a producer fills: offset and size of each."""
PRODUCERS = (PRODUCER_IDS[0], PRODUCER_IDS[0] + 1, 1, 2)


SEGMENT_FIELDS = {*Segment.__slots__, *(name for name in dir(SegmentProgress) if not name.startswith("_"))} - {"entry"}


class Reader:
    """A waiting reader; one wake-up may stand for several chunks."""

    def __init__(self) -> None:
        self.told = False

    def wake(self) -> None:
        self.told = True


class Side:
    """One of the two brokers, with its backups."""

    def __init__(
        self,
        make_engine: MakeEngine,
        *,
        lag_bytes_max: int = 1 << 30,
        pump: Callable[[], None] | None = None,
        settings: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`pump` replaces the wire's own; `settings` apply to all streams."""
        # No batch becomes full: the native core adds runs of chunks to it, and Python adds chunks one by one.
        limits = ReplicationLimits(MIB, lag_bytes_max=lag_bytes_max)
        self.engine = engine = make_engine(SLOTS, random=Random(1), limits=limits)
        engine.replication.begin(EPOCH, [])
        self.wire = Wire(engine.replication, [ModelBackup(number + 1, segment_bytes=MIB) for number in range(2)])
        self.wire.connect()
        self.wire.run()
        patient = ServingLimits(room_wait_ms=600_000)  # even on a slow machine, every write that waits for room gets it
        self.broker = Broker(engine, pump=pump or self.wire.pump, check_payloads=True, limits=patient)
        self.broker.paused = True
        owners = (*(BROKER_ID,) * (STREAMLETS - 1), BROKER_ID + 1)
        self.broker.broker.registered(
            BROKER_ID,
            [stream_info(stream_id, owners=owners, **config, **settings) for stream_id, config in STREAMS.items()],
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
        """All visible state, in parts."""
        yield dataclasses.asdict(self.broker.counters)
        yield self.reader.told
        for stream in self.broker.streams:
            for streamlet in stream.streamlets.values():
                yield streamlet.records_appended, streamlet.bytes_appended, list(streamlet.producers.items())
                for entry in streamlet.entries:
                    yield entry.next_record, entry.end, entry.promised_us
                    for key, segment in sorted(entry.resident.items()):
                        yield key, {name: seen_of(segment, name) for name in SEGMENT_FIELDS}
                        yield bytes(segment.slot.view[: segment.head]), segment.slot.content
        for backup in self.wire.backups.values():
            yield {id_: bytes(replica.data) for id_, replica in backup.replicas.items()}


def seen_of(segment: Any, name: str) -> Any:
    value = getattr(segment, name)
    return value.index if name == "slot" else value


BATCH = pa.RecordBatch.from_pylist([{"timestamp": n, "value": bytes([n]) * n} for n in range(30)], DEFAULT_SCHEMA)
CODECS = (Codec.NONE, Codec.NONE, Codec.LZ4)


def good(random: Random, **fields: Any) -> bytes:
    """A good chunk, unless `fields` make it a bad one."""
    codec, version, rows = random.choice(CODECS), random.choice(VERSIONS), random.randrange(1, BATCH.num_rows)
    batch = BATCH.slice(0, rows)
    made = encode_lean(batch, codec) if version == LEAN_VERSION else encode_payload(batch, codec)
    assert made is not None
    data = bytes(memoryview(made))
    header = {"record_count": rows, "codec": codec, "version": version, "max_timestamp_us": rows} | fields
    return chunk(size=HEADER_BYTES + len(data), fill=data, min_timestamp_us=0, **header)


def repaired(data: bytearray) -> bytes:
    """The data, with a header checksum that matches its bytes."""
    struct.pack_into("<I", data, HEADER_CRC_AT, crc32c(data[:HEADER_CRC_AT]))
    return bytes(data)


def spoilt(random: Random, data: bytes) -> bytes:
    """The chunk with a change that makes it bad, or only odd."""
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


class Producers:
    """Makes requests of any number of chunks, mostly the producers' next ones."""

    def __init__(self, random: Random, *, odd: float = 1.0, times: Callable[[], int] | None = None) -> None:
        """`odd`: the share of odd chunks, relative to the default; `times`: gives each chunk its greatest timestamp."""
        self.times = times
        self.random = random
        self.odd = odd
        self.following: dict[tuple[int, int, int], int] = {}
        self.epochs: dict[int, int] = dict.fromkeys(PRODUCERS, 0)

    def chunk(self, stream_id: int, streamlet_id: int, producer_id: int) -> bytes:
        random, key = self.random, (stream_id, streamlet_id, producer_id)
        sequence = self.following.get(key, 0)
        kind = 1 - (1 - random.random()) / max(self.odd, 0.01)
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
            schema_id=1 if random.random() < 1 - 0.02 * self.odd else 2,
            **({} if self.times is None else {"max_timestamp_us": self.times()}),
        )
        return spoilt(random, made) if random.random() < 0.03 * self.odd else made

    def request(self) -> tuple[list[bytes], int]:
        random = self.random
        data: list[bytes] = []
        while len(data) < random.choice([1, 2, 5, 20]):
            stream_id = random.choice([*STREAMS, *STREAMS, 99])
            streamlet_id = random.choice([0, 0, 0, 1, 1, 2, STREAMLETS])
            producer_id = random.choice(PRODUCERS)
            data += [self.chunk(stream_id, streamlet_id, producer_id) for _ in range(random.choice([1, 1, 2, 6]))]
        return data, random.choice([0, 0, 0, LEADER, REPLICATED, PERSISTED])
