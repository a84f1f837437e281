"""Recovery in the background: chunks that readers need come first, as far as memory and disk allow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kera.broker.recovery.rebuild import RebuildLimits
from kera.broker.recovery.scan import VirtualKey
from kera.core.base.ids import Position
from kera.core.format.chunk import ChunkHeader
from kera.core.rpc import api
from kera.v1 import broker_pb2
from tests.examples import first_quick
from tests.unit.broker.support import STREAM_ID, cursor
from tests.unit.broker.takeover_support import (
    IN_FILES,
    QUICK,
    Cluster,
    arriving,
    everything,
    header_of,
    progress,
    written,
)


@pytest.mark.parametrize("assembled_bytes_max", first_quick([4096, 0, 40 << 10], 1))
async def test_segments_without_room_in_memory_are_assembled_in_their_files(
    world: Cluster, assembled_bytes_max: int
) -> None:
    info, stored = await written(world, 20)
    node = world.nodes[2]
    node.limits = RebuildLimits(assembled_bytes_max=assembled_bytes_max, read_bytes_max=4096)
    await node.start(world.epoch())
    await world.take_over(info, 1, 2)
    assert await everything(world, 2) == stored
    await node.until_restored()
    assert await everything(world, 2) == stored
    await node.stop()


@pytest.mark.parametrize("failing", first_quick([True, False], 1))
async def test_chunks_that_consumer_groups_have_yet_to_read_come_first(world: Cluster, failing: bool) -> None:
    """In all entries and from any replica, also when reads fail for a while."""
    info, stored = await written(world, 30)
    halves = [len(stored) // 6, len(stored) // 2 + len(stored) // 3]
    cursors = {header.entry: header for header in (header_of(stored[at]) for at in halves)}
    assert len(cursors) == 2
    tried: Counter[VirtualKey] = Counter()

    def fail(key: VirtualKey) -> bool:
        tried[key] += 1
        return failing and tried[key] <= 2  # on both backups

    world.reads.fail = fail
    node = world.nodes[2]
    node.limits = replace(QUICK, parallel_max=1)
    await node.start(world.epoch())
    at = [cursor(Position(header.group_id, header.segment_id, 0), entry=entry) for entry, header in cursors.items()]
    await world.take_over(info, 1, 2, cursors=at)
    await node.until(lambda: all(each.readable for each in progress(node)))

    def wanted(header: ChunkHeader) -> bool:
        start = cursors[header.entry]
        return (header.group_id, header.segment_id) >= (start.group_id, start.segment_id)

    order = [any(map(wanted, headers)) for headers in world.reads.chunks.values()]
    assert True in order
    assert False in order
    assert order == sorted(order, reverse=True)
    assert await everything(world, 2) == stored
    await node.stop()


async def test_a_search_for_missing_chunks_does_not_give_up_unread_replicas(world: Cluster) -> None:
    """The search for missing chunks may come before the replicas that have them are ordered or read."""
    info, stored = await written(world, 10)
    node = world.nodes[2]
    node.limits = replace(QUICK, order_rest_s=3600.0)  # until then, only what readers wait for is read
    await node.start(world.epoch())
    await world.take_over(info, 1, 2)
    lists = world.reads.lists
    await node.until(lambda: world.reads.lists > lists + len(world.backups))  # the next search has begun
    assert not world.reads.chunks
    assert await everything(world, 2) == stored
    assert node.engine.takeovers.totals.chunks_lost == 0
    await node.until_restored()
    await node.stop()


async def test_a_recovery_waits_for_the_brokers_disk_and_reports_that(world: Cluster) -> None:
    info, stored = await written(world, 10)
    node = world.nodes[2]
    node.limits = QUICK
    await node.start(world.epoch())
    arriving(node).write_bytes(b"")  # a file in place of the directory for incomplete files
    await world.take_over(info, 1, 2)
    await node.until(lambda: any("broker's disk" in reason for each in progress(node) for reason in each.waits_for))
    assert not any(each.readable for each in progress(node))

    arriving(node).unlink()
    await node.until(lambda: all(each.readable for each in progress(node)))
    assert not any(each.waits_for for each in progress(node))
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def test_deleting_a_stream_during_its_recovery_removes_its_incomplete_files(world: Cluster) -> None:
    info, _ = await written(world, 10)
    node = world.nodes[2]
    node.limits = IN_FILES
    await node.start(world.epoch())
    world.reads.left = 2
    await world.take_over(info, 1, 2)
    await node.until(lambda: not world.reads.open.is_set())
    assert list(arriving(node).iterdir())

    await node.ask(api.DROP_STREAM, broker_pb2.DropStreamRequest(stream_id=STREAM_ID))
    assert progress(node) == []
    await node.until(lambda: not list(arriving(node).iterdir()))
    world.reads.release()
    await node.stop()


async def test_segments_can_be_removed_before_they_are_recovered(world: Cluster) -> None:
    info, stored = await written(world, 20, entries=1)
    node = world.nodes[2]
    await node.start(world.epoch())
    world.reads.open.clear()
    await world.take_over(info, 1, 2)
    entry = node.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    keys = [key for key, _ in entry.segments()]
    assert entry.recovering(keys[0])
    entry.start, entry.start_record = Position(*keys[4], 0), entry.find(keys[4]).first_record  # type: ignore[union-attr]
    node.engine.memory.removals.collect(entry)
    await node.until(lambda: entry.find(keys[0]) is None)
    world.reads.release()
    found, _ = await node.read()
    assert found == stored[-len(found) :]
    assert header_of(found[0]).segment_id == keys[4][1]
    await node.until_restored()
    await node.stop()
