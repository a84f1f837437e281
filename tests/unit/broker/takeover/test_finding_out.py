"""Owners without an order to take over: they find out where the lost broker ended, or report whom they wait for."""

from __future__ import annotations

from kera.broker.ownership.stream_records import stream_record
from kera.core.base.ids import Position
from kera.v1 import common_pb2
from tests.unit.broker.support import STREAM_ID
from tests.unit.broker.takeover_support import Cluster, everything, owned_by, progress, written


async def test_an_owner_without_an_order_to_take_over_recovers_by_itself(world: Cluster) -> None:
    info, stored = await written(world, 10)
    epoch = world.epoch()
    info.assignments_version += 1
    info.assignments[0].broker_id, info.assignments[0].broker_epoch = 2, epoch
    info.assignments[0].sources.add(broker_id=1, before_epoch=epoch)
    node = world.nodes[2]
    await node.start(epoch, info)
    await node.until(lambda: STREAM_ID in node.engine.streams and bool(node.engine.streams.get(STREAM_ID).streamlets))
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def test_an_owner_that_recovers_by_itself_goes_on_behind_removed_records(world: Cluster) -> None:
    """If no records were left, new ones would otherwise get the numbers of the removed ones."""
    info, _ = await written(world, 20, entries=1)
    info = owned_by(2, world.epoch(), entries=1)
    info.assignments[0].sources.add(broker_id=1, before_epoch=info.assignments[0].broker_epoch)
    start = common_pb2.Cursor(stream_id=STREAM_ID, group_id=90, segment_id=2, position=64)
    info.assignments[0].starts.add(start=start, first_record=400)
    node = world.nodes[2]
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: STREAM_ID in node.engine.streams and bool(node.engine.streams.get(STREAM_ID).streamlets))

    entry = node.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    assert (entry.start, entry.start_record, entry.next_record) == (Position(90, 2, 64), 400, 400)

    def starts_written_down() -> list[int] | None:
        known = stream_record(node.engine.restart.index, STREAM_ID)
        return None if known is None or not known.assignments else [len(each.starts) for each in known.assignments]

    await node.until(lambda: starts_written_down() is not None)
    assert starts_written_down() == [0], "they are for now only"
    await node.stop()


async def test_an_owner_that_cannot_recover_yet_reports_the_backup_it_waits_for(world: Cluster) -> None:
    info, stored = await written(world, 10, replication=1)
    epoch = world.epoch()
    info.assignments_version += 1
    info.assignments[0].broker_id, info.assignments[0].broker_epoch = 2, epoch
    info.assignments[0].sources.add(broker_id=1, before_epoch=epoch)
    node = world.nodes[2]
    await world.backups[1].stop()
    await node.start(epoch, info)
    await node.until(lambda: any("backup 2" in reason for each in progress(node) for reason in each.waits_for))
    assert [each.source for each in progress(node)] == list(info.assignments[0].sources)

    await world.backups[1].start()
    await node.until(lambda: bool(node.engine.streams.get(STREAM_ID).streamlets))
    assert await everything(world, 2) == stored
    await node.until_restored()
    assert not any(each.waits_for for each in progress(node))
    await node.stop()
