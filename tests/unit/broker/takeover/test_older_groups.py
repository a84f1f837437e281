"""A streamlet that several brokers had is whole again after a recovery, and nothing comes back that was removed."""

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


async def test_what_was_lost_of_an_older_interval_is_not_there_at_later_launches_either(world: Cluster) -> None:
    """Its owner recovers it: till then nobody is told that it is lost."""
    moved, _, _ = await moved_from_second_to_first(world)
    second = world.nodes[2]
    await second.kill(memory=True)
    for has_holes in (False, True):  # the first of them knows by itself that it has lost its memory
        await second.start(world.epoch(), moved, has_holes=has_holes)
        assert not second.engine.streams.get(STREAM_ID).streamlets
        await second.kill()
    await second.start(world.epoch(), moved)
    assert second.engine.streams.get(STREAM_ID).streamlets, "nothing is to be recovered, and the loss is told"
    await second.stop()
    await world.nodes[1].stop()


async def test_a_streamlet_with_older_groups_here_grows_by_those_that_are_recovered(world: Cluster) -> None:
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


async def test_what_was_removed_at_a_later_owner_is_removed_when_that_is_taken_over(world: Cluster) -> None:
    """Whoever had nothing left goes on behind what the lost one had removed, and gives no ordinal once more."""
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


async def test_what_is_older_than_what_the_owner_has_removed_does_not_come_back(world: Cluster) -> None:
    """Truncated at its owner, it was still on backups when the broker was lost that had it."""
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


async def test_where_an_entry_of_an_owner_once_started_is_not_what_it_has_removed(world: Cluster) -> None:
    """The streamlet had been here before, had gone with all that there was, and came back."""
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


async def test_what_is_taken_over_and_was_handed_over_before_goes_on_behind_all_its_groups(world: Cluster) -> None:
    """A move had been written, and was told once more after the broker that had it was lost."""
    info, stored = await written(world, 20)
    node = world.nodes[2]
    await node.start(world.epoch())
    state = common_pb2.StreamletState(streamlet_id=0, next_group_id=1, next_records=[0] * info.config.entries)
    await world.take_over(info, 1, 2, given=[state])

    streamlet = node.engine.streams.get(STREAM_ID).streamlets[0]
    assert streamlet.next_group_id > max(entry.last_stored[0] for entry in streamlet.entries)
    assert await everything(world, 2) == stored
    await node.stop()


async def test_where_an_entry_once_started_here_leaves_out_nothing_that_another_broker_had(world: Cluster) -> None:
    """The streamlet had been here, and had gone to the broker that is lost now, with all that there was."""
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
