"""Pushing from disk: segments are loaded for the lanes in turn, without delaying other lanes."""

import errno

from kera.broker.serving.limits import PushLimits, ServingLimits
from kera.core.base.ids import Position
from kera.v1 import push_pb2
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import CHUNK_BYTES, STREAM_ID, Engine, stream_info

LOADING_MAX = PushLimits().loads_at_once
LOAD_WAIT_S = ServingLimits().load_wait_ms / 1000


def test_a_lane_catches_up_from_disk_and_follows_without_gap_or_repeat(node: PushNode, reader: Reader) -> None:
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


def test_a_lane_that_waits_for_the_disk_does_not_delay_others(node: PushNode, reader: Reader) -> None:
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


def test_a_limited_number_of_lanes_loads_from_disk_at_once(engine: Engine) -> None:
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


def test_lanes_that_time_out_on_the_disk_give_their_turn_to_others(engine: Engine) -> None:
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


def test_a_full_window_loads_nothing_from_disk(node: PushNode, reader: Reader) -> None:
    node.append(9)
    node.to_disk()
    node.append(1, producer=1)
    reader.subscribe(lane(2, entry=1), lane(1), window_bytes=CHUNK_BYTES)
    node.run()
    assert node.engine.memory.totals.segments_loaded == 0
    reader.take(CHUNK_BYTES)
    node.run()

    assert reader.sequences == {2: [0], 1: [0]}


def test_an_unreadable_disk_ends_the_lane(node: PushNode, reader: Reader) -> None:
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


def test_a_slow_load_ends_the_lane_with_a_retriable_error(node: PushNode, reader: Reader) -> None:
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
    assert not any(node.engine.memory.loads._waiters.values()), "who waits no longer is forgotten"
    node.run()
    assert reader.runs == [], "it comes when nobody waits any more"


def test_cancelling_a_lane_that_waits_for_the_disk_ends_it_for_good(node: PushNode, reader: Reader) -> None:
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


def test_a_lane_that_waits_for_the_disk_fails_when_its_stream_is_dropped(node: PushNode, reader: Reader) -> None:
    node.append(5)
    node.to_disk()
    reader.subscribe(lane())
    node.run(disk=False)
    node.engine.streams.drop(STREAM_ID)
    node.run()

    assert reader.end()[:2] == ("FAILED", "unknown_stream")


def test_damage_on_disk_ends_the_lane_at_the_damage(node: PushNode, reader: Reader) -> None:
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
