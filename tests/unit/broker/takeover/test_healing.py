"""Healing of segment files: chunks of a damaged, missing or mixed-up file are read from backups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kera.broker.records import SegmentAddress, SegmentRecord
from kera.core.base.ids import EARLIEST
from kera.core.errors import DataLost
from kera.core.rpc import api
from kera.v1 import broker_pb2, common_pb2
from tests.unit.broker.support import STREAM_ID, read_range
from tests.unit.broker.takeover_support import Cluster, Node, owned_by

FIRST = SegmentAddress(STREAM_ID, 0, 0, 1, 1)
SECOND = FIRST._replace(segment_id=2)


async def stored(world: Cluster) -> tuple[common_pb2.StreamInfo, list[bytes], dict[SegmentAddress, Path]]:
    """A stream of broker 1, which has stopped: its chunks, and the files of its segments."""
    node = world.nodes[1]
    info = owned_by(1, world.epoch(), entries=1)
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    for _ in range(12):
        assert not any(status.error.code for status in await node.write(*world.chunks(0, 4)))
    chunks, _ = await node.read()
    await node.stop()
    store = node.engine.restart.store
    engine = await node.begin()
    files = {address: store.path(each.physical_id) for address, each in engine.restart.index.all_segments()}
    await node.stop()
    assert len(files) > 3
    return info, chunks, files


async def start(world: Cluster, info: common_pb2.StreamInfo) -> Node:
    for assignment in info.assignments:
        assignment.broker_epoch = world.epoch()
    await world.nodes[1].start(assignment.broker_epoch, info)
    return world.nodes[1]


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def swapped(files: dict[SegmentAddress, Path]) -> None:
    swap(files[FIRST], files[SECOND])


def flipped(files: dict[SegmentAddress, Path]) -> None:
    for path in (files[FIRST], files[SECOND]):
        data = bytearray(path.read_bytes())
        data[300] ^= 1
        path.write_bytes(data)


def gone(files: dict[SegmentAddress, Path]) -> None:
    for address in (FIRST, SECOND):
        files[address].unlink()


def aside(node: Node) -> list[str]:
    return sorted(path.name for path in (node.settings.data_dir / "log/set-aside").glob("*"))


@pytest.mark.parametrize("damage", [swapped, flipped, gone])
async def test_chunks_that_a_file_lacks_are_read_from_backups_and_written_to_a_new_file(
    world: Cluster, damage: Callable[[dict[SegmentAddress, Path]], None]
) -> None:
    info, chunks, files = await stored(world)
    damage(files)
    node = await start(world, info)
    with capture_logs() as lines:
        assert (await node.read())[0] == chunks
        before = [files[FIRST], files[SECOND]]
        await node.until(lambda: sum("wrote it to a new file" in line["event"] for line in lines) == 2)
    assert not any("not be served" in line["event"] for line in lines)
    assert node.engine.memory.totals.chunks_damaged == 2
    assert aside(node) == ([] if damage is gone else sorted(path.name for path in before))
    if damage is swapped:
        told = [line for line in lines if "mixed up" in line["event"]]
        assert {(line["path"], "segment 2" in line["found"]) for line in told} == {
            (str(files[FIRST]), True),
            (str(files[SECOND]), False),
        }
    await node.stop()
    node = await start(world, info)
    anew = {address: node.engine.restart.store.path(each.physical_id) for address, each in index_of(node)}
    assert all(anew[address] != files[address] for address in (FIRST, SECOND))
    for backup in world.backups:
        await backup.stop()
    assert (await node.read())[0] == chunks, "from its own disk alone"
    await node.stop()


def index_of(node: Node) -> list[tuple[SegmentAddress, SegmentRecord]]:
    return list(node.engine.restart.index.all_segments())


async def answer(node: Node) -> str:
    request = broker_pb2.MultiReadChunksRequest(ranges=[read_range(EARLIEST)])
    (result,) = (await node.ask(api.MULTI_READ_CHUNKS, request)).message.results
    return str(result.error.code)


async def test_readers_wait_for_absent_backups_that_have_the_missing_chunks(world: Cluster) -> None:
    info, chunks, files = await stored(world)
    for backup in world.backups:
        await backup.stop()
    swapped(files)
    node = await start(world, info)
    assert await answer(node) == "recovering"
    for backup in world.backups:
        await backup.start()
    node.told()
    assert (await node.read())[0] == chunks
    await node.stop()


async def test_readers_do_not_wait_for_absent_backups_without_the_missing_chunks(world: Cluster) -> None:
    """A recovery found that no backup has the chunks."""
    info, _, files = await stored(world)
    for backup in world.backups:
        await backup.stop()
    flipped(files)
    node = await start(world, info)
    for place in node.engine.replication.coverage.segments.values():
        place.extents = [extent for extent in place.extents if extent.address != FIRST]
    assert await answer(node) == "data_lost"
    await node.stop()


async def test_chunks_that_no_backup_has_are_lost_and_their_files_are_kept(world: Cluster) -> None:
    info, chunks, files = await stored(world)
    for backup in world.backups:
        await backup.stop()
        backup.draining = True
    first, second = files[FIRST].read_bytes(), files[SECOND].read_bytes()
    swapped(files)
    node = await start(world, info)
    node.engine.replication.coverage.without(1)
    node.engine.replication.coverage.without(2)
    node.engine.replication.coverage.without(3)
    with pytest.raises(DataLost):
        await node.read()
    found, _ = await node.read(skip_lost=True)
    assert 0 < len(found) < len(chunks)
    kept = {path.name: path.read_bytes() for path in (node.settings.data_dir / "log/set-aside").iterdir()}
    assert kept == {files[FIRST].name: second, files[SECOND].name: first}
    files[FIRST].write_bytes(first)
    files[SECOND].write_bytes(second)
    await node.stop()
    node = await start(world, info)
    assert (await node.read())[0] == chunks, "once the right files are back in their places"
    await node.stop()
