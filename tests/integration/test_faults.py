"""Producers under load while the broker dies, stalls, or lacks a coordinator: no record is doubled or misplaced."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kera.client import Client, ClientSettings
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.support import BROKER, TIMEOUT_S, Follower, keeping_cluster, load, lose_host, metric, read, until

STREAMLETS = 2
GROUPS_BEFORE = 1 << 20
"""A broker that has lost its memory continues with groups far beyond."""


@pytest.fixture
def own_cluster() -> Iterator[RunningCluster]:
    """A cluster of one broker for a test that disturbs it."""
    with LocalCluster.running(arena_bytes=64 * MIB, segment_bytes=64 * KIB) as running:
        yield running
        arenas = [Path(ready["arena_path"]) for ready in running.ready.values() if "arena_path" in ready]
    assert not any(path.exists() for path in arenas)


@pytest.mark.parametrize(
    "transport", ["auto", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tcp", "grpc"))]
)
async def test_a_killed_broker_under_load_loses_nothing(tmp_path: Path, transport: str) -> None:
    """The broker comes back on other ports, also over gRPC, and the producer finds it. Nothing is lost."""
    settings = ClientSettings.load(transport=transport)
    with keeping_cluster(tmp_path) as cluster:
        async with await Client.connect(cluster.bootstrap, settings) as client:
            await client.admin.create_stream("s", streamlets=STREAMLETS, group_segments=2)
            async with (
                client.producer(chunk_bytes_max=2 * KIB) as producer,
                client.consumer("s", start="earliest", fetch_wait_ms=50) as consumer,
                asyncio.TaskGroup() as tasks,
            ):
                await producer.prepare("s")
                follower = Follower(consumer)
                following = tasks.create_task(follower.run())
                async with load(producer) as running:
                    await until(lambda: len(running.deliveries) > 2000 and all(follower.seen.values()))
                    await asyncio.to_thread(cluster.kill, BROKER)
                    sent = running.sent
                    await until(lambda: running.sent > sent + 200)
                    await asyncio.to_thread(cluster.restart, BROKER)
                    delivered = len(running.deliveries)
                    await until(lambda: len(running.deliveries) > delivered + 1000)
                await until(lambda: sum(map(len, follower.seen.values())) == running.sent)
                following.cancel()
            stored = await read(client)
        assert (metric(cluster, "start_attached"), metric(cluster, "start_lost_memory")) == (1, 0)
        assert len(running.deliveries) == running.sent
        for streamlet in range(STREAMLETS):
            numbers = [number for number, _ in running.of(streamlet)]
            assert stored[streamlet] == follower.seen[streamlet] == numbers
            for record, (_, each) in enumerate(running.of(streamlet)):
                # For a repeat whose first attempt has left the memory since, the broker does not know the place.
                assert each.record == record or (each.duplicate and not each.position.group_id)


@pytest.mark.slow
async def test_a_broker_that_loses_its_memory_keeps_the_order_and_reports_the_gap(tmp_path: Path) -> None:
    """The stream has the records on disk, then those of the new launch, each part in order and without duplicates."""
    with keeping_cluster(tmp_path) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
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
                    await asyncio.to_thread(lose_host, cluster)
                    sent = running.sent
                    await until(lambda: running.sent > sent + 200)
                    await asyncio.to_thread(cluster.restart, BROKER)
                    await until(lambda: running.deliveries[-1].position.group_id > GROUPS_BEFORE)
                await until(lambda: follower.error is not None)
            stored = await read(client)

        assert len(running.deliveries) == running.sent
        for streamlet in range(STREAMLETS):
            old = [n for n, each in running.of(streamlet) if each.position.group_id < GROUPS_BEFORE]
            new = [
                (n, each)
                for n, each in running.of(streamlet)
                if each.position is not None and each.position.group_id > GROUPS_BEFORE
            ]
            kept = len(stored[streamlet]) - len(new)
            assert stored[streamlet] == old[:kept] + [number for number, _ in new]
            assert [each.record for _, each in new] == list(range(kept, kept + len(new)))
            # The follower saw only a beginning of that before the gap: it was not carried over the gap.
            assert follower.seen[streamlet] == old[: len(follower.seen[streamlet])]
        assert follower.error is not None
        lost_from, streamlet = follower.error.attributes["lost_from"], follower.error.attributes["streamlet_id"]
        assert lost_from == list(consumer.positions()[streamlet][0])
        first = next(each.position for _, each in running.of(streamlet) if each.position.group_id > GROUPS_BEFORE)
        assert follower.error.attributes["available_from"] == list(first)


@pytest.mark.parametrize("transport", ["auto", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_a_stalled_broker_stores_repeated_requests_once(own_cluster: RunningCluster, transport: str) -> None:
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
                    await until(lambda: any(sender._attempt >= 2 for sender in producer.routes._senders.values()))
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


async def test_a_broker_that_is_started_first_waits_for_its_coordinator(tmp_path: Path, unused_tcp_port: int) -> None:
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
