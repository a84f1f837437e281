"""Removed data of a replicated stream is deleted once the coordinator knows: a recovery would miss it otherwise."""

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.log.entry import Entry
from kera.broker.ownership.moved_starts import MovedStarts
from kera.core.base.done import Done
from kera.core.base.ids import Position
from kera.core.errors import NotOwner
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.broker.replication_support import Replicated


def told(report: HeartbeatReport) -> list[int]:
    request = coordinator_pb2.HeartbeatRequest()
    report.fill(request)
    return [each.first_record for each in request.starts]


def test_removed_data_of_a_replicated_stream_is_deleted_once_the_coordinator_knows(world: Replicated) -> None:
    """A recovery that did not know would find the data missing on backups."""
    streams, stream = world.engine.streams, world.open()
    world.append(stream)
    world.finish()
    entry, report, gone = stream.streamlets[0].entries[0], HeartbeatReport(world.engine.streams), list[object]()
    streams.move_start(entry, entry.end, entry.next_record, gone.append)
    assert streams.moved_starts.hurry.is_set()
    world.engine.run()
    assert not gone

    assert told(report) == [entry.next_record]
    world.engine.run()
    assert not gone, "nobody has answered"
    streams.moved_starts.when_removed(entry, gone.append)
    report.answered(coordinator_pb2.HeartbeatResponse())
    world.engine.run()
    assert gone == [None, None]
    assert told(report) == []
    streams.moved_starts.when_removed(entry, gone.append)
    world.engine.run()
    assert gone == [None] * 3, "nobody need be told"

    world.append(stream)
    world.finish()
    streams.move_start(entry, entry.end, entry.next_record, gone.append)
    streams.drop(stream.stream_id)
    assert isinstance(gone[-1], NotOwner)
    assert told(report) == []


def test_no_data_is_deleted_while_others_recover_it_from_replicas(world: Replicated) -> None:
    streams, stream = world.engine.streams, world.open()
    world.append(stream)
    world.finish()
    entry, report, gone = stream.streamlets[0].entries[0], HeartbeatReport(world.engine.streams), list[object]()
    streams.move_start(entry, entry.end, entry.next_record, gone.append)

    for _ in range(2):
        assert told(report) == [entry.next_record]
        refused = [common_pb2.StreamletRef(stream_id=stream.stream_id)]
        report.answered(coordinator_pb2.HeartbeatResponse(starts_refused=refused))
        world.engine.run()
        assert isinstance(gone.pop(), NotOwner)
        streams.moved_starts.when_removed(entry, gone.append)

    assert told(report) == [entry.next_record]
    report.answered(coordinator_pb2.HeartbeatResponse())
    world.engine.run()
    assert gone == [None]


def test_a_refused_removal_fails_its_waiter_and_is_carried_out_later(
    world: Replicated,
) -> None:
    removed, gone = list[Entry](), list[object]()
    entry = world.open().streamlets[0].entries[0]

    def remove(entry: Entry, done: Done) -> None:
        removed.append(entry)
        done(None)

    moved = MovedStarts(remove)
    moved.note([entry])
    moved.refused(entry)
    moved.told(entry)
    assert not removed, "it was only to be told"

    moved.move(entry, Position(1, 1, 64), 1, gone.append, replicated=True)
    moved.refused(entry)
    assert (len(gone), removed, list(moved)) == (1, [], [entry])
    moved.told(entry)
    assert removed == [entry]
    assert list(moved) == []
    moved.refused(entry)
    assert list(moved) == [], "a streamlet that has gone is not told of"
