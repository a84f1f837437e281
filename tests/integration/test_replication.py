"""Brokers and backups as real processes: some are lost or paused, the others continue, and the lost ones come back."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kera.client import Client, ClientSettings
from kera.core.base.settings import MIB
from kera.core.errors import KeraError, NotReplicated, TooFewBackups, Uncertain
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.local.cluster import RunningCluster
from kera.v1 import backup_pb2
from tests.chaos.replicas import REPLICAS
from tests.integration.replication_support import (
    BROKER_ID,
    SEGMENT_BYTES,
    Writing,
    backup_name,
    backup_names,
    check_recovered,
    in_threads,
    list_replicas,
    recover,
    replicated_cluster,
    samples,
    under_replicated,
    until_quiet,
    until_replicated,
    writing,
)
from tests.integration.support import BROKER, TIMEOUT_S, fill_up, log_events, read, until, value_of

RECORDS = 200


async def written(load: Writing, count: int = RECORDS) -> None:
    """Wait until `count` more records are acknowledged."""
    wanted = len(load.acknowledged) + count
    await until(lambda: len(load.acknowledged) >= wanted or bool(load.errors))
    assert load.errors == []


async def settled(load: Writing) -> None:
    """Send nothing more, and wait until everything that was sent has been acknowledged."""
    load.paused = True
    await until(lambda: load.settled)
    assert load.errors == []


async def check_log(client: Client, load: Writing) -> None:
    """Check that readers get everything that was sent, once and in order."""
    streamlets = load.stream.config.streamlets
    stored = await read(client, load.stream.name, streamlets)
    assert stored == {number: list(range(number, load.sent, streamlets)) for number in range(streamlets)}


def total(cluster: RunningCluster, name: str) -> float:
    return samples(cluster)[f"replication_{name}_total"]


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["replicated", "persisted"])
@pytest.mark.parametrize("replication", [1, 2, 3])
async def test_the_remaining_backups_have_all_acknowledged_records(
    tmp_path: Path, replication: int, durability: str
) -> None:
    options = {"rounds": 1, "seed": 7, "replication": replication, "durability": durability, "busy": 300, "heavy": 0}
    run = await REPLICAS.short(tmp_path, **options)
    assert run.seen["records"] > 0


async def test_writers_continue_when_a_backup_is_killed_and_its_replicas_are_repaired(tmp_path: Path) -> None:
    with replicated_cluster(tmp_path, 3, repair_delay_ms=300) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", streamlets=2, replication=2, durability="replicated")
            async with writing(client, "s") as load:
                await written(load)
                killed = backup_name(cluster, load.acknowledged[-1][1].backups[0])
                await asyncio.to_thread(cluster.kill, killed)
                await written(load)
                await settled(load)
                left = [name for name in backup_names(cluster) if name != killed]
                await until(lambda: total(cluster, "virtual_segments_repaired") > 0)
                await until_replicated(cluster)
                await until_quiet(cluster, left)
                for name in left:
                    assert check_recovered(await recover(cluster, [name]), [load]), "each of the two has everything"
                await check_log(client, load)


@pytest.mark.slow
async def test_the_replicas_of_a_restarted_backup_are_not_copied_again(tmp_path: Path) -> None:
    with replicated_cluster(tmp_path, 3, repair_delay_ms=60_000) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", replication=2, durability="replicated")
            async with writing(client, "s") as load:
                name, before = "backup-1", set[int]()
                while len(before) < 3:
                    await written(load)
                    await settled(load)
                    load.paused = False
                    before = {number for number, info in (await list_replicas(cluster, name)).items() if info.closed}
                await settled(load)
                await asyncio.to_thread(cluster.restart, name)
                await until(lambda: samples(cluster)["backups_up"] == 3)
                await until_replicated(cluster)
                await until_quiet(cluster, backup_names(cluster))
                after = await list_replicas(cluster, name)
                assert before <= after.keys()
                assert not any(info.chunks_damaged for info in after.values())
                assert total(cluster, "bytes_repaired") <= 2 * SEGMENT_BYTES, "no more than what was open"
                assert check_recovered(await recover(cluster, backup_names(cluster)), [load])


async def test_without_backups_writers_get_errors_and_readers_continue(
    tmp_path: Path,
) -> None:
    with replicated_cluster(tmp_path, 2, backup_timeout_ms=500) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", replication=2, durability="replicated")
            async with writing(client, "s") as load:
                await written(load)
                await settled(load)
                before = load.sent
                await in_threads(cluster.kill, backup_names(cluster))
                await until(lambda: samples(cluster)["backups_up"] == 0)
                load.paused = False
                await until(lambda: load.sent > before)
                async with client.producer(delivery_timeout_ms=1_500) as impatient:
                    await impatient.prepare("s")
                    with pytest.raises((NotReplicated, TooFewBackups)):
                        async with asyncio.timeout(TIMEOUT_S):
                            await impatient.send("s", b"never")
                    with contextlib.suppress(NotReplicated, TooFewBackups):
                        await impatient.flush()
                assert len(load.acknowledged) == before
                stored = await read(client, "s", 1)
                assert stored[0] == list(range(before)), "what was acknowledged can be read"
                await in_threads(cluster.restart, backup_names(cluster))
                await written(load)
                await settled(load)
                await until_replicated(cluster)
                await check_log(client, load)


async def test_a_silent_backup_is_replaced_after_its_timeout(tmp_path: Path) -> None:
    with replicated_cluster(tmp_path, 3, backup_timeout_ms=300) as cluster:
        patience = ClientSettings.load(request_timeout_ms=600_000)  # only the broker's time-out lets writers continue
        async with await Client.connect(cluster.bootstrap, patience) as client:
            await client.admin.create_stream("s", replication=2, durability="replicated")
            async with writing(client, "s") as load:
                await written(load)
                stopped = load.acknowledged[-1][1].backups[0]
                pid = cluster.processes[backup_name(cluster, stopped)]
                os.kill(pid, signal.SIGSTOP)
                try:
                    await written(load)
                    assert all(stopped not in delivery.backups for _, delivery in load.acknowledged[-20:])
                    assert total(cluster, "backups_failed") >= 1
                finally:
                    os.kill(pid, signal.SIGCONT)
                await until(lambda: samples(cluster)["backups_up"] == 3)
                await settled(load)
                await until_replicated(cluster)
                await until_quiet(cluster, backup_names(cluster))
                assert check_recovered(await recover(cluster, backup_names(cluster)), [load])
                await check_log(client, load)


@pytest.mark.slow
async def test_a_fenced_broker_acknowledges_nothing_more_and_ends(tmp_path: Path) -> None:
    with replicated_cluster(tmp_path, 2) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", replication=1, durability="replicated")
            with contextlib.suppress(Uncertain):  # the producer also says it at its end
                async with writing(client, "s", delivery_timeout_ms=3_000) as load:
                    await written(load)
                    await settled(load)
                    acknowledged = len(load.acknowledged)
                    for name in backup_names(cluster):
                        address = cluster.ready[name]["frames_address"]
                        channel = await FrameChannel.connect_tcp(address, timeout_s=TIMEOUT_S)
                        fence = backup_pb2.FenceBrokerRequest(broker_id=BROKER_ID, broker_epoch=1 << 31)
                        await channel.submit(api.FENCE_BROKER, fence, timeout_s=TIMEOUT_S)
                        await channel.close()
                    load.paused = False
                    death = await asyncio.to_thread(cluster.run, cluster._cluster.wait())  # type: ignore[attr-defined]
                    assert (death.name, death.what) == (BROKER, "exited with code 1")
                    load.paused = True
                    await until(lambda: load.settled)
                    assert len(load.acknowledged) == acknowledged
                    assert load.errors, "writers were told"
                    assert log_events(cluster, "a backup knows a newer launch of this broker")
                    found = await recover(cluster, backup_names(cluster))
                    assert check_recovered(found, [load]) == acknowledged


@pytest.mark.slow
async def test_virtual_logs_can_be_changed_under_load_without_changing_the_order(tmp_path: Path) -> None:
    with replicated_cluster(tmp_path, 2) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", streamlets=4, replication=2, durability="replicated")
            async with writing(client, "s", pause_s=0.002) as load:
                for virtual_logs in (3, 2, 4, 1, 4):
                    await written(load, 100)
                    await client.admin.alter_stream("s", virtual_logs=virtual_logs)
                await written(load)
                await settled(load)
                await until_replicated(cluster)
                await until_quiet(cluster, backup_names(cluster))
                logs = {info.virtual_log_id for info in (await list_replicas(cluster, "backup-1")).values()}
                assert logs == {0, 1, 2, 3}
                await check_log(client, load)
                for name in backup_names(cluster):
                    assert check_recovered(await recover(cluster, [name]), [load]), "both have everything"


async def test_a_delivery_names_its_durability_virtual_segment_and_backups(tmp_path: Path) -> None:
    with replicated_cluster(tmp_path, 3) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", replication=2, durability="replicated")
            for number, level in enumerate(("leader", "replicated", "persisted")):
                async with client.producer(durability=level) as producer:
                    await producer.prepare("s")
                    delivery = await producer.send("s", value_of(number))
                assert delivery.durability == level
                if level == "leader":
                    continue
                assert len(delivery.backups) == len(set(delivery.backups)) == 2
                for backup_id in delivery.backups:
                    replicas = await list_replicas(cluster, backup_name(cluster, backup_id))
                    info = replicas[delivery.virtual_segment]
                    assert info.length
                    if level == "persisted":
                        assert info.durable_length == info.length
            assert under_replicated(cluster) == {}


# --- backups whose disks are full --------------------------------------------------------------------------


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[list[Path]]:
    """A file system of 64 MiB for each of three backups."""
    disks: list[Path] = []
    try:
        for number in (1, 2, 3):
            path = tmp_path / f"backup-{number}"
            path.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)]
            if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
                pytest.skip("mounting is not permitted here: root is needed")
            disks.append(path)
        yield disks
    finally:
        for path in disks:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


async def refusal(client: Client, stream: str) -> KeraError:
    """The error for a producer that does not wait for ever."""
    producer = client.producer(delivery_timeout_ms=8_000)
    await producer.prepare(stream)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                await producer.send(stream, value_of(0), streamlet=0)
    except KeraError as error:
        return error
    finally:
        with contextlib.suppress(KeraError):
            await producer.close()


@pytest.mark.slow
@pytest.mark.parametrize(("replication", "durability"), [(1, "replicated"), (2, "replicated"), (2, "persisted")])
async def test_backups_with_full_disks_lose_nothing_and_continue_when_there_is_room(
    small_disks: list[Path], tmp_path: Path, replication: int, durability: str
) -> None:
    names = [path.name for path in small_disks]
    with replicated_cluster(tmp_path, 3, backup_memory_bytes=MIB) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            for name in ("s", "told"):
                await client.admin.create_stream(name, streamlets=2, replication=replication, durability=durability)
            async with writing(client, "s", burst=20, delivery_timeout_ms=120_000) as load:
                await written(load)
                fillers = [fill_up(small_disks[0], 0)]
                await written(load, 2_000)  # more than fits into the backup's memory: others are used
                fillers += [fill_up(path, 0) for path in small_disks[1:]]
                error = await refusal(client, "told")
                assert isinstance(error, (NotReplicated, TooFewBackups)), error
                before = len(load.acknowledged)
                for filler in fillers:
                    filler.unlink()
                await settled(load)
                assert len(load.acknowledged) > before
            await until_replicated(cluster)
            await asyncio.to_thread(cluster.kill, BROKER)
            check_recovered(await recover(cluster, names), [load])
