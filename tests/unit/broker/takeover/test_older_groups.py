"""A streamlet that several brokers had is whole after a recovery, and removed records do not come back."""

from __future__ import annotations

import re

import pytest

from kera.broker.records import EntryRecord
from kera.broker.storage.index_format import put_entry
from kera.core.base.ids import EntryId, Position
from kera.core.errors import DataLost
from kera.v1 import common_pb2
from tests.unit.broker.support import STREAM_ID, chunk
from tests.unit.broker.takeover_support import Cluster, everything, header_of, moved_from_second_to_first, written


async def test_a_lost_older_interval_is_not_served_at_later_launches_either(world: Cluster) -> None:
    """Its owner recovers it. Until then readers get no error about a loss."""
    moved, _, _ = await moved_from_second_to_first(world)
    second = world.nodes[2]
    await second.kill(memory=True)
    for has_holes in (False, True):  # the first launch knows without a hint that its memory is lost
        await second.start(world.epoch(), moved, has_holes=has_holes)
        assert not second.engine.streams.get(STREAM_ID).streamlets
        await second.kill()
    await second.start(world.epoch(), moved)
    assert second.engine.streams.get(STREAM_ID).streamlets, "nothing is to be recovered, and the loss is told"
    await second.stop()
    await world.nodes[1].stop()


async def test_recovered_groups_are_added_to_older_groups_that_a_streamlet_has_here(world: Cluster) -> None:
    first, second = world.nodes[1], world.nodes[2]
    moved, state, (stored, end, newer) = await moved_from_second_to_first(world)
    await first.kill(memory=True)

    response, _ = await world.take_over(moved, 1, 2, handed_over=[state])
    assert list(response.streamlets[0].state.next_records) == [20]
    assert response.records_lost == 0
    (status,) = await second.write(world.chunk(0, 19))
    assert status.duplicate
    await second.write(*world.chunks(0, 3))
    found, _ = await second.read()
    assert found[:20] == stored + newer
    assert [header_of(data).first_record for data in found] == list(range(23))
    assert (await second.read(end))[0] == found[10:]
    await second.until_restored()
    await second.stop()


async def test_records_removed_at_a_later_owner_stay_removed_when_it_is_taken_over(world: Cluster) -> None:
    """A broker with nothing left goes on behind the records that the lost broker removed, and reuses no ordinal."""
    first, second = world.nodes[1], world.nodes[2]
    moved, state, (_, end, newer) = await moved_from_second_to_first(world)
    older = second.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    second.engine.streams.move_start(older, Position(state.next_group_id, 1, 0), 10)
    second.engine.streams.moved_starts.told(older)
    await second.until(lambda: older.stored_segments == 0 and not older.tail)
    await first.kill(memory=True)
    start = common_pb2.EntryStart(first_record=20, removed=True)
    start.start.group_id, start.start.segment_id = state.next_group_id, 1
    start.start.position = sum(map(len, newer))

    response, _ = await world.take_over(moved, 1, 2, handed_over=[state], starts=[start])
    assert list(response.streamlets[0].state.next_records) == [20]
    (status,) = await second.write(chunk(0, 20, size=1024))
    assert status.first_record == 20
    available = state.next_group_id, 1, start.start.position
    with pytest.raises(DataLost, match=re.escape(f"up to {available} is gone: it was removed")):
        await second.read(end)
    await second.stop()


async def test_groups_older_than_the_start_at_the_owner_do_not_come_back(world: Cluster) -> None:
    """The owner had truncated them. When the broker that had them was lost, backups still had copies."""
    first, second = world.nodes[1], world.nodes[2]
    moved, state, (_, _, newer) = await moved_from_second_to_first(world)
    entry = first.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    start = Position(state.next_group_id, 1, len(newer[0]))
    first.engine.streams.move_start(entry, start, 11)
    await second.kill(memory=True)

    response, _ = await world.take_over(moved, 2, 1, handed_over=[state])
    assert (response.bytes_total, response.records_lost) == (0, 0)
    assert (entry.start, entry.start_record) == (start, 11)
    assert (await first.read())[0] == newer[1:]
    await first.stop()


async def test_an_old_start_of_an_entry_at_its_owner_does_not_count_as_a_removal(world: Cluster) -> None:
    """The streamlet had been here before, had left with all its records, and came back."""
    first, second = world.nodes[1], world.nodes[2]
    moved, state, (stored, _, newer) = await moved_from_second_to_first(world)
    entry = first.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    entry.start, entry.start_record = Position(1, 2, 0), 5
    await second.kill(memory=True)

    response, _ = await world.take_over(moved, 2, 1, handed_over=[state])
    assert response.records_lost == 0
    assert (await first.read())[0] == stored + newer
    await first.until_restored()
    await first.stop()


async def test_a_streamlet_handed_over_before_its_takeover_goes_on_behind_all_its_groups(world: Cluster) -> None:
    """A move had been stored, and was announced again after the broker that had the streamlet was lost."""
    info, stored = await written(world, 20)
    node = world.nodes[2]
    await node.start(world.epoch())
    state = common_pb2.StreamletState(streamlet_id=0, next_group_id=1, next_records=[0] * info.config.entries)
    await world.take_over(info, 1, 2, given=[state])

    streamlet = node.engine.streams.get(STREAM_ID).streamlets[0]
    assert streamlet.next_group_id > max(entry.last_stored[0] for entry in streamlet.entries)
    assert await everything(world, 2) == stored
    await node.stop()


async def test_an_old_start_of_an_entry_here_skips_no_records_of_another_broker(world: Cluster) -> None:
    """The streamlet had been here, and had gone with all its records to the broker that is lost now."""
    info, stored = await written(world, 20)
    node = world.nodes[2]
    await node.start(world.epoch())
    node.engine.restart.index.commit(
        [
            put_entry(EntryId(STREAM_ID, 0, entry), EntryRecord(Position(1, 2, 0), 5, 10))
            for entry in range(info.config.entries)
        ]
    )
    response, _ = await world.take_over(info, 1, 2)
    assert (response.records_lost, response.bytes_total) == (0, sum(map(len, stored)))
    assert await everything(world, 2) == stored
    await node.stop()
