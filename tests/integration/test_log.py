"""The log of real brokers, with clients at work: larger than their memory, killed, full, shrunk."""

import asyncio
import contextlib
import datetime
import gc
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client import ChunkBatch, Client, ClientSettings, Consumer, Delivery, Position
from kera.core.base.settings import KIB, MIB
from kera.core.errors import DataLost, DiskFull, KeraError, NotPersisted, UnknownStream
from kera.local.cluster import RunningCluster
from tests.integration.support import (
    BROKER,
    TIMEOUT_S,
    Follower,
    arena_of,
    disk_bytes,
    fill_up,
    keeping_cluster,
    load,
    log_events,
    lose_host,
    metric,
    number_of,
    read,
    tell,
    until,
    value_of,
)

ARENA_BYTES = 4 * MIB
SEGMENT_BYTES = 64 * KIB


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    """A broker with memory for 64 small segments."""
    with keeping_cluster(tmp_path, arena_bytes=ARENA_BYTES, segment_bytes=SEGMENT_BYTES) as running:
        yield running
        tell(running)


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


def log_of(tmp_path: Path) -> Path:
    return tmp_path / BROKER / "log"


async def settled(cluster: RunningCluster, client: Client, stream: str = "s") -> int:
    """Wait until all segments but the open ones are on disk; returns their size on disk."""
    bounds = [entry for entries in (await client.bounds(stream)).values() for entry in entries]
    closed = sum(max(0, entry.length_bytes - SEGMENT_BYTES) for entry in bounds)
    path = log_of(cluster.log_dir.parent)
    await until(lambda: disk_bytes(path) >= closed)
    return disk_bytes(path)


def is_nowhere(delivery: Delivery) -> bool:
    """Whether this answers a repeat of a chunk that is only on disk, and names no place."""
    return delivery.duplicate and delivery.position is None


async def fill(client: Client, stream: str, size: int, first: int = 0, streamlet: int = 0) -> Sequence[Delivery]:
    """Write records `first`, … of `size` bytes together; returns the deliveries of their chunks."""
    values: list[bytes] = []
    while size > 0:
        values.append(value_of(first + len(values)))
        size -= len(values[-1])
    # These payloads take more space than their values, as freed space is counted in values.
    async with client.producer(chunk_bytes_max=16 * KIB, payload="arrow") as producer:
        batch = pa.record_batch({"value": pa.array(values, pa.binary())})
        return await (await producer.send_batch(stream, batch, streamlet=streamlet))


def part_of(deliveries: Sequence[Delivery], part: float) -> Delivery:
    """The chunk at this fraction of all records: chunks have different numbers of records."""
    return next(each for each in deliveries if each.record >= deliveries[-1].record * part)


async def drained(consumer: Consumer) -> None:
    """Read to the end, without keeping anything."""
    async with asyncio.timeout(TIMEOUT_S):
        async for _ in consumer.batches():
            pass


async def lost_range(client: Client, stream: str, position: Position) -> tuple[Position, Position]:
    """The range that a reader at `position` is reported to have lost."""
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(DataLost) as caught:
            await anext(client.read_range(stream, 0, 0, position, None))
    attributes = caught.value.attributes
    assert (attributes["streamlet_id"], attributes["entry"]) == (0, 0)
    return Position(*attributes["lost_from"]), Position(*attributes["available_from"])


async def first_number(client: Client, stream: str, start: Position) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        chunk = await anext(client.read_range(stream, 0, 0, start, None))
    return number_of(chunk.batch["value"][0].as_py())


# --- more than fits into memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", ["auto", pytest.param("never", marks=pytest.mark.slow)])
async def test_a_log_larger_than_memory_is_read_while_another_reader_follows_the_tail(
    cluster: RunningCluster, client: Client, shared_memory: str
) -> None:
    await client.admin.create_stream("s", group_segments=4)
    first = (await fill(client, "s", 4 * ARENA_BYTES))[-1]
    middle = first.record + first.record_count
    # With what they have fetched ahead, together they hold less than the memory: writers need some as well.
    settings: dict[str, Any] = {"shared_memory": shared_memory, "prefetch_bytes_max": MIB, "fetch_bytes_max": MIB // 2}
    async with (
        client.consumer("s", start="earliest", **settings) as from_start,
        client.consumer("s", start="latest", **settings) as at_tail,
    ):
        last = (await fill(client, "s", 2 * ARENA_BYTES, first=middle))[-1]
        end = last.record + last.record_count

        async def numbers(records: Any, start: int) -> None:
            for number in range(start, end):
                record = await anext(records)
                assert (record.offset, number_of(record.value)) == (number, number)

        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(numbers(aiter(from_start), 0))
            tasks.create_task(numbers(aiter(at_tail), middle))
    assert metric(cluster, "bytes_loaded_total") >= 3 * ARENA_BYTES
    assert metric(cluster, "arena_slots") == ARENA_BYTES // SEGMENT_BYTES, "memory is what it was"


# --- killed ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("durability", ["leader", "persisted"])
async def test_repeated_kills_under_load_lose_no_acknowledged_record(tmp_path: Path, durability: str) -> None:
    """After each restart every acknowledged record is there, once and in order. Long form: `make chaos RUN=kill`."""
    moments = random.Random(1)
    # A segment that was being flushed when the broker died is pinned for a while: five must fit, with room to spare.
    with keeping_cluster(tmp_path, arena_bytes=4 * ARENA_BYTES) as cluster:
        async with (
            await Client.connect(cluster.bootstrap) as client,
            client.producer(chunk_bytes_max=4 * KIB) as producer,
        ):
            await client.admin.create_stream("s", streamlets=2, group_segments=2, durability=durability)
            await producer.prepare("s")
            async with load(producer, timeout_s=200) as running:
                for _ in range(5):
                    wanted = len(running.deliveries) + moments.randrange(500, 3000)
                    await until(lambda wanted=wanted: len(running.deliveries) > wanted)  # type: ignore[misc]
                    await asyncio.to_thread(cluster.kill, BROKER)
                    acknowledged = len(running.deliveries)
                    await asyncio.to_thread(cluster.restart, BROKER)
                    assert metric(cluster, "start_attached") == 1
                    found = await read(client)
                    assert sum(map(len, found.values())) >= acknowledged
                    for streamlet in range(2):
                        assert found[streamlet] == [streamlet + 2 * at for at in range(len(found[streamlet]))]
            found = await read(client)
        tell(cluster)
    for streamlet in range(2):
        delivered = running.of(streamlet)
        assert found[streamlet] == [number for number, _ in delivered]
        places = [(ordinal, each.record) for ordinal, (_, each) in enumerate(delivered) if not is_nowhere(each)]
        assert all(ordinal == record for ordinal, record in places)


async def test_persisted_records_survive_the_loss_of_the_host(cluster: RunningCluster, client: Client) -> None:
    """The producer continues with the same identity, the consumer from its position."""
    await client.admin.create_stream("s", streamlets=2, group_segments=2, durability="persisted")
    async with (
        client.producer(chunk_bytes_max=4 * KIB) as producer,
        client.consumer("s", start="earliest", fetch_wait_ms=50) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        await producer.prepare("s")
        identity = producer._writers.identity
        follower = Follower(consumer)
        following = tasks.create_task(follower.run())
        async with load(producer) as running:
            await until(lambda: len(running.deliveries) > 1000)
            await asyncio.to_thread(lose_host, cluster)
            await asyncio.to_thread(cluster.restart, BROKER)
            assert metric(cluster, "start_lost_memory") == 1
            wanted = len(running.deliveries) + 1000
            await until(lambda: len(running.deliveries) > wanted)
        await until(
            lambda: follower.error is not None or sum(map(len, follower.seen.values())) == len(running.deliveries)
        )
        following.cancel()
        assert follower.error is None, "nothing that was acknowledged or seen is lost"
        assert producer._writers.identity == identity
    found = await read(client)
    for streamlet in range(2):
        delivered = running.of(streamlet)
        assert {each.durability for _, each in delivered} == {"persisted"}
        assert found[streamlet] == follower.seen[streamlet] == [number for number, _ in delivered]
        places = [(ordinal, each.record) for ordinal, (_, each) in enumerate(delivered) if not is_nowhere(each)]
        assert all(ordinal == record for ordinal, record in places)


async def test_starting_at_a_time_with_lost_records_reports_the_loss_to_each_reader(
    cluster: RunningCluster, client: Client
) -> None:
    """The records of the time are lost with the memory of the host; those before and after them are there."""
    await client.admin.create_stream("s", durability="leader")
    async with client.producer() as producer:
        await producer.prepare("s")
        await producer.send("s", b"before", timestamp_us=1_000_000)
    async with client.producer(durability="persisted") as producer:
        await producer.prepare("s")
        await producer.send("s", b"on disk", timestamp_us=2_000_000)
    async with client.producer() as producer:
        await producer.prepare("s")
        await producer.send("s", b"lost", timestamp_us=3_000_000)
    await asyncio.to_thread(lose_host, cluster)
    await asyncio.to_thread(cluster.restart, BROKER)
    async with client.producer() as producer:
        await producer.prepare("s")
        await producer.send("s", b"behind", timestamp_us=4_000_000)
    for unit in ("chunk", "record"):
        ((place,),) = (await client.positions_at("s", 3_000_000, unit=unit)).values()
        assert place.lost_from is not None
        assert await lost_range(client, "s", place.start) == (place.lost_from, place.position)
        async with client.consumer("s", start={0: [place]}, end="latest") as reader:
            with pytest.raises(DataLost):
                await drained(reader)
        async with client.consumer("s", start={0: [place]}, end="latest", on_data_lost="skip") as reader:
            async with asyncio.timeout(TIMEOUT_S):
                assert [record.value async for record in reader] == [b"behind"]
    for time_us, value in ((1_500_000, b"on disk"), (2_000_000, b"on disk")):
        ((place,),) = (await client.positions_at("s", time_us)).values()
        assert place.lost_from is None
        async with asyncio.timeout(TIMEOUT_S):
            chunk = await anext(client.read_range("s", 0, 0, place, None))
        assert value in chunk.batch["value"].to_pylist()

    async with client.group_consumer("late", "s", on_data_lost="skip") as group:
        async with asyncio.timeout(TIMEOUT_S):
            await anext(aiter(group))
    moment = datetime.datetime.fromtimestamp(3, datetime.UTC)
    plan = await client.admin.plan_reset("late", "s", moment)
    assert [change.note.partition(" from ")[0] for change in plan.changes] == ["records"]
    assert plan.changes[0].note.endswith("are lost")
    await client.admin.reset_consumer_group("late", "s", moment)
    async with client.group_consumer("late", "s") as group:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(DataLost):
                await anext(aiter(group))
            assert (await anext(aiter(group))).value == b"behind"


# --- retention, truncation, deletion -----------------------------------------------------------------------


async def test_retention_by_bytes_limits_the_log(cluster: RunningCluster, client: Client, tmp_path: Path) -> None:
    await client.admin.create_stream("s", group_segments=4, retention_bytes=MIB)
    deliveries = await fill(client, "s", 2 * ARENA_BYTES)
    await until(lambda: disk_bytes(log_of(tmp_path)) <= MIB + SEGMENT_BYTES)
    await until(lambda: metric(cluster, "bytes_removed_total") >= 2 * ARENA_BYTES - MIB - SEGMENT_BYTES)
    left = len(list(log_of(tmp_path).rglob("*.segment"))) + 2  # the open one, and one that was just closed
    await until(lambda: metric(cluster, "arena_slots_free") >= ARENA_BYTES // SEGMENT_BYTES - left)
    ((bounds,),) = (await client.bounds("s")).values()
    assert MIB - SEGMENT_BYTES <= bounds.length_bytes <= MIB + SEGMENT_BYTES
    assert await lost_range(client, "s", deliveries[0].position) == (deliveries[0].position, bounds.start)
    assert await first_number(client, "s", bounds.start) == bounds.first_record
    last = deliveries[-1]
    assert bounds.next_record == last.record + last.record_count


async def test_retention_by_age_empties_disk_and_memory(
    cluster: RunningCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s", retention_ms=1500)
    deliveries = await fill(client, "s", 2 * ARENA_BYTES)
    await until(lambda: disk_bytes(log_of(tmp_path)) == 0)
    await until(lambda: metric(cluster, "arena_slots_free") == metric(cluster, "arena_slots"))
    ((bounds,),) = (await client.bounds("s")).values()
    assert (bounds.length_bytes, bounds.first_record) == (0, bounds.next_record), "also what was in the open segment"
    lost, available = await lost_range(client, "s", deliveries[0].position)
    assert (lost, available) == (deliveries[0].position, bounds.start)
    (after,) = await fill(client, "s", 1000, first=bounds.next_record)
    assert after.record == bounds.next_record, "ordinals go on"


async def test_retention_by_consumption_keeps_records_that_a_group_has_not_read(
    cluster: RunningCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s", retention_consumer_groups=["a", "b"], retention_consumed=True)
    deliveries = await fill(client, "s", 2 * ARENA_BYTES)
    before = await settled(cluster, client)
    third, half = part_of(deliveries, 1 / 3), part_of(deliveries, 1 / 2)
    await client.admin.commit_cursors("a", "s", {0: [half.position]})
    await client.admin.commit_cursors("b", "s", {0: [third.position]})
    # Files take whole blocks, and `before` may lack some blocks of files that are still being written.
    await until(lambda: disk_bytes(log_of(tmp_path)) <= before * 2 // 3 + 10 * SEGMENT_BYTES)
    ((bounds,),) = (await client.bounds("s")).values()
    assert deliveries[0].position < bounds.start <= third.position
    segment = [each.record for each in deliveries if each.position[:2] == third.position[:2]]
    assert bounds.first_record == min(segment), "all whole segments before it"
    assert await lost_range(client, "s", deliveries[0].position) == (deliveries[0].position, bounds.start)
    assert await first_number(client, "s", third.position) == third.record

    cluster.kill(BROKER)
    cluster.restart(BROKER)
    async with client.consumer("s", start={0: [bounds.start]}, end="latest", consumer_group="b") as consumer:
        await drained(consumer)
        await consumer.commit()
    await until(lambda: disk_bytes(log_of(tmp_path)) <= before // 2 + 10 * SEGMENT_BYTES)
    ((bounds,),) = (await client.bounds("s")).values()
    segment = [each.record for each in deliveries if each.position[:2] == half.position[:2]]
    assert bounds.first_record == min(segment), "the other one is remembered"


@pytest.mark.slow
async def test_durability_and_retention_can_be_altered_under_load(
    cluster: RunningCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s", streamlets=2)
    async with client.producer(chunk_bytes_max=8 * KIB) as producer:
        await producer.prepare("s")
        async with load(producer) as running:
            await until(lambda: disk_bytes(log_of(tmp_path)) > 2 * MIB)
            assert {each.durability for each in running.deliveries} == {"leader"}
            altered = await client.admin.alter_stream("s", durability="persisted", retention_bytes=256 * KIB)
            assert (altered.config.durability, altered.config.retention_bytes) == ("persisted", 256 * KIB)
            await until(lambda: running.deliveries[-1].durability == "persisted")
            await until(lambda: metric(cluster, "segments_removed_total") > 0)
            await until(lambda: disk_bytes(log_of(tmp_path)) < MIB)
            await asyncio.to_thread(cluster.kill, BROKER)
            await asyncio.to_thread(cluster.restart, BROKER)
            await client.admin.alter_stream("s", durability="leader", retention_bytes=0)
            await until(lambda: running.deliveries[-1].durability == "leader")
            await until(lambda: disk_bytes(log_of(tmp_path)) > 2 * MIB)
        found = await read(client)
    for streamlet in range(2):
        numbers = [number for number, _ in running.of(streamlet)]
        assert found[streamlet] == numbers[-len(found[streamlet]) :]


async def test_truncation_frees_disk_and_survives_a_kill(
    cluster: RunningCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s", streamlets=2, group_segments=4)
    deliveries = await fill(client, "s", 2 * ARENA_BYTES)
    other = await fill(client, "s", MIB, streamlet=1)
    before = await settled(cluster, client)
    middle = part_of(deliveries, 1 / 2)
    starts = await client.admin.truncate_stream("s", {0: [middle.position]})
    assert starts == {0: [middle.position]}
    await until(lambda: disk_bytes(log_of(tmp_path)) <= before - ARENA_BYTES + 2 * SEGMENT_BYTES)
    assert await lost_range(client, "s", deliveries[0].position) == (deliveries[0].position, middle.position)

    cluster.kill(BROKER)
    cluster.restart(BROKER)
    bounds = await client.bounds("s")
    assert (bounds[0][0].start, bounds[0][0].first_record) == (middle.position, middle.record), "for ever"
    assert await first_number(client, "s", middle.position) == middle.record
    assert (bounds[1][0].start, bounds[1][0].first_record) == (other[0].position, 0), "as it was"

    await client.admin.truncate_stream("s", "latest")
    await until(lambda: disk_bytes(log_of(tmp_path)) <= 2 * SEGMENT_BYTES)
    assert await read(client) == {0: [], 1: []}
    assert (await lost_range(client, "s", middle.position))[1] == (await client.bounds("s"))[0][0].end
    (after,) = await fill(client, "s", 1000)
    assert after.record == deliveries[-1].record + deliveries[-1].record_count


async def test_deleting_a_stream_frees_memory_and_disk_with_a_reader_attached(
    cluster: RunningCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s")
    await client.admin.create_stream("t")
    (kept,) = await fill(client, "t", 1000)
    await fill(client, "s", 4 * ARENA_BYTES)
    await settled(cluster, client)
    ahead = 256 * KIB
    async with client.consumer("s", start="earliest", prefetch_bytes_max=ahead, fetch_bytes_max=ahead) as consumer:
        async with asyncio.timeout(TIMEOUT_S):
            held = await anext(consumer.batches())
        await client.admin.delete_stream("s")
        await until(lambda: disk_bytes(log_of(tmp_path)) <= SEGMENT_BYTES)  # the rest belongs to the other stream
        leased = 2 * ahead // SEGMENT_BYTES + 4  # the segments that the reader has fetched
        assert metric(cluster, "arena_slots_free") >= ARENA_BYTES // SEGMENT_BYTES - leased
        assert [number_of(value) for value in held.batch["value"].to_pylist()] == list(range(held.batch.num_rows))
        with pytest.raises(UnknownStream):
            await drained(consumer)
    del held, consumer  # its error, with its traceback, refers to the last batch
    gc.collect()
    await until(lambda: metric(cluster, "arena_slots_free") >= ARENA_BYTES // SEGMENT_BYTES - 1)
    assert await first_number(client, "t", kept.position) == 0


# --- a disk that is full -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB at the place of the broker's log."""
    path = tmp_path / BROKER
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here: root is needed")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("durability", [pytest.param("leader", marks=pytest.mark.slow), "persisted"])
async def test_a_full_disk_stops_only_writers_and_only_until_there_is_room(
    small_disk: Path, tmp_path: Path, durability: str
) -> None:
    with keeping_cluster(tmp_path, arena_bytes=ARENA_BYTES) as cluster:
        patience = ClientSettings.load(request_timeout_ms=20_000)
        async with await Client.connect(cluster.bootstrap, patience) as client:
            await client.admin.create_stream("s", streamlets=2, durability=durability)
            filler = fill_up(small_disk, 2 * MIB)
            errors: list[KeraError] = []
            async with client.producer(chunk_bytes_max=8 * KIB, delivery_timeout_ms=1_000) as impatient:
                # Until it gets the error, and not by a time-out: a record that is given up is not sent again.
                written = await fill(client, "s", MIB // 2)
                number = written[-1].record + written[-1].record_count
                async with asyncio.timeout(TIMEOUT_S):
                    while not errors:
                        batch = pa.record_batch({"value": pa.array([value_of(number)] * 100, pa.binary())})
                        sent = await impatient.send_batch("s", batch, streamlet=1)
                        try:
                            await sent
                        except KeraError as error:
                            errors.append(error)
                with contextlib.suppress(KeraError):
                    await impatient.flush()
            # For chunks after the first refused one, `OutOfSequence` may be the last error.
            assert all(error.retriable for error in errors)
            assert any(isinstance(e, (DiskFull, NotPersisted)) or "disk has no room" in e.message for e in errors)
            assert metric(cluster, "disk_failing") == 1
            if durability == "persisted":  # for `leader`, see below
                assert await first_number(client, "s", written[0].position) == 0, "readers go on"

            # A more patient producer notices nothing.
            async with client.producer(chunk_bytes_max=8 * KIB, name="patient") as patient:
                await patient.prepare("s")
                pending = [patient.send("s", value_of(n), streamlet=0) for n in range(number, number + 2000)]
                await until(lambda: len(log_events(cluster, "cannot write the log; retrying")) > 0)
                filler.unlink()
                async with asyncio.timeout(TIMEOUT_S):
                    deliveries = [await each for each in pending]
            assert [each.record for each in deliveries] == list(range(number, number + 2000))
            await until(lambda: metric(cluster, "disk_failing") == 0)
            cluster.kill(BROKER)
            cluster.restart(BROKER)
            async with client.consumer("s", start="earliest", end="latest") as consumer:
                found = [number_of(record.value) async for record in consumer if record.streamlet == 0]
            assert found == list(range(number + 2000))


@pytest.mark.slow
async def test_readers_of_the_disk_continue_while_memory_is_full_of_unwritten_data(
    small_disk: Path, tmp_path: Path
) -> None:
    with keeping_cluster(tmp_path, arena_bytes=ARENA_BYTES) as cluster:
        patience = ClientSettings.load(retry_timeout_ms=1_000)
        async with await Client.connect(cluster.bootstrap, patience) as client:
            await client.admin.create_stream("s")
            (first, *_) = await fill(client, "s", 2 * ARENA_BYTES)
            filler = fill_up(small_disk, 0)
            producer = client.producer(chunk_bytes_max=16 * KIB, delivery_timeout_ms=1_000)
            batch = pa.record_batch({"value": pa.array([value_of(1499)] * 5_000, pa.binary())})  # 8 MB
            await producer.send_batch("s", batch)
            with pytest.raises(KeraError):
                await producer.close()
            try:
                assert await first_number(client, "s", first.position) == 0
            finally:
                filler.unlink()


@pytest.mark.parametrize(
    "slots", [pytest.param(4, marks=pytest.mark.slow), 8, pytest.param(64, marks=pytest.mark.slow)]
)
async def test_new_readers_of_the_disk_continue_beside_readers_that_hold_memory(
    small_disk: Path, tmp_path: Path, slots: int
) -> None:
    """The disk takes no writes, memory is full of unwritten segments, and readers release nothing.

    Half of the readers have got their chunks while the disk still worked.
    """
    arena_bytes = slots * 64 * KIB
    with keeping_cluster(tmp_path, arena_bytes=arena_bytes) as cluster:
        patience = ClientSettings.load(retry_timeout_ms=10_000)
        async with await Client.connect(cluster.bootstrap, patience) as client, contextlib.AsyncExitStack() as stack:
            held: list[ChunkBatch] = []

            async def hold(places: Sequence[Delivery]) -> None:
                for place in places:
                    consumer = client.consumer("s", start={0: [place.position]})
                    batches = (await stack.enter_async_context(consumer)).batches()
                    async with asyncio.timeout(TIMEOUT_S):
                        held.append(await anext(batches))

            await client.admin.create_stream("s")
            written = await fill(client, "s", MIB)
            places = written[:: len(written) // 24]
            await hold(places[::2])
            filler = fill_up(small_disk, 0)
            producer = client.producer(chunk_bytes_max=16 * KIB, delivery_timeout_ms=1_000)
            batch = pa.record_batch({"value": pa.array([value_of(1499)] * 5_000, pa.binary())})  # 8 MB
            await producer.send_batch("s", batch)
            with pytest.raises(KeraError):
                await producer.close()

            try:
                await hold(places[1::2])
                found = [number_of(each.batch["value"][0].as_py()) for each in held]
                assert found == [place.record for place in (*places[::2], *places[1::2])]
            finally:
                filler.unlink()


async def test_a_broker_killed_with_a_full_disk_restarts_without_loss(small_disk: Path, tmp_path: Path) -> None:
    with keeping_cluster(tmp_path, arena_bytes=ARENA_BYTES) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", retention_consumer_groups=["a"], retention_consumed=True)
            deliveries = await fill(client, "s", ARENA_BYTES)
            middle = deliveries[len(deliveries) // 2]
            await client.admin.truncate_stream("s", {0: [middle.position]})
            filler = fill_up(small_disk, 0)
            cluster.kill(BROKER)
            with contextlib.suppress(KeraError):  # it may well refuse to start
                await asyncio.to_thread(cluster.restart, BROKER)
            filler.unlink()
            await asyncio.to_thread(cluster.restart, BROKER)
            assert not log_events(cluster, "rebuilding the damaged index from the segments")
            ((bounds,),) = (await client.bounds("s")).values()
            assert (bounds.start, bounds.first_record) == (middle.position, middle.record)
            assert bounds.next_record == deliveries[-1].record + deliveries[-1].record_count
            assert await first_number(client, "s", middle.position) == middle.record
            assert arena_of(cluster).exists()
