"""Plug-ins of a producer: when it calls their hooks, and that it works without them."""

import asyncio
from typing import Any

import pytest

from kera.client.producing.lanes.lane import LAST_EPOCH
from kera.client.producing.lanes.stream_lanes import ProducerIdentity
from kera.client.producing.open_chunks.hooks import ChunkHooks
from kera.client.producing.open_chunks.stream_writers import StreamWriters
from kera.client.producing.quotas import THROTTLED_MS_MAX, QuotaPace, Quotas
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.sending.fill_time import TIMER_S, Linger
from kera.client.producing.sending.hooks import FixedBounds, Plugins, SenderHooks, SenderPort, without_plugins
from kera.client.producing.sending.routes import LIMITS
from kera.client.settings import ProducerSettings
from kera.core.errors import Unavailable
from kera.v1 import broker_pb2
from tests.unit.client.fake_support import MakeFleet
from tests.unit.client.support import WAIT_S, FakeCluster


class Seen(SenderHooks):
    """Notes the calls of a sender's hooks."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_connected(self, *_: Any) -> None:
        self.calls.append("connected")

    def on_request(self, request: Any) -> None:
        self.calls.append(f"request of {request.chunk_count}")

    def on_failure(self, request: Any, error: BaseException) -> None:
        self.calls.append(f"failure of {request.chunk_count}: {error}")

    def on_answer(self, request: Any, answer: Any, *_: Any) -> None:
        self.calls.append(f"answer to {request.chunk_count}: {len(answer.statuses)}")


class SeenChunks(ChunkHooks):
    """Notes the calls of the hooks of chunks."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_prepared(self, *_: Any) -> None:
        self.calls.append("prepared")

    def on_accepted(self, *_: Any) -> None:
        self.calls.append("accepted")

    def on_chunk_closed(self, *closed: Any) -> None:
        self.calls.append(f"closed with {len(closed[1].values)}")


def plugging(hooks: SenderHooks) -> Plugins:
    """Plugs these hooks into each sender."""
    plain = without_plugins(ProducerSettings())
    return plain._replace(at_sender=lambda port: plain.at_sender(port)._replace(hooks=[hooks]))


async def write(cluster: Any, *values: bytes, **plugged: Any) -> None:
    """Write a chunk of some values with the parts of a producer, but without the producer."""
    settings = ProducerSettings()
    buffer = Buffer(int(settings.buffer_bytes_max))
    errors: list[Any] = []
    writers = StreamWriters(cluster, settings, buffer, fail=errors.append, limits=LIMITS, **plugged)
    writers.identity = ProducerIdentity(1, 1, LAST_EPOCH)
    try:
        writer = await writers.writer("s")
        for value in values:
            buffer.take(len(value))
            writer.open_chunk(0, len(value), 0).append(value, 0.0, len(value))
        async with asyncio.timeout(WAIT_S):
            writers.close_open_chunks()
            await buffer.flush()
    finally:
        writers.routes.stop()
        buffer.close()
    assert errors == []


async def test_chunks_are_sent_without_plug_ins(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(brokers=1)
    await write(fleet.cluster, b"a", b"b")
    assert fleet.s.values() == [b"a", b"b"]


async def test_hooks_see_a_chunk_and_its_request(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(brokers=1)
    seen, chunks = Seen(), SeenChunks()
    await write(fleet.cluster, b"a", b"b", plugins=plugging(seen), hooks=chunks)
    assert chunks.calls == ["prepared", "accepted", "closed with 2"]
    assert seen.calls == ["connected", "request of 1", "answer to 1: 1"]


async def test_hooks_see_a_failed_request_and_its_retry(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(brokers=1, retry_backoff_ms=1)
    fleet.fake.brokers[1].refuse(Unavailable("not now"))
    seen = Seen()
    await write(fleet.cluster, b"a", plugins=plugging(seen))
    requests = [call for call in seen.calls if call != "connected"]
    assert requests == ["request of 1", "failure of 1: not now", "request of 1", "answer to 1: 1"]


async def test_a_plug_in_decides_the_creation_time_of_a_chunk(cluster: FakeCluster) -> None:
    plain = without_plugins(ProducerSettings())
    await write(cluster, b"a", plugins=plain._replace(created_us=lambda *_: 42))
    assert [chunk.created_us for write in cluster.loopback.writes for chunk in write] == [42]


@pytest.mark.parametrize(("linger_ms", "wait_s", "grace_s"), [(None, 0.0, 0.0), (0, 0.0, TIMER_S), (5, 0.005, TIMER_S)])
def test_chunks_linger_as_the_setting_says_without_a_plug_in(
    linger_ms: float | None, wait_s: float, grace_s: float
) -> None:
    linger = Linger(linger_ms)
    assert (linger.wait_s(7, 0.0), linger.holds, linger.grace_s) == (wait_s, wait_s > 0, grace_s)
    assert linger.early_s(wait_s, 100) == 0.0


def test_requests_grow_again_when_throttling_ends() -> None:
    port: Any = SenderPort(1, FixedBounds(1024, 5), set, lambda: None, print)
    quotas = Quotas()
    pace = QuotaPace(quotas, port)
    request: Any = None
    seen = []
    for ms in [THROTTLED_MS_MAX + 1] * 4 + [0] * 5:
        pace.on_answer(request, broker_pb2.MultiWriteChunksResponse(throttled_ms=ms), 0.0)
        seen.append((pace.bytes_max, pace.in_flight_max))
    assert seen == [
        *((size, 1) for size in (512, 256, 128, 64)),
        *((size, 5) for size in (128, 256, 512, 1024, 1024)),
    ]
    assert quotas.throttled_ms == 4 * (THROTTLED_MS_MAX + 1)
