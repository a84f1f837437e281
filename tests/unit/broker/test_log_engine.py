"""The log engine with its threads and clock: starts, ends, and the data that one launch leaves to the next."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from structlog.testing import capture_logs

from kera.broker.engine import TICK_S, LogEngine
from kera.broker.log.arena import Arena
from kera.broker.log.read_plan import plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.stream_records import stream_record
from kera.broker.ownership.unknown import UnknownReport
from kera.broker.settings import BrokerSettings
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.clock import SystemClock
from kera.core.base.ids import EARLIEST
from kera.core.errors import PathNotWritable, SharedMemoryTooSmall, StartError
from kera.core.format.chunk import verify_header
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.broker.support import BROKER_ID, SLOT_BYTES, STREAM_ID, chunk, headers, stream_info

SEGMENT = 4
SLOTS = 8


@pytest.fixture
def settings(root: Path, shm_dir: Path) -> BrokerSettings:
    return BrokerSettings(
        data_dir=root,
        shm_dir=shm_dir,
        segment_bytes=ByteSize(SLOT_BYTES),
        arena_bytes=ByteSize(SLOTS * SLOT_BYTES),
        coordinator="nobody:1",
    )


def change(settings: BrokerSettings, **values: Any) -> BrokerSettings:
    return settings.model_copy(update=values)


@asynccontextmanager
async def started(settings: BrokerSettings, tick_s: float = TICK_S, **stream: Any) -> AsyncIterator[LogEngine]:
    engine = await LogEngine.start(settings, settings.data_dir, tick_s=tick_s)
    try:
        engine.streams.open(stream_info(**stream), BROKER_ID)
        yield engine
    finally:
        await engine.close()


async def kill(engine: LogEngine) -> None:
    """End the engine as a signal would: without a flush; the arena stays, but its lock goes."""
    await engine.close(flush=False)


def streamlet_of(engine: LogEngine) -> Streamlet:
    return engine.streams.get(STREAM_ID).streamlet(0)


def append(engine: LogEngine, *sequences: int, **fields: Any) -> None:
    streamlet = streamlet_of(engine)
    for sequence in sequences:
        data = chunk(1, sequence, **fields)
        streamlet.publish(streamlet.append(memoryview(data), verify_header(data)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def read_all(engine: LogEngine) -> list[int]:
    streamlet, here, found = streamlet_of(engine), EARLIEST, list[int]()
    while True:
        plan = plan_read(streamlet, 0, here, None, 1 << 20)
        found += [header.sequence for header in headers(plan)]
        here = plan.next
        for part in plan.ranges:
            engine.memory.slots.touched(part.segment)
        if plan.missing is not None:
            loaded = asyncio.get_running_loop().create_future()
            engine.memory.loads.load(streamlet.entries[0], plan.missing, loaded.set_result)
            assert await loaded is None
        elif not plan.ranges:
            return found


@pytest.mark.parametrize("known", [False, True])
async def test_memory_of_a_removed_log_is_attached_only_if_the_broker_is_known(
    settings: BrokerSettings, *, known: bool
) -> None:
    """Otherwise its content would stay there unused, and a new broker might get no memory at all."""
    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, 0)
    await kill(engine)
    shutil.rmtree(settings.data_dir / "log")
    if known:  # the broker is still the same, although its log is gone
        (settings.data_dir / "broker.json").write_text("{}")
    async with started(settings) as engine:
        assert engine.restart.found.attached is known
        assert known or engine.arena.free_slots == SLOTS
        assert [path.name for path in settings.shm_dir.iterdir()] == [engine.arena.path.name]


async def test_a_clean_end_loses_no_chunks(settings: BrokerSettings) -> None:
    async with started(settings) as engine:
        append(engine, *range(9))
    assert list(settings.shm_dir.iterdir()) == []
    async with started(settings) as engine:
        found = engine.restart.found
        assert (found.attached, found.lost_memory, found.repaired) == (False, False, False)
        assert await read_all(engine) == list(range(9))


async def test_a_log_larger_than_memory_can_be_written_and_read(settings: BrokerSettings) -> None:
    async with started(settings) as engine:
        for first in range(0, 20 * SEGMENT, SEGMENT):
            append(engine, *range(first, first + SEGMENT))
            await until(lambda: len(engine.memory.segments.closed) < 2 and not engine.memory.locked)
        assert await read_all(engine) == list(range(20 * SEGMENT))
        assert engine.memory.totals.segments_evicted > 0


async def test_a_kill_loses_no_chunks(settings: BrokerSettings) -> None:
    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, *range(9))
    await kill(engine)
    async with started(settings) as engine:
        assert (engine.restart.found.attached, engine.restart.found.lost_memory) == (True, False)
        assert await read_all(engine) == list(range(9))


async def test_the_log_of_another_directory_is_refused_and_stays_as_it_is(settings: BrokerSettings) -> None:
    engine = await LogEngine.start(settings, settings.data_dir)
    await engine.own([], BROKER_ID, 7, directory_id="mine")
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, *range(SEGMENT))
    await engine.close()

    for _ in range(2):
        with pytest.raises(StartError, match=r"is not the log of the broker that .*broker\.json names.*mixed up"):
            await LogEngine.start(settings, settings.data_dir, directory_id="another")
    engine = await LogEngine.start(settings, settings.data_dir, directory_id="mine")
    assert not engine.restart.found.repaired
    engine.streams.open(stream_info(), BROKER_ID)
    assert await read_all(engine) == list(range(SEGMENT))
    await engine.close()


@pytest.mark.parametrize("killed", [True, False])
async def test_a_loss_of_memory_is_found_by_each_launch_until_one_has_registered(
    settings: BrokerSettings, *, killed: bool
) -> None:
    """A launch that ends before its registration leaves memory, or a clean end, without a trace of the loss."""
    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, 0)
    await kill(engine)
    for path in settings.shm_dir.iterdir():
        path.unlink()
    for _ in range(2):
        engine = await LogEngine.start(settings, settings.data_dir)
        assert engine.restart.found.lost_memory
        await (kill(engine) if killed else engine.close())
    engine = await LogEngine.start(settings, settings.data_dir)
    assert engine.restart.found.lost_memory
    await engine.own([], BROKER_ID, 7)
    await kill(engine)
    engine = await LogEngine.start(settings, settings.data_dir)
    assert not engine.restart.found.lost_memory
    await engine.close()


@pytest.mark.parametrize(("slots", "slot_bytes"), [(4, SLOT_BYTES), (SLOTS, 2 * SLOT_BYTES)])
async def test_memory_of_another_size_is_flushed_to_disk_before_it_is_replaced(
    settings: BrokerSettings, slots: int, slot_bytes: int
) -> None:
    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, *range(9))
    await kill(engine)
    other = change(settings, arena_bytes=ByteSize(slots * slot_bytes), segment_bytes=ByteSize(slot_bytes))
    async with started(other) as engine:
        assert (engine.arena.slot_count, engine.arena.slot_bytes) == (slots, slot_bytes)
        assert len(list(settings.shm_dir.iterdir())) == 1
        assert await read_all(engine) == list(range(9))
        append(engine, 9)
        assert await read_all(engine) == list(range(10))


async def test_a_segment_size_below_that_of_existing_segments_stops_the_start(settings: BrokerSettings) -> None:
    larger = change(settings, segment_bytes=ByteSize(2 * SLOT_BYTES))
    async with started(larger) as engine:
        append(engine, 0)
    with pytest.raises(StartError, match="--segment-bytes 8192"):
        await LogEngine.start(settings, settings.data_dir)
    async with started(larger) as engine:
        assert await read_all(engine) == [0]


async def test_chunks_that_the_disk_refuses_at_the_end_stay_in_memory_for_the_next_launch(
    settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        async with started(settings) as engine:
            append(engine, *range(6))
            context.setattr(LocalDisk, "write", fail)
    assert len(list(settings.shm_dir.iterdir())) == 1
    async with started(settings) as engine:
        assert engine.restart.found.attached
        assert await read_all(engine) == list(range(6))
    assert list(settings.shm_dir.iterdir()) == []


async def test_a_stop_without_time_to_flush_logs_the_bytes_left_and_keeps_them(
    settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as context:
        async with started(change(settings, stop_flush_ms=0)) as engine:
            append(engine, *range(6))
            left = engine.memory.segments.bytes_left
            context.setattr(engine.memory, "plan", list)  # the disk gets no jobs
    assert left > 0
    assert f"bytes={left}" in capsys.readouterr().err
    assert len(list(settings.shm_dir.iterdir())) == 1
    async with started(settings) as engine:
        assert engine.restart.found.attached
        assert await read_all(engine) == list(range(6))
    assert list(settings.shm_dir.iterdir()) == []


async def test_memory_is_allocated_outside_the_thread_of_the_loop(
    settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocation takes half a second for each GiB: probes would find a stuck loop, and restart the broker."""
    create, threads = Arena.create, list[threading.Thread]()

    def noting(*arguments: Any, **settings: Any) -> Arena:
        threads.append(threading.current_thread())
        return create(*arguments, **settings)

    monkeypatch.setattr(Arena, "create", noting)
    async with started(settings):
        assert len(threads) == 1
        assert threads != [threading.current_thread()]


async def test_memory_that_cannot_be_flushed_stops_a_start_with_another_size(
    settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, *range(9))
    await kill(engine)
    with monkeypatch.context() as context:
        context.setattr(LocalDisk, "write", fail)
        with pytest.raises(StartError, match=f"--arena-bytes {settings.arena_bytes} --segment-bytes"):
            await LogEngine.start(change(settings, arena_bytes=ByteSize(4 * SLOT_BYTES)), settings.data_dir)
    async with started(settings) as engine:
        assert await read_all(engine) == list(range(9))


async def test_an_ephemeral_broker_flushes_nothing_at_its_end_and_leaves_no_memory(settings: BrokerSettings) -> None:
    async with started(change(settings, ephemeral=True)) as engine:
        append(engine, *range(3))

    assert list(settings.shm_dir.iterdir()) == []
    assert list((settings.data_dir / "log").rglob("*.segment")) == []


async def test_a_damaged_index_is_rebuilt_without_loss(settings: BrokerSettings) -> None:
    async with started(settings) as engine:
        append(engine, *range(9))
    data = settings.data_dir / "log" / "index" / "data.mdb"
    data.write_bytes(os.urandom(data.stat().st_size))
    async with started(settings) as engine:
        assert engine.restart.found.repaired
        assert await read_all(engine) == list(range(9))


@asynccontextmanager
async def registered(
    settings: BrokerSettings, *owned: common_pb2.StreamInfo, elsewhere: tuple[int, ...] = ()
) -> AsyncIterator[LogEngine]:
    """A started engine that has been given its streams by the coordinator."""
    engine = await LogEngine.start(settings, settings.data_dir)
    try:
        await engine.own(owned, BROKER_ID, 9, elsewhere=elsewhere)
        for info in owned:
            engine.streams.open(info, BROKER_ID)
        await until(lambda: engine.memory.idle)
        yield engine
    finally:
        await engine.close()


async def dropped(engine: LogEngine, stream_id: int) -> None:
    done = asyncio.get_running_loop().create_future()
    engine.streams.drop(stream_id, done.set_result)
    assert await done is None


async def test_streams_that_are_elsewhere_are_removed_with_their_files(settings: BrokerSettings) -> None:
    async with started(settings) as engine:
        append(engine, *range(5))
    async with registered(settings, stream_info(8), elsewhere=(STREAM_ID,)) as engine:
        assert engine.restart.index.stream_ids() == {8}
        await until(lambda: list(engine.restart.store.physical_ids()) == [])
        assert engine.streams.unknown == {}


async def test_files_taken_into_a_new_index_are_kept_although_their_streams_are_elsewhere(
    settings: BrokerSettings,
) -> None:
    async with started(settings) as engine:
        append(engine, *range(5))
        engine.memory.segments.close_all()
        await until(lambda: engine.memory.idle)
        files = list(engine.restart.store.physical_ids())
    shutil.rmtree(settings.data_dir / "log" / "index")
    for _ in range(2):  # the second launch does not look at them again
        async with registered(settings, stream_info(8), elsewhere=(STREAM_ID,)) as engine:
            assert engine.restart.index.stream_ids() <= {8}
            assert engine.restart.index.removals() == []
            assert list(engine.restart.store.physical_ids()) == files


async def test_an_unknown_stream_is_reported_and_kept_until_it_is_opened(settings: BrokerSettings) -> None:
    async with started(settings) as engine:
        append(engine, *range(5))
    async with registered(settings, stream_info(8)) as engine:
        assert engine.streams.unknown.keys() == {STREAM_ID}
        assert engine.streams.unknown[STREAM_ID].bytes > 0
        assert STREAM_ID not in engine.streams
        report = UnknownReport(engine.streams, lambda: 7)
        named, told = coordinator_pb2.HeartbeatRequest(), coordinator_pb2.HeartbeatRequest()
        report.fill(named)
        assert [one.stream_id for one in named.held_streams] == [STREAM_ID, 8]
        report.answered(coordinator_pb2.HeartbeatResponse(coordinator_epoch=7, unknown_stream_ids=[STREAM_ID]))
        report.fill(told)
        report.answered(coordinator_pb2.HeartbeatResponse(coordinator_epoch=7))
        (one,) = told.unknown_streams
        assert (one.stream.stream_id, one.bytes) == (STREAM_ID, engine.streams.unknown[STREAM_ID].bytes)
    async with registered(settings, stream_info(8)) as engine:
        engine.streams.open(stream_info(), BROKER_ID)
        assert await read_all(engine) == list(range(5))
        assert engine.streams.unknown == {}


async def test_an_unknown_stream_is_dropped_on_order(settings: BrokerSettings) -> None:
    async with started(settings) as engine:
        append(engine, *range(5))
    async with registered(settings) as engine:
        await dropped(engine, STREAM_ID)
        assert engine.restart.index.stream_ids() == set()
        await until(lambda: list(engine.restart.store.physical_ids()) == [])
        assert engine.streams.unknown == {}


async def test_an_unknown_stream_in_memory_only_is_kept_there(settings: BrokerSettings) -> None:
    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, 0, 1)
    await kill(engine)
    async with registered(settings) as engine:
        assert engine.streams.unknown[STREAM_ID].bytes > 0
        engine.streams.open(stream_info(), BROKER_ID)
        assert await read_all(engine) == [0, 1]


async def test_an_unknown_stream_in_memory_only_is_flushed_when_the_broker_stops(
    settings: BrokerSettings,
) -> None:
    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, 0, 1)
    await kill(engine)
    async with registered(settings):
        pass
    assert list(settings.shm_dir.iterdir()) == []
    async with started(settings) as engine:
        assert await read_all(engine) == [0, 1]


async def test_dropping_an_unknown_stream_in_memory_only_frees_its_memory(settings: BrokerSettings) -> None:
    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, 0, 1)
    await kill(engine)
    async with registered(settings) as engine:
        assert engine.arena.free_slots == SLOTS - 1
        await dropped(engine, STREAM_ID)
        await until(lambda: engine.arena.free_slots == SLOTS)
        assert engine.restart.index.stream_ids() == set()


async def test_a_launch_that_ends_before_its_registration_loses_no_chunks(settings: BrokerSettings) -> None:
    engine = await LogEngine.start(settings, settings.data_dir)
    engine.streams.open(stream_info(), BROKER_ID)
    append(engine, 0, 1)
    await kill(engine)
    await (await LogEngine.start(settings, settings.data_dir)).close()
    async with started(settings) as engine:
        assert await read_all(engine) == [0, 1]


async def test_streamlets_stay_when_the_received_assignments_are_older(settings: BrokerSettings) -> None:
    newer = stream_info()
    newer.assignments_version = 5
    async with registered(settings, newer) as engine:
        append(engine, *range(5))
    older = stream_info()
    older.assignments_version = 3
    for assignment in older.assignments:
        assignment.broker_id = BROKER_ID + 1
    async with registered(settings, older):
        pass
    async with registered(settings, newer) as engine:
        assert await read_all(engine) == list(range(5))


async def test_the_record_of_a_stream_survives_a_restart(settings: BrokerSettings) -> None:
    info = stream_info()
    async with registered(settings, info):
        pass
    async with registered(settings) as engine:
        assert engine.held_streams() == {STREAM_ID: info.assignments_version}
        assert stream_record(engine.restart.index, STREAM_ID) == info


async def test_retention_goes_by_the_clock_of_the_broker(settings: BrokerSettings) -> None:
    async with started(settings, tick_s=0.002, retention_ms=3_600_000) as engine:
        made_us = SystemClock().now_us() + 1000 * 3_600_000_000  # their producer's clock is wrong
        engine.memory.now_us -= 2 * 3_600_000_000
        append(engine, *range(2 * SEGMENT), created_us=made_us)
        engine.memory.now_us += 2 * 3_600_000_000
        append(engine, 2 * SEGMENT, created_us=made_us)
        entry = streamlet_of(engine).entries[0]
        await until(lambda: entry.start_record == 2 * SEGMENT and engine.memory.idle)
        assert await read_all(engine) == [2 * SEGMENT]


async def test_a_failing_part_of_a_tick_stops_neither_the_other_parts_nor_later_ticks(
    settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    async with started(settings, tick_s=0.002) as engine:
        with capture_logs() as lines, monkeypatch.context() as failing:
            failing.setattr(PersistenceManager, "tick", fail)
            before_ms = engine.memory.now_ms
            await until(lambda: engine.replication.logs.now_ms > before_ms + 10)
            assert engine.memory.now_ms == before_ms
        assert [line["part"] for line in lines if "part" in line] == ["memory"]
        await until(lambda: engine.memory.now_ms > before_ms + 10)


async def test_idle_segments_go_to_disk(settings: BrokerSettings) -> None:
    async with started(change(settings, idle_close_ms=100), tick_s=0.002) as engine:
        append(engine, 0)
        entry = streamlet_of(engine).entries[0]
        await until(lambda: entry.last_stored == (1, 1))
        assert await read_all(engine) == [0]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_segment_written_before_the_first_tick_is_not_idle(settings: BrokerSettings, killed: bool) -> None:
    if killed:
        engine = await LogEngine.start(settings, settings.data_dir)
        engine.streams.open(stream_info(), BROKER_ID)
        append(engine, 0)
        await kill(engine)
    async with started(settings) as engine:
        if not killed:
            append(engine, 0)
        head = streamlet_of(engine).entries[0].tail[0]
        ticked = engine.memory.now_ms
        await until(lambda: engine.memory.now_ms != ticked)
        assert not head.closed


@pytest.mark.parametrize("place", ["log", "shm"])
async def test_the_error_names_a_directory_that_cannot_be_written(settings: BrokerSettings, place: str) -> None:
    if place == "log":
        (settings.data_dir / "log").touch()
        wrong = settings
    else:
        wrong = change(settings, shm_dir=settings.shm_dir / "nowhere")
    with pytest.raises(PathNotWritable) as raised:
        await LogEngine.start(wrong, wrong.data_dir)

    assert raised.value.attributes["path"] in (str(settings.data_dir / "log"), str(wrong.shm_dir))


async def test_a_start_without_enough_memory_leaves_nothing_behind(settings: BrokerSettings) -> None:
    with pytest.raises(SharedMemoryTooSmall):
        await LogEngine.start(change(settings, arena_bytes=ByteSize(1 << 50)), settings.data_dir)
    assert list(settings.shm_dir.iterdir()) == []

    async with started(settings) as engine:
        assert await read_all(engine) == []
