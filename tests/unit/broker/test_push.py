"""Pushing: what readers are told, when, and what it keeps in memory. The broker's side without sockets."""

import errno
from collections.abc import Callable
from typing import Any

import pytest

from kera.broker.log.entry import state_of
from kera.broker.log.read_plan import ReadPlan, plan_read
from kera.broker.log.segment import SegmentState
from kera.broker.log.streamlet import Streamlet
from kera.broker.serving import push as push_module
from kera.broker.serving.limits import PushLimits, ServingLimits
from kera.broker.serving.push import PushConnection
from kera.core.errors import DiskFull, ProtocolError
from kera.core.ids import Position
from kera.core.push import WINDOW_BYTES_MAX, Kind, window_bytes_max
from kera.v1 import push_pb2
from tests.unit.broker.moving_support import assign
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, STREAM_ID, Engine, stream_info

SLOTS = 64
LOADING_MAX = PushLimits().loads_at_once
LOAD_WAIT_S = ServingLimits().load_wait_ms / 1000
WINDOW_BYTES = window_bytes_max(SLOTS, 4 * CHUNK_BYTES)
"""All that a reader can have."""


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(SLOTS)


@pytest.fixture
def limits() -> PushLimits:
    return PushLimits()


@pytest.fixture
def node(engine: Engine, limits: PushLimits) -> PushNode:
    """Owns streamlets 0 and 1 of stream 7, each with two entries; not streamlet 2."""
    return PushNode(engine, stream_info(owners=(BROKER_ID, BROKER_ID, BROKER_ID + 1), entries=2), limits=limits)


@pytest.fixture
def reader(node: PushNode) -> Reader:
    return Reader(node)


# --- runs --------------------------------------------------------------------------------------------------


def test_a_run_says_where_the_chunks_of_a_segment_lie_and_how_much_is_behind_them(
    node: PushNode, reader: Reader
) -> None:
    node.append(6, record_count=10)
    reader.subscribe(lane(5))
    node.run()
    first, second = reader.runs
    slots = [segment.slot for _, segment in sorted(node.streamlet().entries[0].resident.items())]

    assert reader.sequences == {5: list(range(6))}
    assert first[:] == (5, slots[0].index, slots[0].generation, slots[0].arena_offset, 4096, 1, 1, 0, 20)
    assert second[:] == (5, slots[1].index, slots[1].generation, slots[1].arena_offset, 2048, 2, 1, 0, 0)
    assert [kind for kind, _ in reader.messages] == [Kind.RUNS], "one message for all"


def test_what_is_appended_in_one_round_is_one_run_of_one_message(node: PushNode, reader: Reader) -> None:
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


def test_appends_to_what_nobody_subscribes_to_are_no_work(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane(entry=0))
    node.run()
    node.append(1, producer=1)
    node.append(1, streamlet_id=1)

    assert node.loop.soon == []


def test_a_lane_that_is_over_is_no_work_for_appends(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane(1), lane(2, entry=1))
    node.run()
    reader.cancel(1)
    reader.connection.lost()
    node.append(1)
    node.append(1, producer=1)

    assert node.loop.soon == []
    assert all(not entry.waiters and not entry.readers for entry in node.streamlet().entries)


def test_readers_are_told_of_everything_each(node: PushNode, reader: Reader) -> None:
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


def test_only_what_is_durable_is_pushed(node: PushNode, reader: Reader) -> None:
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
def test_a_message_has_so_many_runs_at_most_and_the_rest_comes_in_the_next_round(
    node: PushNode, reader: Reader
) -> None:
    node.append(5)
    reader.subscribe(lane())
    node.loop.round()
    assert len(reader.runs) == 2
    node.loop.round()
    assert len(reader.runs) == 4
    node.run()

    assert reader.sequences == {1: list(range(5))}
    assert len(reader.messages) == 3


# --- the window --------------------------------------------------------------------------------------------


def test_nothing_is_pushed_beyond_the_window_until_something_is_taken(node: PushNode, reader: Reader) -> None:
    node.append(10)
    reader.subscribe(lane(), window_bytes=3 * CHUNK_BYTES)
    node.run()
    assert reader.sequences == {1: [0, 1, 2]}
    reader.take(CHUNK_BYTES)
    node.run()
    assert reader.sequences == {1: [0, 1, 2, 3]}
    node.append(1)
    assert node.loop.soon == [], "an append is no work while the window is shut"
    reader.take(3 * CHUNK_BYTES)
    node.run()

    assert reader.sequences == {1: list(range(7))}


def test_the_window_can_be_set_again_and_never_above_a_share_of_the_memory(node: PushNode, reader: Reader) -> None:
    node.append(2 * WINDOW_BYTES // CHUNK_BYTES)
    reader.subscribe(lane(), window_bytes=CHUNK_BYTES)
    node.run()
    assert reader.pushed_bytes == CHUNK_BYTES
    reader.subscribe()
    node.run()
    assert reader.pushed_bytes == CHUNK_BYTES, "0 leaves it as it is"
    reader.subscribe(window_bytes=WINDOW_BYTES_MAX)
    node.run()

    assert reader.pushed_bytes == WINDOW_BYTES


def test_a_chunk_over_the_window_comes_alone_when_nothing_is_outstanding(node: PushNode, reader: Reader) -> None:
    node.append(1)
    node.append(1, size=4 * CHUNK_BYTES)
    node.append(1)
    reader.subscribe(lane(), window_bytes=2 * CHUNK_BYTES)
    node.run()
    assert reader.sequences == {1: [0]}
    reader.take(CHUNK_BYTES)
    node.run()
    assert reader.sequences == {1: [0, 1]}, "it is larger, and the next one has to wait"
    reader.take(4 * CHUNK_BYTES)
    node.run()

    assert reader.sequences == {1: [0, 1, 2]}


def test_a_large_chunk_is_not_overtaken_for_ever_by_other_lanes(node: PushNode, reader: Reader) -> None:
    node.append(1, size=4 * CHUNK_BYTES)
    node.append(20, producer=1)
    reader.subscribe(lane(2, entry=1), lane(1), window_bytes=2 * CHUNK_BYTES)
    node.run()
    assert reader.sequences == {2: [0, 1]}
    reader.take(CHUNK_BYTES)
    node.run()
    node.append(1, producer=1)
    assert node.loop.soon == []
    assert reader.sequences == {2: [0, 1]}, "the large one's turn"
    reader.take(CHUNK_BYTES)
    node.run()

    assert reader.sequences == {2: [0, 1], 1: [0]}


# --- how lanes end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [Position(1, 1, 2048), Position(1, 1, 4096), Position(1, 2, 0), Position(1, 2, 1024)])
def test_a_lane_ends_where_it_was_to_end(node: PushNode, reader: Reader, stop: Position) -> None:
    node.append(7)
    reader.subscribe(lane(end=stop))
    node.run()
    expected = (stop.segment_id - 1) * 4 + stop.offset // CHUNK_BYTES

    assert reader.sequences == {1: list(range(expected))}
    reason, code, following = reader.end()
    assert (reason, code) == ("REACHED", "")
    assert following >= stop
    node.append(1)
    node.run()
    assert len(reader.sequences[1]) == expected


def test_a_lane_that_begins_where_it_ends_ends_at_once(node: PushNode, reader: Reader) -> None:
    node.append(2)
    here = Position(1, 1, 2048)
    reader.subscribe(lane(1, here, here), lane(2, Position(1, 1, 0), Position(1, 1, 0)))
    node.run()

    assert reader.runs == []
    assert reader.end(1) == ("REACHED", "", here)
    assert reader.end(2)[0] == "REACHED"


def test_a_number_can_be_used_again_when_its_lane_has_ended(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(lane(end=Position(1, 1, 1024)))
    node.run()
    assert reader.ends.pop(1).reason == push_pb2.PushEnd.REACHED
    node.append(1)
    reader.subscribe(lane(start=Position(1, 1, 1024)))
    node.run()

    assert reader.sequences == {1: [0, 1]}
    assert node.totals.subscriptions == 1


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (lane(stream_id=99), "unknown_stream"),
        (lane(streamlet=3), "streamlet_out_of_range"),
        (lane(streamlet=2), "not_owner"),
        (lane(entry=2), "invalid_cursor"),
        (lane(start=Position(1, 0, 0)), "invalid_cursor"),
        (lane(start=Position(1, 1, 64)), "invalid_cursor"),
        (lane(start=Position(1, 1, 0), end=Position(1, 1, 64)), "invalid_cursor"),
        (lane(start=Position(1, 1, 0), end=Position(1, 1, 3072)), "invalid_cursor"),
        (lane(start=Position(1, 1, 0), end=Position(9, 1, 0)), "invalid_cursor"),
    ],
)
def test_a_lane_that_cannot_be_read_fails_alone(
    node: PushNode, reader: Reader, wanted: push_pb2.PushLane, code: str
) -> None:
    node.append(2)
    reader.subscribe(lane(2), wanted, lane(3))
    node.run()

    assert reader.end()[:2] == ("FAILED", code)
    assert reader.ends[1].next == wanted.start
    assert reader.sequences == {2: [0, 1], 3: [0, 1]}
    assert list(reader.ends) == [1]
    assert node.totals.ends["failed"] == 1


def test_a_loss_is_told_with_its_limits(engine: Engine) -> None:
    info = stream_info()
    info.assignments[0].first_group_id = 100
    node = PushNode(engine, info)
    reader = Reader(node)
    node.append(1)
    reader.subscribe(lane(start=Position(4, 1, 0)))
    node.run()

    assert reader.end() == ("FAILED", "data_lost", Position(4, 1, 0))
    assert reader.ends[1].error.attributes["available_from"] == "[100, 1, 0]"


def test_a_defect_is_told_and_ends_nothing_else(
    node: PushNode, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(streamlet: Streamlet, index: int, *rest: Any, **options: Any) -> ReadPlan:
        if index == 0:
            raise RuntimeError("a defect")
        return plan_read(streamlet, index, *rest, **options)

    monkeypatch.setattr(push_module, "plan_read", broken)
    node.append(2)
    node.append(1, producer=1)
    reader.subscribe(lane(1), lane(2, entry=1))
    node.run()

    assert reader.end()[:2] == ("FAILED", "internal")
    assert reader.sequences == {2: [0]}
    assert node.engine.arena.leased_slots == 1


def test_a_lane_of_a_stream_that_is_dropped_fails(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(lane())
    node.run()
    node.engine.streams.drop(STREAM_ID)
    node.run()

    assert reader.sequences == {1: [0]}
    assert reader.end() == ("FAILED", "unknown_stream", Position(1, 1, 1024))


def test_a_lane_of_a_streamlet_that_has_moved_ends_where_it_goes_on(engine: Engine) -> None:
    info = stream_info()
    node = PushNode(engine, info)
    follows, stops, ends_there = Reader(node), Reader(node), Reader(node)
    node.append(3)
    follows.subscribe(lane())
    node.run()
    assert follows.ends == {}
    engine.streams.open(assign(info, 4, [(1, BROKER_ID, []), (2, 4, [3])]), BROKER_ID)
    node.run()
    stops.subscribe(lane(end=Position(2, 1, 1024)))
    ends_there.subscribe(lane(1, end=Position(2, 1, 0)), lane(2, end=Position(1, 1, 3072)), lane(3, Position(2, 1, 0)))
    node.run()

    assert follows.end() == stops.end() == ("MOVED", "", Position(2, 1, 0))
    assert ends_there.end(1) == ("REACHED", "", Position(2, 1, 0))
    assert ends_there.end(2) == ("REACHED", "", Position(1, 1, 3072))
    assert ends_there.end(3)[:2] == ("FAILED", "not_owner")
    assert follows.sequences == stops.sequences == {1: [0, 1, 2]}
    assert ends_there.sequences == {1: [0, 1, 2], 2: [0, 1, 2]}


def test_a_lane_that_is_cancelled_ends_at_once_and_nothing_more_comes(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(lane(1), lane(2))
    node.run()
    node.append(1)
    reader.cancel(1, 7)
    assert reader.end() == ("CANCELLED", "", Position(1, 1, 1024))
    node.run()

    assert reader.sequences == {1: [0], 2: [0, 1]}
    assert list(reader.ends) == [1], "of a lane that is not there, nothing is said: its end may be on its way"


def hold(node: PushNode, count: int) -> list[Reader]:
    """Readers that hold so many slots, of segments that are full."""
    readers = []
    share = SLOTS // 8
    for first in range(0, count, share):
        readers.append(Reader(node))
        for group in range(first, min(count, first + share)):
            start = Position(group // 2 + 1, group % 2 + 1, 0)
            readers[-1].subscribe(lane(group, start, start._replace(offset=4 * CHUNK_BYTES)))
        node.run(disk=False)
    assert node.engine.arena.leased_slots == count
    return readers


def test_who_holds_too_much_of_the_memory_is_told_to_pull(node: PushNode, reader: Reader) -> None:
    node.append(4 * (SLOTS // 4 + 2) + 1)
    reader.subscribe(lane())
    taken = 0
    while not reader.ends:
        node.run(disk=False)
        reader.take(reader.pushed_bytes - taken)
        taken = reader.pushed_bytes
    held = SLOTS // 4 + 1
    assert node.engine.arena.leased_slots == held
    assert reader.end() == ("PULL", "", Position(held // 2 + 1, 2, 0))
    assert reader.sequences == {1: list(range(4 * held))}

    reader.release(*(run.slot for run in reader.runs))
    reader.subscribe(lane(2, Position(held // 2 + 1, 2, 0)))
    node.run()
    assert reader.sequences[2] == list(range(4 * held, 4 * (SLOTS // 4 + 2) + 1))


def test_what_is_being_written_to_does_not_count_as_held_by_one_reader(engine: Engine) -> None:
    lanes = SLOTS // 4 + 4
    node = PushNode(engine, stream_info(entries=lanes))
    reader = Reader(node)
    reader.subscribe(*(lane(entry, entry=entry) for entry in range(lanes)))
    for _ in range(3):
        for producer in range(lanes):
            node.append(1, producer=producer)
        node.run(disk=False)
        reader.take(lanes * CHUNK_BYTES)
    assert reader.sequences == {entry: [0, 1, 2] for entry in range(lanes)}
    assert engine.arena.leased_slots == lanes
    for producer in range(lanes):
        node.append(2, producer=producer)  # the second one begins a segment
    node.run(disk=False)

    assert {reader.end(number)[0] for number in reader.ends} == {"PULL"}
    assert len(reader.ends) == lanes


def test_when_readers_hold_half_of_the_memory_those_who_want_more_are_told_to_pull(node: PushNode) -> None:
    node.append(4 * (SLOTS // 2 + 1))
    waiting, late = Reader(node), Reader(node)
    waiting.subscribe(lane(1, Position(SLOTS // 4 + 1, 1, 4 * CHUNK_BYTES)))
    held = hold(node, SLOTS // 2 + 1)
    late.subscribe(lane(1))
    node.run(disk=False)
    assert late.end() == ("PULL", "", Position(1, 1, 0))
    assert waiting.ends == {}, "it does not want more"
    node.append(1)
    node.run(disk=False)
    assert waiting.end() == ("PULL", "", Position(SLOTS // 4 + 1, 2, 0))
    assert node.totals.ends["pull"] == 2

    for reader in held:
        reader.connection.lost()
    late.ends.clear()
    late.subscribe(lane(1))
    node.run(disk=False)
    assert late.sequences[1][:4] == [0, 1, 2, 3]


def test_who_needs_what_is_in_the_reserve_of_the_memory_is_told_to_pull(make_engine: Callable[..., Engine]) -> None:
    node = PushNode(make_engine(8, reserve_slots=2), stream_info(entries=1))
    node.append(16)
    node.to_disk()
    node.engine.disk.write_error = errno.ENOSPC

    def append_without_end() -> None:
        while True:
            node.append(1)
            node.engine.run()

    with pytest.raises(DiskFull):
        append_without_end()
    reader = Reader(node)
    reader.subscribe(lane(1))
    node.run()

    assert reader.end() == ("PULL", "", Position(1, 1, 0))
    assert node.engine.arena.leased_slots == 0


@pytest.mark.parametrize("limits", [PushLimits(subscriptions_max=2)], ids=["limited"])
def test_lanes_beyond_the_limit_are_told_to_pull(node: PushNode, reader: Reader) -> None:
    assert PushLimits().subscriptions_max == 65536
    node.append(1)
    reader.subscribe(lane(1), lane(2), lane(3, Position(1, 1, 0)))
    node.run()

    assert reader.sequences == {1: [0], 2: [0]}
    assert reader.end(3) == ("PULL", "", Position(1, 1, 0))
    assert node.totals.subscriptions == 2


MANY = 40


few_steps = pytest.mark.parametrize(
    "limits", [PushLimits(steps_at_once=4, flush_subscriptions_max=4)], ids=["four in a round of the loop"]
)


def rounds_until_idle(node: PushNode, reader: Reader) -> int:
    rounds = 0
    while reader.connection.busy:
        rounds += 1
        node.loop.round()
    return rounds


@few_steps
def test_many_lanes_are_begun_pushed_to_and_cancelled_in_slices_and_in_order(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(*(lane(number) for number in range(1, MANY + 1)))
    assert reader.connection.busy
    assert node.totals.subscriptions == 4
    reader.cancel(*range(1, MANY + 1))
    assert reader.ends == {}, "what was asked for first is done first"
    assert rounds_until_idle(node, reader) >= 2 * MANY // 4 - 2
    assert sorted(reader.ends) == list(range(1, MANY + 1))
    assert node.totals.subscriptions == 0

    fit = node.push.window_bytes_max // CHUNK_BYTES
    reader.subscribe(*(lane(number) for number in range(101, 101 + fit)))
    while len(reader.runs) < fit:
        before = len(reader.runs)
        assert node.loop.round()
        assert len(reader.runs) - before <= 4


@few_steps
def test_the_lanes_of_a_connection_that_is_gone_go_in_slices_and_its_leases_at_once(
    node: PushNode, reader: Reader
) -> None:
    node.append(1)
    reader.subscribe(*(lane(number) for number in range(1, MANY + 1)))
    node.run()
    assert node.engine.arena.leased_slots == 1
    reader.connection.lost()
    assert node.engine.arena.leased_slots == 0
    assert node.totals.subscriptions == MANY - 4
    assert node.loop.round()
    assert node.totals.subscriptions == MANY - 8
    node.run()
    assert node.totals.subscriptions == 0
    assert all(not entry.waiters and not entry.readers for entry in node.streamlet().entries)


@few_steps
def test_a_peer_that_turns_out_not_to_be_trusted_later_is_told_of_then(node: PushNode) -> None:
    failed: list[ProtocolError] = []
    idle: list[bool] = []
    connection = PushConnection(node.push, lambda _: None, on_idle=lambda: idle.append(True), on_failed=failed.append)
    lanes = [lane(number) for number in (*range(1, 11), 1)]
    connection.received(Kind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=lanes).SerializeToString())
    assert (connection.busy, failed) == (True, [])
    node.run()
    assert [str(error) for error in failed] == ["lane 1 is in use"]
    assert not connection.busy
    assert idle == []
    connection.received(Kind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=map(lane, range(21, 31))).SerializeToString())
    node.run()
    assert idle == [True]


# --- what is on disk ---------------------------------------------------------------------------------------


def test_catching_up_from_disk_goes_over_into_following_without_gap_or_repeat(node: PushNode, reader: Reader) -> None:
    node.append(45)
    node.to_disk()
    assert len(node.streamlet().entries[0].resident) == 1
    reader.subscribe(lane(), window_bytes=5 * CHUNK_BYTES)
    done = 0
    while len(reader.sequences.get(1, ())) < 80:
        node.run()
        assert len(reader.runs) > done
        assert reader.ends == {}
        new, done = reader.runs[done:], len(reader.runs)
        if node.sequences[0, 2] < 80:
            node.append(5)
        reader.take(sum(run.length_bytes for run in new))
        reader.release(*(run.slot for run in new))

    assert reader.sequences == {1: list(range(80))}
    assert node.engine.memory.totals.segments_loaded == 11


def test_a_lane_that_waits_for_the_disk_keeps_no_other_waiting(node: PushNode, reader: Reader) -> None:
    node.append(5)
    node.to_disk()
    node.append(1, producer=1)
    reader.subscribe(lane(1), lane(2, entry=1))
    node.run(disk=False)
    assert reader.sequences == {2: [0]}
    node.append(1)
    node.append(1, producer=1)
    node.run(disk=False)
    assert reader.sequences == {2: [0, 1]}
    node.run()

    assert reader.sequences == {1: list(range(6)), 2: [0, 1]}
    assert all(timer.cancelled for timer in node.loop.timers)


def test_of_many_lanes_some_wait_for_the_disk_and_the_others_for_their_turn(engine: Engine) -> None:
    lanes = 3 * LOADING_MAX
    node = PushNode(engine, stream_info(entries=lanes))
    reader = Reader(node)
    for producer in range(lanes):
        node.append(9, producer=producer)
    node.to_disk()
    reader.subscribe(*(lane(entry, entry=entry, end=Position(2 * entry + 1, 2, 4096)) for entry in range(lanes)))
    node.run(disk=False)
    assert len(node.loop.timers) == LOADING_MAX
    reader.cancel(0, lanes - 1)
    node.run(disk=False)
    assert len(node.loop.timers) == LOADING_MAX + 1, "the turn of one that went is another's"
    taken = released = 0
    while reader.pushed_bytes < (lanes - 2) * 8 * CHUNK_BYTES:
        assert {end.reason for end in reader.ends.values()} <= {push_pb2.PushEnd.CANCELLED, push_pb2.PushEnd.REACHED}
        node.run()
        assert reader.pushed_bytes > taken
        reader.take(reader.pushed_bytes - taken)
        taken = reader.pushed_bytes
        reader.release(*(run.slot for run in reader.runs[released:]))
        released = len(reader.runs)
    node.run()

    assert reader.sequences == {entry: list(range(8)) for entry in range(1, lanes - 1)}
    assert {reader.end(entry)[0] for entry in range(1, lanes - 1)} == {"REACHED"}
    assert sum(not timer.cancelled for timer in node.loop.timers) == 0


def test_what_the_disk_is_too_slow_for_fails_and_lets_others_have_their_turn(engine: Engine) -> None:
    lanes = LOADING_MAX + 2
    node = PushNode(engine, stream_info(entries=lanes))
    reader = Reader(node)
    for producer in range(lanes):
        node.append(5, producer=producer)
    node.to_disk()
    reader.subscribe(*(lane(entry, entry=entry) for entry in range(lanes)))
    node.run(disk=False)
    node.loop.advance(LOAD_WAIT_S)
    node.run(disk=False)
    assert sorted(reader.ends) == list(range(LOADING_MAX))
    node.run()

    assert {entry: reader.sequences[entry] for entry in reader.sequences} == {
        entry: list(range(5)) for entry in range(LOADING_MAX, lanes)
    }


def test_a_shut_window_loads_nothing(node: PushNode, reader: Reader) -> None:
    node.append(9)
    node.to_disk()
    node.append(1, producer=1)
    reader.subscribe(lane(2, entry=1), lane(1), window_bytes=CHUNK_BYTES)
    node.run()
    assert node.engine.memory.totals.segments_loaded == 0
    reader.take(CHUNK_BYTES)
    node.run()

    assert reader.sequences == {2: [0], 1: [0]}


def test_a_disk_that_cannot_be_read_ends_the_lane(node: PushNode, reader: Reader) -> None:
    node.append(5)
    node.to_disk()
    node.engine.disk.read_error = errno.EIO
    reader.subscribe(lane(1, Position(1, 1, 1024)))
    node.run()
    assert reader.end() == ("FAILED", "disk_failed", Position(1, 1, 1024))
    node.engine.disk.read_error = 0
    reader.ends.clear()
    reader.subscribe(lane(1, Position(1, 1, 1024)))
    node.run()

    assert reader.sequences == {1: [1, 2, 3, 4]}


def test_a_load_that_takes_too_long_ends_the_lane_and_is_worth_another_try(node: PushNode, reader: Reader) -> None:
    node.append(5)
    node.to_disk()
    reader.subscribe(lane())
    node.run(disk=False)
    node.loop.advance(LOAD_WAIT_S - 0.001)
    node.run(disk=False)
    assert reader.ends == {}
    node.loop.advance(0.002)
    node.run(disk=False)

    assert reader.end()[:2] == ("FAILED", "unavailable")
    node.run()
    assert reader.runs == [], "it comes when nobody waits any more"


def test_a_lane_that_is_cancelled_while_it_waits_for_the_disk_is_over(node: PushNode, reader: Reader) -> None:
    node.append(5)
    node.to_disk()
    reader.subscribe(lane(1), lane(2))
    node.run(disk=False)
    reader.cancel(1)
    node.run()
    node.loop.advance(60)
    node.run()

    assert reader.sequences == {2: list(range(5))}
    assert reader.end(1) == ("CANCELLED", "", Position(1, 1, 0))
    assert list(reader.ends) == [1]


def test_a_lane_that_waits_for_the_disk_is_told_when_its_stream_is_dropped(node: PushNode, reader: Reader) -> None:
    node.append(5)
    node.to_disk()
    reader.subscribe(lane())
    node.run(disk=False)
    node.engine.streams.drop(STREAM_ID)
    node.run()

    assert reader.end()[:2] == ("FAILED", "unknown_stream")


def test_damage_on_disk_is_told_with_its_limits(node: PushNode, reader: Reader) -> None:
    node.append(5)
    node.to_disk()
    with node.engine.store.path(1).open("r+b") as file:
        file.seek(CHUNK_BYTES + 200)
        file.write(b"\xff")
    reader.subscribe(lane())
    node.run()

    assert reader.sequences == {1: [0]}
    assert reader.end() == ("FAILED", "data_lost", Position(1, 1, 1024))
    reader.subscribe(lane(2, Position(1, 1, 2048)))
    node.run()
    assert reader.sequences[2] == [2, 3, 4]


def test_where_readers_are_is_known_while_their_lanes_live(node: PushNode, reader: Reader) -> None:
    node.append(5)
    other = Reader(node)
    entry = node.streamlet().entries[0]
    reader.subscribe(lane())
    other.subscribe(lane(), window_bytes=CHUNK_BYTES)
    node.run(disk=False)
    assert sorted(entry.readers.values()) == [(1, 1), (1, 2)]
    assert state_of(entry.resident[1, 1]) == SegmentState.GROUP
    other.cancel(1)
    assert list(entry.readers.values()) == [(1, 2)]
    assert state_of(entry.resident[1, 1]) == SegmentState.PROCESSED
    reader.connection.lost()

    assert entry.readers == {}


# --- leases ------------------------------------------------------------------------------------------------


def test_each_run_is_a_lease_until_it_is_released(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane())
    for _ in range(3):
        node.append(1)
        node.run()
    slot = node.engine.arena.slot(reader.runs[0].slot)
    assert {run.slot for run in reader.runs} == {slot.index}
    assert slot.leases == 3
    node.engine.streams.drop(STREAM_ID)
    node.run()
    reader.release(slot.index, slot.index)
    assert (slot.leases, node.engine.arena.free_slots) == (1, SLOTS - 1)
    reader.release(slot.index)

    assert node.engine.arena.free_slots == SLOTS


def test_the_end_of_a_connection_ends_its_leases_and_no_others(node: PushNode, reader: Reader) -> None:
    other = Reader(node)
    for each in (reader, other):
        each.subscribe(lane())
    node.append(5)
    node.run()
    node.engine.streams.drop(STREAM_ID)
    node.run()
    reader.release(reader.runs[0].slot)
    assert [node.engine.arena.slot(run.slot).leases for run in reader.runs] == [1, 2]
    reader.connection.lost()
    reader.connection.lost()
    assert [node.engine.arena.slot(run.slot).leases for run in reader.runs] == [1, 1]
    assert node.engine.arena.free_slots == SLOTS - 2
    other.connection.lost()

    assert node.engine.arena.free_slots == SLOTS
    assert (node.totals.connections, node.totals.subscriptions) == (0, 0)


# --- a reader that does not take what it is sent -----------------------------------------------------------


def test_nothing_is_sent_to_a_reader_who_does_not_take_it(node: PushNode, reader: Reader) -> None:
    reader.subscribe(lane())
    reader.connection.pause()
    node.append(2)
    node.run()
    assert reader.messages == []
    assert node.loop.soon == []
    reader.connection.resume()
    node.append(1)
    node.run()

    assert [run.length_bytes for run in reader.runs] == [3 * CHUNK_BYTES]


def test_a_flush_that_was_under_way_when_the_reader_was_held_or_lost_sends_nothing(
    node: PushNode, reader: Reader
) -> None:
    other = Reader(node)
    for each in (reader, other):
        each.subscribe(lane())
    node.append(1)
    reader.connection.pause()
    other.connection.lost()
    node.run()
    assert reader.messages == other.messages == []
    reader.connection.resume()
    node.run()

    assert reader.sequences == {1: [0]}


# --- a peer that cannot be trusted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (Kind.HELLO, b"", "HELLO"),
        (Kind.RUNS, bytes(64), "RUNS"),
        (Kind.END, b"", "END"),
        (Kind.SUBSCRIBE, b"\xff", "PushSubscribe"),
        (Kind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=[lane(1)]).SerializeToString(), "lane 1 is in use"),
        (Kind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=[lane(2), lane(2)]).SerializeToString(), "lane 2 is in use"),
        (Kind.SUBSCRIBE, push_pb2.PushSubscribe(consumer_group="x" * 257).SerializeToString(), "too long"),
        (Kind.CANCEL, bytes(5), "length"),
        (Kind.RELEASE, bytes(5), "length"),
        (Kind.RELEASE, b"\x01\x00\x00\x00", "slot 1 is not leased"),
        (Kind.RELEASE, bytes(8), "slot 0 is not leased"),
        (Kind.RELEASE, b"\xff\xff\xff\xff", "is not leased"),
        (Kind.TAKEN, bytes(7), "length"),
        (Kind.TAKEN, (CHUNK_BYTES + 1).to_bytes(8, "little"), "has taken 1025 bytes of 1024"),
    ],
)
def test_what_no_reader_says_is_refused_and_the_end_frees_everything(
    node: PushNode, reader: Reader, kind: Kind, body: bytes, said: str
) -> None:
    node.append(1)
    reader.subscribe(lane())
    node.run()
    assert node.engine.arena.slot(0).leases == 1
    with pytest.raises(ProtocolError, match=said):
        reader.say(kind, body)
    reader.connection.lost()

    assert node.engine.arena.leased_slots == 0
    assert node.streamlet().entries[0].waiters == set()
    assert (node.totals.connections, node.totals.subscriptions) == (0, 0)


def test_the_lease_of_another_reader_cannot_be_released(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(lane())
    node.run()
    with pytest.raises(ProtocolError, match="not leased"):
        Reader(node).release(reader.runs[0].slot)

    assert node.engine.arena.slot(reader.runs[0].slot).leases == 1


# --- counting ----------------------------------------------------------------------------------------------


def test_what_is_pushed_is_counted(node: PushNode, reader: Reader) -> None:
    node.append(5)
    reader.subscribe(lane(1), lane(2, end=Position(1, 1, 1024)), lane(3, stream_id=99))
    node.run()
    totals = node.totals

    assert (totals.connections, totals.subscriptions, totals.runs, totals.bytes) == (1, 1, 3, 6 * CHUNK_BYTES)
    assert totals.ends == {"reached": 1, "moved": 0, "failed": 1, "pull": 0, "cancelled": 0}
    assert node.streamlet().bytes_read == 6 * CHUNK_BYTES
