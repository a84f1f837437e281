"""`kera cluster backup` under load, the loss of the metadata, and `kera cluster restore`."""

from __future__ import annotations

import asyncio
import resource
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from kera.cli.check._options import Options
from kera.client import Client
from kera.coordinator.store.metadata_copy import pack
from kera.local.cluster import LocalCluster
from tests.chaos.checked import LOAD_S_MAX, under_check
from tests.integration.command_line import run_kera
from tests.integration.control_support import control_cluster_of
from tests.integration.support import until, until_found
from tests.integration.test_restored_metadata import kera, read, until_caught_up, until_listed, write
from tests.integration.zookeeper import ZooKeeper

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

GROUP = "readers"
RECORDS, READ = 200, 120
KILLED = """
import os, signal, sys
from kera.cli.__main__ import main
from kera.coordinator.store import lmdb_store
from kera.core.errors import DiskFull

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def full(*_):
    raise DiskFull("no room")

store, move = lmdb_store.LmdbStore, lmdb_store.LmdbStore._move
match sys.argv.pop(1):
    case "set aside":
        store._move = lambda *paths: (move(*paths), killed())
    case "opened":
        store._commit = killed
    case "put back":
        store._commit, store._move = full, lambda self, *paths: killed() if self._set_aside else move(self, *paths)
main(sys.argv[1:])
"""
"""A `kera` that is killed at the moment of a restore that its first argument names."""
Where = tuple[str, ...]


class Metadata:
    """The place of a cluster's metadata, and a way to lose them."""

    def __init__(self, directory: Path, zookeeper: str) -> None:
        self._directory = directory
        self.zookeeper = zookeeper

    @property
    def flags(self) -> Where:
        """The flags that tell `kera cluster restore` the place."""
        return ("--zookeeper", self.zookeeper) if self.zookeeper else ("--data-dir", str(self._directory))

    def lose(self) -> None:
        if not self.zookeeper:
            shutil.rmtree(self._directory)
            return
        hosts, _, root = self.zookeeper.partition("/")
        client = KazooClient(hosts)
        client.start()
        client.delete(f"/{root}", recursive=True)
        client.stop()
        client.close()


@pytest.fixture(params=["lmdb", "zookeeper"])
def metadata(request: pytest.FixtureRequest, tmp_path: Path) -> Metadata:
    address = ""
    if request.param == "zookeeper":
        server: ZooKeeper = request.getfixturevalue("zookeeper")
        address = f"{server.address}/{secrets.token_hex(4)}"
    return Metadata(tmp_path / "data" / "coordinator", address)


async def backup(cluster: LocalCluster, file: Path) -> None:
    done = await asyncio.to_thread(kera, "backup", str(file), "--bootstrap", cluster.bootstrap)
    assert done.returncode == 0, done.stderr


async def restored(file: Path, where: Where) -> tuple[int, str]:
    done = await asyncio.to_thread(kera, "restore", str(file), *where)
    return done.returncode, done.stderr


async def commit(client: Client, stream: str, records: int) -> None:
    """Let a consumer group read this many records, and commit."""
    async with client.group_consumer(GROUP, stream, commit_interval_ms=0) as consumer:
        read_records = 0
        async for _ in consumer:
            read_records += 1
            if read_records == records:
                break
        await consumer.commit()


async def committed(client: Client, stream: str) -> int:
    """The number of records that the consumer group has read, according to its lag."""

    async def told() -> list[int]:
        described = await client.admin.describe_consumer_group(GROUP)
        lags = [entry.lag for entry in described.entries if entry.stream == stream]
        return [lag.records for lag in lags if lag is not None] if all(lags) else []

    return RECORDS - sum(await until_found(told))


async def test_lost_metadata_are_restored_while_clients_continue(metadata: Metadata, tmp_path: Path) -> None:
    file = tmp_path / "copy"
    cluster = control_cluster_of(
        tmp_path / "data", brokers=2, backups=2, replication=1, zookeeper=metadata.zookeeper or None
    )
    options = Options(LOAD_S_MAX, replication=1, rate=200.0, members=0, seed=1)
    async with cluster, await Client.connect(cluster.bootstrap) as client:
        async with under_check(cluster.bootstrap, options) as load:
            await client.admin.create_stream("older", replication=1)
            await write(client, "older", range(READ))  # chunks of their own: only whole chunks are committed
            await write(client, "older", range(READ, RECORDS))
            await commit(client, "older", READ)
            await load.goes_on()
            await backup(cluster, file)
            await client.admin.create_stream("younger", replication=1)
            await write(client, "younger", range(RECORDS))

            await cluster.kill("coordinator")
            metadata.lose()
            code, error = await restored(file, metadata.flags)
            assert code == 0, error
            await cluster.restart("coordinator")
            await until_caught_up(cluster)
            await load.goes_on()
        assert await committed(client, "older") == READ
        assert await read(client, "older") == list(range(RECORDS))
        await until_listed(client, {"younger": RECORDS})  # listed as created after the copy
        await client.admin.adopt_stream("younger")
        assert await read(client, "younger") == list(range(RECORDS))


async def test_restoring_metadata_of_another_cluster_destroys_no_data(tmp_path: Path) -> None:
    """The foreign metadata lack everything that brokers and backups hold; these say so, and continue with the right
    metadata.
    """
    right, foreign = tmp_path / "right", tmp_path / "foreign"
    async with control_cluster_of(tmp_path / "other", brokers=1, backups=1, replication=1) as other:
        await backup(other, foreign)
    directory = tmp_path / "data" / "coordinator"
    cluster = control_cluster_of(tmp_path / "data", brokers=2, backups=2, replication=1)
    async with cluster, await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("kept", replication=1)
        await write(client, "kept", range(RECORDS))
        await backup(cluster, right)
        await cluster.kill("coordinator")
        shutil.rmtree(directory)
        where = ("--data-dir", str(directory))
        assert (await restored(foreign, where))[0] == 0
        await cluster.restart("coordinator")
        # Its broker 1 has another directory, and it knows no backup of this launch: the daemons end, and say why.
        await until(lambda: not {"broker-1", "backup-1", "backup-2"} & cluster.processes.keys())
        assert "with another data directory" in (cluster.log_dir / "broker-1.log").read_text()
        await cluster.kill("coordinator")
        shutil.rmtree(directory)
        assert (await restored(right, where))[0] == 0
        await cluster.restart("coordinator")
        for name in list(cluster.ready):
            if name != "coordinator" and name not in cluster.processes:
                await cluster.restart(name)
        await until_caught_up(cluster)
        assert await read(client, "kept") == list(range(RECORDS))
        await write(client, "kept", range(RECORDS, 2 * RECORDS))


def test_a_failed_backup_keeps_the_old_copy_and_a_damaged_copy_is_refused(tmp_path: Path) -> None:
    with LocalCluster.running() as cluster:
        file = tmp_path / "copy"
        store = tmp_path / "store"
        command = [sys.executable, "-m", "kera.cli", "cluster", "backup", str(file), "--bootstrap", cluster.bootstrap]

        def limited(bytes_max: int) -> Callable[[], None]:
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max))

        subprocess.run(command, check=True, timeout=60, capture_output=True)
        before = file.read_bytes()
        done = subprocess.run(command, preexec_fn=limited(64), capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "cannot write" in done.stderr) == (2, True), done.stderr
        assert file.read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["copy"]

    damaged = tmp_path / "damaged"
    for data in (before[:-1], before[:100], b"", before + b"x", before[:-9] + b"x" + before[-8:]):
        damaged.write_bytes(data)
        refused = run_kera("cluster", "restore", str(damaged), "--data-dir", str(store))
        assert refused.returncode == 2
        assert not store.exists()
        assert str(damaged) in refused.stderr.decode()
    assert run_kera("cluster", "restore", str(file), "--data-dir", str(store)).returncode == 0


def test_damaged_metadata_are_reported_and_replaced_by_a_copy(tmp_path: Path) -> None:
    """In processes of their own: a truncated file would end them with a signal."""
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    file = data_dir / "metadata" / "data.mdb"
    records = {f"streams/{number:016}": bytes(2000) for number in range(50)}
    copy.write_bytes(pack({"cluster_id": b"c", **records}, 17))
    assert kera("restore", str(copy), "--data-dir", str(data_dir)).returncode == 0
    whole = file.read_bytes()

    for number, damaged in enumerate((whole[:40_000], secrets.token_bytes(40_000)), 1):
        file.write_bytes(damaged)
        command = [sys.executable, "-m", "kera.cli", "coordinator", "--port", "0", "--data-dir", str(data_dir)]
        started = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        for refused in (started, kera("restore", str(copy), "--data-dir", str(data_dir))):
            assert refused.returncode == 2
            assert f"kera: error: {file} is damaged: " in refused.stderr
            assert "put a copy back with kera cluster restore FILE" in refused.stderr
        done = kera("restore", str(copy), "--data-dir", str(data_dir), "--force")
        assert done.returncode == 0, done.stderr
        aside = data_dir / ("metadata.damaged" if number == 1 else f"metadata.damaged-{number}")
        assert f"damaged metadata are set aside (path={aside}" in done.stderr
        assert (aside / "data.mdb").read_bytes() == damaged
        assert "metadata exist already" in kera("restore", str(copy), "--data-dir", str(data_dir)).stderr


@pytest.mark.parametrize("moment", ["set aside", "opened", "put back"])
def test_an_interrupted_restore_starts_no_new_cluster_and_can_be_repeated(tmp_path: Path, moment: str) -> None:
    data_dir, copy = tmp_path / "data", tmp_path / "copy"
    (data_dir / "metadata").mkdir(parents=True)
    (data_dir / "metadata" / "data.mdb").write_bytes(b"damaged")
    copy.write_bytes(pack({"cluster_id": b"c", "streams/1": b"s"}, 17))
    restore = ["cluster", "restore", str(copy), "--data-dir", str(data_dir)]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, moment, *restore, "--force"], capture_output=True, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (data_dir / "metadata").exists() == (moment == "opened")

    command = [sys.executable, "-m", "kera.cli", "coordinator", "--port", "0", "--data-dir", str(data_dir)]
    started = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert started.returncode == 2
    assert started.stderr.splitlines()[-1] == (
        f"kera: error: {data_dir}/metadata has no metadata, and {data_dir}/metadata.damaged has damaged ones: putting a"
        f" copy in their place was interrupted. Repeat kera cluster restore FILE --data-dir {data_dir}, or move"
        f" {data_dir}/metadata.damaged to another directory to begin a new cluster"
    )
    repeated = run_kera(*restore)
    assert repeated.returncode == 0, repeated.stderr
    assert repeated.stderr.decode() == (
        f"kera: warning: going on with a restore that was interrupted (damaged={data_dir}/metadata.damaged)\n"
    )
    assert "metadata exist already: cluster c" in run_kera(*restore).stderr.decode()
    assert (data_dir / "metadata.damaged" / "data.mdb").read_bytes() == b"damaged"
