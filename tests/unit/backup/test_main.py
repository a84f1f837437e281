"""The backup's process: registration, heartbeats, metrics and shutdown."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kera.backup.application import serve
from kera.backup.registration import BackupDirectory
from kera.backup.settings import BackupSettings
from kera.core.base.process import node_id
from kera.core.base.settings import KIB
from kera.core.errors import PathNotWritable, StaleEpoch, StartError
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.server.daemon import ExitCode
from kera.server.registration import WrongCluster
from tests.unit.backup.support import Segment, placed
from tests.unit.broker.fake_coordinator import BACKUP_ID, EPOCH, FakeCoordinator, serving


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    async with serving(FakeCoordinator()) as coordinator:
        yield coordinator


@pytest.fixture
def settings(coordinator: FakeCoordinator, tmp_path: Path) -> BackupSettings:
    return BackupSettings.for_testing(tmp_path / "backup", coordinator.address)


async def test_a_backup_registers_its_identity_addresses_and_capacity(
    settings: BackupSettings, coordinator: FakeCoordinator
) -> None:
    given = {"rack": "r1", "disk_bytes_max": 1 << 30}
    async with serve(settings.model_copy(update=given)) as ready:
        (registered,) = coordinator.registered_backups
        backup = registered.backup
        assert ready["backup_id"] == BACKUP_ID
        assert (backup.backup_id, backup.node_id, backup.rack) == (0, node_id(), "r1")
        for name in ("grpc_address", "frames_address", "frames_unix_path"):
            assert getattr(backup, name) == ready[name]
        assert (backup.segment_bytes, backup.memory_bytes) == (settings.segment_bytes, settings.memory_bytes)
        assert (backup.disk_bytes, backup.free_disk_bytes) == (1 << 30, 1 << 30)
        assert backup.free_memory_bytes == settings.memory_bytes


async def test_heartbeats_report_free_memory_and_disk(settings: BackupSettings, coordinator: FakeCoordinator) -> None:
    async with serve(settings.model_copy(update={"disk_bytes_max": 1 << 30})) as ready:
        channel = await FrameChannel.connect_unix(ready["frames_unix_path"], timeout_s=30)
        data = placed()
        await channel.submit(api.REPLICATE, Segment().next(data), [data], timeout_s=30)
        expected = (BACKUP_ID, EPOCH, settings.memory_bytes - 64 * KIB, (1 << 30) - 68 * KIB)
        seen = len(coordinator.backup_heartbeats)
        while len(coordinator.backup_heartbeats) < seen + 2:
            await asyncio.sleep(0.002)
        last = coordinator.backup_heartbeats[-1]
        await channel.close()

    told = (last.backup_id, last.backup_epoch, last.free_memory_bytes, last.free_disk_bytes)
    assert told == expected


async def test_a_stopped_backup_leaves_only_its_identity_and_its_log(
    settings: BackupSettings, coordinator: FakeCoordinator
) -> None:
    for _ in range(2):
        async with serve(settings) as ready:
            assert Path(ready["frames_unix_path"]).is_socket()

    assert sorted(path.name for path in settings.data_dir.iterdir()) == [
        "backup.copy.json",
        "backup.json",
        "lock",
        "log",
    ]
    assert [request.backup.backup_id for request in coordinator.registered_backups] == [0, BACKUP_ID]
    content = json.loads((settings.data_dir / "backup.json").read_bytes())
    directory = BackupDirectory(settings.data_dir)
    assert directory.load() == (BACKUP_ID, "cluster")
    whose = {"backup_id": BACKUP_ID, "cluster_id": "cluster", "directory_id": directory.directory_id}
    assert content | {"crc32c": ""} == {"format": 2, **whose, "coordinator_epoch": 0, "crc32c": ""}
    directory.close()


async def test_a_backup_of_another_cluster_is_not_registered(
    settings: BackupSettings, coordinator: FakeCoordinator
) -> None:
    async with serve(settings):
        pass
    coordinator.cluster_id = "other"
    with pytest.raises(WrongCluster):
        async with serve(settings):
            pass
    assert len(coordinator.registered_backups) == 1


async def test_another_segment_size_stops_the_start(settings: BackupSettings) -> None:
    async with serve(settings):
        pass
    with pytest.raises(StartError, match="--segment-bytes 65536"):
        async with serve(settings.model_copy(update={"segment_bytes": 128 * KIB})):
            pass


async def test_the_error_names_a_directory_that_cannot_be_made(settings: BackupSettings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathNotWritable, match="--log-dirs") as raised:
        async with serve(settings.model_copy(update={"log_dirs": [tmp_path / "file" / "below"]})):
            pass
    assert raised.value.attributes == {"path": str(tmp_path / "file" / "below")}


async def test_metrics_are_served_at_the_announced_address(settings: BackupSettings) -> None:
    async with serve(settings.model_copy(update={"metrics_port": 0, "disk_bytes_max": 1 << 30})) as ready:
        channel = await FrameChannel.connect_unix(ready["frames_unix_path"], timeout_s=30)
        data = placed()
        await channel.submit(api.REPLICATE, Segment(1).next(data), [data], timeout_s=30)
        await channel.submit(api.REPLICATE, Segment(2).next(data, close=True, persist=True), [data], timeout_s=30)
        with pytest.raises(StaleEpoch):
            await channel.submit(api.REPLICATE, Segment(3).next(data, epoch=1), [data], timeout_s=30)
        address = f"http://{ready['metrics_address']}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=10).read().decode())
        await channel.close()

    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        "kera_backup_slots": 256,
        "kera_backup_slots_free": 255,
        'kera_backup_replicas{place="memory",state="open"}': 1,
        'kera_backup_replicas{place="disk",state="closed"}': 1,
        "kera_backup_replicate_requests_total": 3,
        "kera_backup_chunks_appended_total": 2,
        "kera_backup_bytes_appended_total": 2048,
        "kera_backup_commits_total": 1,
        "kera_backup_bytes_committed_total": 4096,
        'kera_backup_requests_refused_total{reason="stale_epoch"}': 1,
        "kera_backup_chunks_damaged_total": 0,
        "kera_backup_disk_errors_total": 0,
    }
    assert {name: float(values[name]) for name in expected} == expected
    assert float(values[f'kera_backup_disk_used_bytes{{path="{settings.data_dir}/log/replicas.log"}}']) == 76 * KIB


async def test_the_process_announces_readiness_stops_cleanly_on_sigterm_and_keeps_replicas(
    settings: BackupSettings, coordinator: FakeCoordinator
) -> None:
    environment = os.environ | {
        "KERA_BACKUP_COORDINATOR": coordinator.address,
        "KERA_BACKUP_DATA_DIR": str(settings.data_dir),
        "KERA_BACKUP_MEMORY_BYTES": "16MiB",
    }
    data = placed()
    for launch in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kera.backup", stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        assert (ready["ready"], ready["backup_id"]) == ("backup", BACKUP_ID)
        channel = await FrameChannel.connect_unix(ready["frames_unix_path"], timeout_s=30)
        if launch == 0:
            await channel.submit(api.REPLICATE, Segment().next(data), [data], timeout_s=30)
        message = api.READ_REPLICA.request(broker_id=3, virtual_segment_id=1)
        reply = await channel.submit(api.READ_REPLICA, message, timeout_s=30)
        assert b"".join(reply.bulk) == data
        await channel.close()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == ExitCode.STOPPED


@pytest.mark.parametrize("others_go_on", [False, True])
async def test_a_stopping_backup_announces_it_and_waits_only_if_brokers_go_on_elsewhere(
    settings: BackupSettings, coordinator: FakeCoordinator, others_go_on: bool
) -> None:
    coordinator.others_go_on = others_go_on
    lasting = settings.model_copy(update={"ephemeral": False})
    data = placed()
    segment = Segment()
    open_replica, closed = segment.next(data), asyncio.Event()

    async def close_when_told(channel: FrameChannel) -> None:
        """Close the replica, as a broker does that goes on elsewhere."""
        while not coordinator.restarts:
            await asyncio.sleep(0.002)
        await channel.submit(api.REPLICATE, segment.end(1), timeout_s=30)
        closed.set()

    async with serve(lasting) as ready:
        channel = await FrameChannel.connect_unix(ready["frames_unix_path"], timeout_s=30)
        await channel.submit(api.REPLICATE, open_replica, [data], timeout_s=30)
        closing = asyncio.create_task(close_when_told(channel)) if others_go_on else None
    first, second = coordinator.restarts
    assert (first.backup_id, first.epoch, first.stopping) == (BACKUP_ID, EPOCH, False)
    assert (second.backup_id, second.stopping) == (BACKUP_ID, True)
    assert closed.is_set() == others_go_on
    if closing is not None:
        await closing
    await channel.close()
