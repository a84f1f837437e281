"""Memory of pushed chunks: readers lease it until they release it, and must pull when they hold too much."""

import errno
from collections.abc import Callable

import pytest

from kera.broker.log.entry import state_of
from kera.broker.log.segment import SegmentState
from kera.broker.serving.limits import PushLimits
from kera.core.base.ids import Position
from kera.core.errors import DiskFull
from tests.unit.broker.push_support import SLOTS, PushNode, Reader, lane
from tests.unit.broker.support import CHUNK_BYTES, STREAM_ID, Engine, stream_info


def hold(node: PushNode, count: int) -> list[Reader]:
    """Readers that hold `count` slots with full segments."""
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


def test_a_reader_that_holds_too_much_memory_must_pull(node: PushNode, reader: Reader) -> None:
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


def test_open_segments_do_not_count_as_memory_held_by_one_reader(engine: Engine) -> None:
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


def test_lanes_that_want_more_must_pull_when_readers_hold_half_of_the_memory(node: PushNode) -> None:
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


def test_a_reader_that_would_need_the_memory_reserve_must_pull(make_engine: Callable[..., Engine]) -> None:
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
def test_lanes_beyond_the_limit_must_pull(node: PushNode, reader: Reader) -> None:
    assert PushLimits().subscriptions_max == 65536
    node.append(1)
    reader.subscribe(lane(1), lane(2), lane(3, Position(1, 1, 0)))
    node.run()

    assert reader.sequences == {1: [0], 2: [0]}
    assert reader.end(3) == ("PULL", "", Position(1, 1, 0))
    assert node.totals.subscriptions == 2


# --- leases ------------------------------------------------------------------------------------------------


def test_each_run_is_a_lease_until_its_release(node: PushNode, reader: Reader) -> None:
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


def test_the_end_of_a_connection_ends_only_its_own_leases(node: PushNode, reader: Reader) -> None:
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


# --- where readers are -------------------------------------------------------------------------------------


def test_positions_of_readers_are_known_while_their_lanes_live(node: PushNode, reader: Reader) -> None:
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
