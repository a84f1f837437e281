"""Producers under load while the broker dies, stalls, or has nobody to register with: nothing twice, nothing astray."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client, ClientSettings, Consumer, Delivery, Producer
from kera.client.local_cluster import LocalCluster, RunningCluster
from kera.core.errors import DataLost
from kera.core.settings import KIB, MIB

TIMEOUT_S = 60.0
STREAMLETS = 2
BROKER = "broker-1"


@pytest.fixture
def own_cluster() -> Iterator[RunningCluster]:
    """A cluster of one broker for a test that disturbs it."""
    with LocalCluster.running(arena_bytes=64 * MIB, segment_bytes=64 * KIB) as running:
        yield running
        arenas = [Path(ready["arena_path"]) for ready in running.ready.values() if "arena_path" in ready]
    assert not any(path.exists() for path in arenas)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; who calls bounds the time."""
    while not condition():
        await asyncio.sleep(0.01)


class Load:
    """Sends numbers all the time, and keeps what became of each."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.deliveries: list[Delivery] = []
        """Of number 0, 1, …"""
        self.sent = 0
        self.stopping = False

    async def run(self) -> None:
        pending: list[Any] = []
        while not self.stopping:
            for _ in range(10):
                pending.append(
                    self._producer.send("s", b"%d" % self.sent, keys=b"key", streamlet=self.sent % STREAMLETS)
                )
                self.sent += 1
            await self._producer.drain()
            await asyncio.sleep(0.001)  # a load, not a flood
            while pending and self._done(pending[0]):
                self.deliveries.append(await pending.pop(0))
        self.deliveries += [await delivery for delivery in pending]

    @staticmethod
    def _done(pending: Any) -> bool:
        return bool(pending._accumulator.delivered.done())

    def of(self, streamlet: int) -> list[tuple[int, Delivery]]:
        found = [(number, each) for number, each in enumerate(self.deliveries) if number % STREAMLETS == streamlet]
        assert all(each.entry.streamlet_id == streamlet for _, each in found)
        return found


@contextlib.asynccontextmanager
async def load(producer: Producer) -> AsyncIterator[Load]:
    """A load in the background, ended and delivered when the block is left."""
    running = Load(producer)
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(running.run())
        try:
            yield running
        finally:
            running.stopping = True


async def read(client: Client) -> dict[int, list[int]]:
    """The numbers in each streamlet, in order."""
    found: dict[int, list[int]] = {streamlet: [] for streamlet in range(STREAMLETS)}
    async with client.consumer("s", start="earliest", end="latest") as consumer:
        async for record in consumer:
            assert record.offset == len(found[record.streamlet])
            found[record.streamlet].append(int(record.value or b""))
    return found


class Follower:
    """Reads along until an error ends it."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.seen: dict[int, list[int]] = {streamlet: [] for streamlet in range(STREAMLETS)}
        self.error: BaseException | None = None

    async def run(self) -> None:
        try:
            async for record in self._consumer:
                self.seen[record.streamlet].append(int(record.value or b""))
        except DataLost as error:
            self.error = error


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
async def test_killed_broker_under_load(own_cluster: RunningCluster, transport: str) -> None:
    """The broker comes back on other ports; over gRPC, too, the producer finds it."""
    settings = ClientSettings.load(transport=transport)
    async with await Client.connect(own_cluster.bootstrap, settings) as client:
        await client.admin.create_stream("s", streamlets=STREAMLETS, group_segments=2)
        async with (
            client.producer(chunk_bytes_max=2 * KIB) as producer,
            client.consumer("s", start="earliest", fetch_wait_ms=50) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            await producer.prepare("s")
            follower = Follower(consumer)
            tasks.create_task(follower.run())
            async with load(producer) as running:
                await until(lambda: len(running.deliveries) > 2000 and all(follower.seen.values()))
                await asyncio.to_thread(own_cluster.kill, BROKER)
                sent = running.sent
                await until(lambda: running.sent > sent + 200)
                await asyncio.to_thread(own_cluster.restart, BROKER)
                described = await client.admin.describe_stream("s")
                first = {number: owner.first_group_id for number, owner in described.assignments.items()}
                await until(lambda: running.deliveries[-1].position.group_id >= min(first.values()))
            async with asyncio.timeout(TIMEOUT_S):
                await until(lambda: follower.error is not None)
                stored = await read(client)

        # Every number was delivered. Those of the new launch are there, in order, each at its ordinal; no others are.
        assert len(running.deliveries) == running.sent
        for streamlet in range(STREAMLETS):
            new = [(n, each) for n, each in running.of(streamlet) if each.position.group_id >= first[streamlet]]
            old = [n for n, each in running.of(streamlet) if each.position.group_id < first[streamlet]]
            assert stored[streamlet] == [number for number, _ in new]
            assert [each.record for _, each in new] == list(range(len(new)))
            assert old == list(range(streamlet, len(old) * STREAMLETS, STREAMLETS)), "the rest was stored before"
            # What the follower saw before is a beginning of that, and not more: it was not carried over the gap.
            seen = follower.seen[streamlet]
            assert seen == list(range(streamlet, len(seen) * STREAMLETS, STREAMLETS))
        assert isinstance(follower.error, DataLost)
        lost_from, streamlet = follower.error.attributes["lost_from"], follower.error.attributes["streamlet_id"]
        assert lost_from == list(consumer.positions()[streamlet][0])
        assert follower.error.attributes["available_from"] == [first[streamlet], 1, 0]


@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_broker_that_stalls_gets_requests_twice_and_stores_them_once(
    own_cluster: RunningCluster, transport: str
) -> None:
    settings = ClientSettings.load(transport=transport, request_timeout_ms=300, retry_backoff_ms=20)
    async with await Client.connect(own_cluster.bootstrap, settings) as client:
        await client.admin.create_stream("s", streamlets=STREAMLETS)
        async with client.producer(chunk_bytes_max=KIB, request_bytes_max=4 * KIB) as producer:
            await producer.prepare("s")
            broker = own_cluster.processes[BROKER]
            async with load(producer) as running:
                await until(lambda: len(running.deliveries) > 100)
                os.kill(broker, signal.SIGSTOP)
                try:
                    await until(lambda: any(sender._attempt >= 2 for sender in producer._senders.values()))
                finally:
                    os.kill(broker, signal.SIGCONT)
                delivered = len(running.deliveries)
                await until(lambda: len(running.deliveries) > delivered + 100)
        stored = await read(client)
        assert len(running.deliveries) == running.sent
        for streamlet in range(STREAMLETS):
            assert stored[streamlet] == [number for number, _ in running.of(streamlet)]
            assert [each.record for _, each in running.of(streamlet)] == list(range(len(stored[streamlet])))
        assert any(each.duplicate for each in running.deliveries)


async def test_broker_that_is_started_first_waits_for_its_coordinator(tmp_path: Path, unused_tcp_port: int) -> None:
    async def start(*arguments: str) -> asyncio.subprocess.Process:
        argv = (sys.executable, "-m", "kera.cli", *arguments)
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)

    async def line(stream: asyncio.StreamReader | None, text: bytes) -> bytes:
        assert stream is not None
        while text not in (found := await stream.readline()):
            assert found, f"it ended without {text!r}"
        return found

    address = f"127.0.0.1:{unused_tcp_port}"
    broker = await start(
        *("broker", "--coordinator", address, "--coordinator-timeout-ms", "60000", "--arena-bytes", "16MiB"),
        *("--data-dir", str(tmp_path / "broker"), "--ephemeral"),
    )
    coordinator = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await line(broker.stderr, b"waiting for the coordinator")
            port = str(unused_tcp_port)
            coordinator = await start("coordinator", "--port", port, "--data-dir", str(tmp_path / "coordinator"))
            ready = json.loads(await line(broker.stdout, b"ready"))
            assert ready["broker_id"] == 1
            async with await Client.connect(address) as client:
                (known,) = (await client.admin.describe_cluster()).brokers
                assert (known.grpc_address, known.alive) == (ready["grpc_address"], True)
    finally:
        for process in (broker, coordinator):
            if process is not None:
                process.terminate()
                await process.communicate()
    assert (broker.returncode, coordinator.returncode) == (0, 0)
    assert not Path(ready["arena_path"]).exists()
