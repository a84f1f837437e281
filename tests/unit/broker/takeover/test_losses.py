"""Losses of takeovers: readers get `data_lost` for chunks that no backup has, and read all others."""

from __future__ import annotations

from typing import Any

import pytest

from kera.backup import reading
from kera.core.base.ids import Position
from kera.core.errors import CorruptChunk, DataLost
from kera.core.format.chunk import ChunkHeader, verify_payload
from kera.v1 import common_pb2
from tests.unit.broker.takeover_support import Cluster, header_of, owned_by, written


async def test_records_of_a_drained_backup_that_is_gone_count_as_lost(world: Cluster) -> None:
    info, stored = await written(world, 12, replication=1, entries=1)
    node = world.nodes[2]
    await node.start(world.epoch())
    first = min(each.virtual_segment_id for backup in world.backups for each in backup.replicas(1))
    gone = next(each for each in world.backups if first in {known.virtual_segment_id for known in each.replicas(1)})
    await gone.stop()
    gone.draining = True
    response, _ = await world.take_over(info, 1, 2)
    assert list(response.waits_for) == []
    assert response.records_lost > 0
    await node.until(lambda: all(len(each.readable) == 1 for each in node.engine.takeovers.progress()))
    found, _ = await node.read(skip_lost=True)
    assert len(found) + response.records_lost == sum(response.streamlets[0].state.next_records) <= len(stored)
    await node.stop()


async def test_a_chunk_without_an_intact_replica_is_a_hole_with_data_lost_for_readers(
    world: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, stored = await written(world, 10, entries=2)
    node = world.nodes[2]
    await node.start(world.epoch())
    verify = verify_payload

    def damaged(buffer: Any, offset: int, header: ChunkHeader) -> None:
        if header.sequence == 7:
            raise CorruptChunk("a flipped bit")
        verify(buffer, offset, header)

    monkeypatch.setattr(reading, "verify_payload", damaged)
    response, _ = await world.take_over(info, 1, 2)
    assert response.records_lost == 0, "only payloads tell"
    await node.until(lambda: node.engine.takeovers.totals.chunks_lost == 2)
    await node.until_restored()
    with pytest.raises(DataLost):
        await node.read()
    found, _ = await node.read(skip_lost=True)
    whole = [data for data in stored[: len(stored) // 2] if header_of(data).sequence != 7]
    assert found == whole
    await node.stop()


async def test_readers_of_durability_leader_get_data_lost_after_a_takeover(world: Cluster) -> None:
    leader = common_pb2.DURABILITY_LEADER
    node = world.nodes[1]
    info = owned_by(1, world.epoch(), entries=1, durability=leader)
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    await node.write(*world.chunks(0, 10))
    await node.until(lambda: not any(lag.lag_bytes for lag in node.engine.replication.logs.lag()))
    stored, end = await node.read()
    await node.kill(memory=True)
    other = world.nodes[2]
    await other.start(world.epoch())
    response, _ = await world.take_over(info, 1, 2)
    assert response.streamlets[0].state.next_group_id > 1 << 24
    await other.write(*world.chunks(0, 2))
    assert len(stored) == 10
    with pytest.raises(DataLost):
        await other.read(end)
    assert len((await other.read(Position(response.streamlets[0].state.next_group_id, 1, 0)))[0]) == 2
    await other.until_restored()
    await other.stop()
