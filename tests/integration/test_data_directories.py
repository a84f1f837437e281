"""A broker whose data directory or shared memory is not as it left it: it gives a one-line error, or repairs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kera.client import Client
from kera.core.base.settings import KIB, MIB
from kera.local.child import ChildStartError
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.support import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BROKERS = ("broker-1", "broker-2")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems")


@contextlib.contextmanager
def running(
    data_dir: Path, *, brokers: int = 1, backups: int = 0, **broker_settings: object
) -> Iterator[RunningCluster]:
    """A cluster that keeps its data; shared memory is left clean, even after kills of brokers."""
    arenas: list[Path] = []
    with LocalCluster.running(
        data_dir=data_dir,
        brokers=brokers,
        backups=backups,
        arena_bytes=8 * MIB,
        segment_bytes=64 * KIB,
        broker_settings=broker_settings,
    ) as cluster:
        try:
            yield cluster
        finally:
            arenas += [Path(ready["arena_path"]) for ready in cluster.ready.values() if "arena_path" in ready]
    for arena in arenas:
        arena.unlink(missing_ok=True)


async def fill(client: Client, count: int = 200, *, value_bytes: int = 0, replication: int = 0) -> None:
    await client.admin.create_stream("s", streamlets=4, replication=replication)
    async with client.producer() as producer:
        await producer.prepare("s")
        for pending in [producer.send("s", b"%0*d" % (value_bytes, number)) for number in range(count)]:
            await pending


async def numbers(client: Client) -> list[int]:
    async with (
        asyncio.timeout(60),
        client.consumer("s", start="earliest", end="latest", on_data_lost="skip") as consumer,
    ):
        return sorted([int(record.value or b"-1") async for record in consumer])


def swap(one: Path, other: Path) -> None:
    between = one.with_name(one.name + ".between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


async def refused(cluster: RunningCluster, name: str) -> str:
    """The one-line error of a broker that does not start."""
    log = cluster.log_dir / f"{name}.log"
    before = len(log.read_text())
    with pytest.raises(ChildStartError):
        await asyncio.to_thread(cluster.restart, name)
    (line,) = [each for each in log.read_text()[before:].splitlines() if each.startswith("kera: error:")]
    return line


async def test_files_swapped_between_two_brokers_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, brokers=2) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await fill(client)
            homes = [Path(cluster.ready[name]["frames_unix_path"]).parent for name in BROKERS]
            for name in BROKERS:
                await asyncio.to_thread(cluster.kill, name)
            for names in (["log"], ["broker.json", "broker.copy.json"], ["log/index"]):
                for name in names:
                    swap(*(home / name for home in homes))
                for name, home in zip(BROKERS, homes, strict=True):
                    line = await refused(cluster, name)
                    assert f"{home}/log is not the log of the broker that {home}/broker.json names" in line
                for name in names:
                    swap(*(home / name for home in homes))
            for name in BROKERS:
                await asyncio.to_thread(cluster.restart, name)
            assert await numbers(client) == list(range(200))


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


@contextlib.contextmanager
def file_system(path: Path, size_bytes: int) -> Iterator[Path]:
    """A separate file system in memory."""
    path.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@as_root
async def test_a_broker_does_not_start_on_a_read_only_disk_and_loses_nothing(tmp_path: Path) -> None:
    with file_system(tmp_path / "broker-1", 256 * MIB) as disk, running(tmp_path) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await fill(client)
            await asyncio.to_thread(cluster.kill, "broker-1")
            await asyncio.to_thread(mount, "-o", "remount,ro", disk)
            line = await refused(cluster, "broker-1")
            assert str(disk) in line
            assert "Read-only file system" in line
            await asyncio.to_thread(mount, "-o", "remount,rw", disk)
            await asyncio.to_thread(cluster.restart, "broker-1")
            assert await numbers(client) == list(range(200))


@as_root
async def test_a_broker_does_not_start_while_shared_memory_is_full_and_loses_nothing(tmp_path: Path) -> None:
    with file_system(tmp_path / "shm", 12 * MIB) as shm, running(tmp_path / "cluster", shm_dir=shm) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await fill(client)
            await asyncio.to_thread(cluster.restart, "broker-1")
            await asyncio.to_thread(cluster.kill, "broker-1")
            for arena in shm.glob("*.arena"):
                arena.unlink()
            (shm / "others").write_bytes(bytes(6 * MIB))
            line = await refused(cluster, "broker-1")
            assert f"{shm} has 6 MiB free, the arena needs" in line
            assert [path.name for path in shm.iterdir()] == ["others"], "nothing is left"
            (shm / "others").unlink()
            await asyncio.to_thread(cluster.restart, "broker-1")
            assert await numbers(client) == list(range(200))


async def test_a_second_broker_with_the_same_data_directory_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, brokers=2) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await fill(client)
            first = Path(cluster.ready["broker-1"]["frames_unix_path"]).parent
            await asyncio.to_thread(cluster.kill, "broker-2")
            with pytest.raises(ChildStartError, match=f"another broker .*uses data directory {first}"):
                await asyncio.to_thread(cluster.restart, "broker-2", data_dir=first)
            async with client.producer() as producer:
                await producer.prepare("s")


def closed_segments(home: Path) -> list[Path]:
    return sorted((home / "log" / "segments").glob("*/*.segment"))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_segment_swapped_between_two_brokers_is_restored_from_a_backup(
    tmp_path: Path, end: signal.Signals
) -> None:
    with running(tmp_path, brokers=2, backups=2) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await fill(client, 2_000, value_bytes=1_000, replication=1)
            homes = [Path(cluster.ready[name]["frames_unix_path"]).parent for name in BROKERS]
            await until(lambda: all(len(closed_segments(home)) > 3 for home in homes))
            for name in BROKERS:
                os.kill(cluster.processes[name], end)
            await until(lambda: not any(name in cluster.processes for name in BROKERS))
            swapped = [closed_segments(home)[1] for home in homes]
            swap(*swapped)
            for name in BROKERS:
                await asyncio.to_thread(cluster.restart, name)

            assert await numbers(client) == list(range(2_000))
            for home, path in zip(homes, swapped, strict=True):
                assert [each.name for each in (home / "log" / "set-aside").iterdir()] == [path.name]
            said = "".join((cluster.log_dir / f"{name}.log").read_text() for name in BROKERS)
            assert all(str(path) in said for path in swapped)
