"""Push: a reader gets each chunk once, as soon as readers may see it, with one message per round."""

import pytest

from kera.broker.serving.limits import PushLimits
from kera.core.base.ids import Position
from kera.core.push import PushKind
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import CHUNK_BYTES


def test_a_run_says_where_its_chunks_lie_and_how_many_records_follow(node: PushNode, reader: Reader) -> None:
    node.append(6, record_count=10)
    reader.subscribe(lane(5))
    node.run()
    first, second = reader.runs
    slots = [segment.slot for _, segment in sorted(node.streamlet().entries[0].resident.items())]

    assert reader.sequences == {5: list(range(6))}
    assert first[:] == (5, slots[0].index, slots[0].generation, slots[0].arena_offset, 4096, 1, 1, 0, 20)
    assert second[:] == (5, slots[1].index, slots[1].generation, slots[1].arena_offset, 2048, 2, 1, 0, 0)
    assert [kind for kind, _ in reader.messages] == [PushKind.RUNS], "one message for all"


def test_the_appends_of_one_round_are_one_run_in_one_message(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane())
    node.run()
    assert reader.messages == []

    node.append(3)
    assert reader.messages == []
    assert len(node.loop.soon) == 1, "an append marks, and that once"
    node.run()

    assert [(run.offset, run.length_bytes) for run in reader.runs] == [(0, 3 * CHUNK_BYTES)]
    node.append(1)
    node.run()
    assert [run.offset for run in reader.runs] == [0, 3 * CHUNK_BYTES]
    assert len(reader.messages) == 2


def test_an_append_to_an_entry_without_subscribers_schedules_no_work(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane(entry=0))
    node.run()
    node.append(1, producer=1)
    node.append(1, streamlet_id=1)

    assert node.loop.soon == []


def test_an_append_schedules_no_work_for_lanes_that_have_ended(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane(1), lane(2, entry=1))
    node.run()
    reader.cancel(1)
    reader.connection.lost()
    node.append(1)
    node.append(1, producer=1)

    assert node.loop.soon == []
    assert all(not entry.waiters and not entry.readers for entry in node.streamlet().entries)


def test_each_lane_of_each_reader_gets_every_chunk(node: PushNode, reader: Reader) -> None:
    other = Reader(node)
    reader.subscribe(lane(1), lane(2, Position(1, 1, 0)))
    node.append(2)
    node.run()
    other.subscribe(lane(1))
    node.append(1)
    node.run()

    assert reader.sequences == {1: [0, 1, 2], 2: [0, 1, 2]}
    assert other.sequences == {1: [0, 1, 2]}
    slot = node.streamlet().entries[0].tail[0].slot
    assert slot.leases == len(reader.runs) + len(other.runs)


def test_only_durable_chunks_are_pushed(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane())
    (appended,) = node.append(1)
    streamlet = node.streamlet()
    segment = streamlet.entries[0].tail[0]
    node.run()
    segment.durable_head -= CHUNK_BYTES
    again = Reader(node)
    again.subscribe(lane())
    node.run()
    assert again.runs == []

    streamlet.publish(appended)
    node.run()
    assert again.sequences == {1: [0]}


@pytest.mark.parametrize("limits", [PushLimits(run_bytes_max=2 * CHUNK_BYTES)], ids=["limited"])
def test_lanes_take_turns(node: PushNode, reader: Reader) -> None:
    node.append(8)
    node.append(4, producer=1)
    reader.subscribe(lane(1), lane(2, entry=1))
    node.run()

    assert [run.lane for run in reader.runs] == [1, 2, 1, 2, 1, 1]
    assert {run.length_bytes for run in reader.runs} == {2 * CHUNK_BYTES}


@pytest.mark.parametrize("limits", [PushLimits(flush_runs_max=2, run_bytes_max=CHUNK_BYTES)], ids=["limited"])
def test_a_message_has_a_limited_number_of_runs_and_the_next_round_sends_more(node: PushNode, reader: Reader) -> None:
    node.append(5)
    reader.subscribe(lane())
    node.loop.round()
    assert len(reader.runs) == 2
    node.loop.round()
    assert len(reader.runs) == 4
    node.run()

    assert reader.sequences == {1: list(range(5))}
    assert len(reader.messages) == 3


# --- counting ----------------------------------------------------------------------------------------------


def test_pushed_runs_bytes_and_ends_are_counted(node: PushNode, reader: Reader) -> None:
    node.append(5)
    reader.subscribe(lane(1), lane(2, end=Position(1, 1, 1024)), lane(3, stream_id=99))
    node.run()
    totals = node.totals

    assert (totals.connections, totals.subscriptions, totals.runs, totals.bytes) == (1, 1, 3, 6 * CHUNK_BYTES)
    assert totals.ends == {"reached": 1, "moved": 0, "failed": 1, "pull": 0, "cancelled": 0}
    assert node.streamlet().bytes_read == 6 * CHUNK_BYTES
