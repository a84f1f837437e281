"""Replicate requests that the native core takes from a connection's buffer, compared with the path through messages.

Two backups get the same bytes in the same reads, each over its own connection; only one of them uses the native core.
Answers, replicas (byte by byte) and counters have to be equal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from kera.backup import service
from kera.backup.metrics import RequestCounters
from kera.backup.service import BackupService
from kera.core.native import native
from kera.core.rpc import api
from kera.core.rpc.frame_server import FrameServer, Timing
from kera.core.rpc.frames import HEADER_BYTES, FrameKind, decode_header, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.v1 import backup_pb2
from tests.native_twins import needs_native
from tests.unit.backup.support import BROKER_ID, EPOCH, FakeBackup, Segment, placed
from tests.unit.broker.support import ADDRESS
from tests.unit.core.rpc.fake_transport import FakeTransport, feed

pytestmark = needs_native

READS = 80
SEGMENTS = (1, 2, 3)


def frame(number: int, message: backup_pb2.ReplicateRequest, data: bytes) -> bytes:
    return b"".join(encode_frame(FrameKind.REQUEST, api.REPLICATE, number, message, [data], BULK_BYTES_MAX))


class Engine:
    """An engine with only a store."""

    def __init__(self, backup: FakeBackup) -> None:
        self.store = backup.store


class Connected:
    """A backup with one broker's connection."""

    def __init__(self, *, takes: bool = True) -> None:
        self.backup = FakeBackup(slots=64, segment_bytes=16 << 10)
        self.counters = RequestCounters()
        engine: Any = Engine(self.backup)
        self.service = BackupService(engine, self.counters, read_bytes_max=1 << 20)
        self.service.registered()
        takers = self.service.takers() if takes else None
        self.server = FrameServer(self.service.service(), timing=Timing(slice_s=60.0), takers=takers)
        self.connection = self.server.accept("unix")
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)

    def feed(self, data: bytes, *splits: int) -> None:
        assert feed(self.connection, data, splits) == len(data)

    async def answered(self) -> dict[int, tuple[int, bytes]]:
        """The kind and the head of each request's answer."""
        self.backup.run()
        while self.server.requests_in_flight:
            await asyncio.sleep(0)
            self.backup.run()
        await asyncio.sleep(0)
        found, at, view = {}, 0, memoryview(self.transport.written)
        while at < len(view):
            header = decode_header(view, at, BULK_BYTES_MAX)
            end = at + HEADER_BYTES + header.head_bytes
            found[header.request_id] = header.kind, bytes(view[at + HEADER_BYTES : end])
            at = end
        return found

    def seen(self) -> Iterator[Any]:
        """All visible state, in parts."""
        yield dataclasses.asdict(self.counters)
        yield dataclasses.asdict(self.backup.store.persistence.totals)
        yield self.backup.store.epochs
        for replica in self.backup.store.replicas:
            yield {name: seen_of(replica, name) for name in replica.__slots__}


def seen_of(replica: Any, name: str) -> Any:
    value = getattr(replica, name)
    return bytes(value[: replica.length]) if name == "view" else value


class Broker:
    """Makes requests: mostly the next chunks of a few virtual segments."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.segments = {number: Segment(number) for number in SEGMENTS}
        self.last = max(SEGMENTS)
        self.epoch = EPOCH
        self.number = 0

    def request(self) -> bytes:
        random = self.random
        if random.random() < 0.02:  # another launch
            self.epoch += 1
            for number in list(self.segments):
                self.replace(number)
        self.number += 1
        number = random.choice(list(self.segments))
        segment = self.segments[number]
        chunks = [
            placed(random.randrange(9), ADDRESS, size=random.choice([192, 256, 1024]), fill=random.randbytes(1))
            for _ in range(random.choice([1, 1, 2, 5]))
        ]
        before = list(segment.chunks)
        message = segment.next(*chunks, epoch=self.epoch)
        data = b"".join(chunks)
        if random.random() < 0.05:
            segment.chunks = before
            data = self.spoil(message, data)
        elif random.random() < 0.05:
            message.persist = True
        elif random.random() < 0.03 or segment.length > 14 << 10:
            message.close = True
            self.replace(number)
        return frame(self.number, message, data)

    def replace(self, number: int) -> None:
        """Replace a segment by the next one."""
        del self.segments[number]
        self.last += 1
        self.segments[self.last] = Segment(self.last)

    def spoil(self, message: backup_pb2.ReplicateRequest, data: bytes) -> bytes:
        random = self.random
        match random.randrange(7):
            case 0:
                changed = bytearray(data)
                changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
                return bytes(changed)
            case 1:
                message.offset = random.choice([0, 64, message.offset + 64, (1 << 32) - 1])
            case 2:
                message.checksum ^= 1
            case 3:
                message.broker_epoch = self.epoch - 1
            case 4:
                message.virtual_segment_id = random.choice([0, 99, (1 << 64) - 1])
            case 5:
                message.broker_id += 1
            case _:
                return data[: random.randrange(len(data))]
        return data


class Counting:
    """The native core, with a count of the requests that it has taken."""

    def __init__(self) -> None:
        self.requests = 0

    def take_replicas(self, *arguments: Any) -> Any:
        assert native is not None
        result = native.take_replicas(*arguments)
        self.requests += result[1]
        return result


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
async def test_the_native_core_and_python_agree_on_random_requests(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    counting = Counting()
    monkeypatch.setattr(service, "native", counting)
    by_native, by_python = Connected(), Connected(takes=False)
    broker = Broker(random)
    for _ in range(READS):
        data = b"".join(broker.request() for _ in range(random.choice([1, 1, 2, 5])))
        splits = [random.randrange(len(data)) for _ in range(random.choice([0, 0, 1, 3]))]
        for side in (by_native, by_python):
            side.feed(data, *splits)
        assert list(by_native.seen()) == list(by_python.seen())
        if random.random() < 0.2:
            assert await by_native.answered() == await by_python.answered()
    assert await by_native.answered() == await by_python.answered()
    assert list(by_native.seen()) == list(by_python.seen())
    assert counting.requests > READS // 2


async def test_the_native_core_keeps_no_references() -> None:
    side, segment = Connected(), Segment()
    kept = []
    for number in range(8):
        chunk = placed(number, ADDRESS, size=256)
        message = segment.next(chunk)
        side.feed(frame(number, message, chunk))
        replica = side.backup.get()
        kept.append(sum(map(sys.getrefcount, (replica, replica.view, replica.chunk_ends, side.backup.store.epochs))))
    assert side.counters.replicate_requests == 8
    assert len(set(kept[3:])) == 1


async def test_a_backup_without_an_id_takes_no_requests() -> None:
    side = Connected()
    side.service._ready = False
    chunk = placed(0, ADDRESS, size=256)
    side.feed(frame(1, Segment().next(chunk), chunk))
    assert side.counters.replicate_requests == 0


@pytest.mark.parametrize("arguments", [(), (1,) * 5, ({}, [], b"", 0, 0), ({}, {}, 5, 0, 0), ({}, {}, b"", "x", 0)])
def test_a_call_with_wrong_arguments_is_refused(arguments: tuple[Any, ...]) -> None:
    assert native is not None
    with pytest.raises(TypeError):
        native.take_replicas(*arguments)


@pytest.mark.parametrize("numbers", [(-1, 0), (0, -1)])
def test_negative_numbers_are_refused(numbers: tuple[int, int]) -> None:
    assert native is not None
    with pytest.raises(ValueError, match="negative"):
        native.take_replicas({}, {}, b"", *numbers)


def test_a_replica_without_its_attributes_is_an_error() -> None:
    assert native is not None
    segment, chunk = Segment(), placed(0, ADDRESS, size=256)
    segment.next(chunk)
    data = frame(1, segment.next(chunk), chunk)
    with pytest.raises(AttributeError):
        native.take_replicas({BROKER_ID: EPOCH}, {BROKER_ID: {1: object()}}, data, 1 << 20, 9)
    assert native.take_replicas({BROKER_ID: EPOCH}, {}, data, 1 << 20, 9) == (0, 0, b"", 0, 0)
