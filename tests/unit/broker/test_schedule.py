"""The order of reading virtual segments: wanted ones first, each once, and again when there is something new."""

from collections.abc import Iterable

from kera.broker.records import SegmentAddress
from kera.broker.recovery.scan import ReplicasToRead, VirtualKey
from kera.broker.recovery.schedule import Schedule
from kera.core.base.ids import EARLIEST, EntryId, Position

LENGTH = 1000


def at(segment: int, entry: int = 0) -> SegmentAddress:
    return SegmentAddress(1, 0, entry, 1, segment)


def replicas(number: int, *segments: SegmentAddress, backups: Iterable[int] = (1, 2)) -> ReplicasToRead:
    return ReplicasToRead(VirtualKey(7, number), number, LENGTH, tuple(backups), first=set(segments))


def scheduled(*found: ReplicasToRead, read_to: Position = EARLIEST) -> Schedule:
    """A schedule with all segments of these replicas, in order."""
    schedule = Schedule()
    addresses = {address for each in found for address in each.segments}
    schedule.add(found, addresses, new=True)
    schedule.order(dict.fromkeys(addresses, LENGTH), lambda _: read_to)
    return schedule


def read_all(schedule: Schedule) -> list[int]:
    """Read everything that can be read, successfully."""
    numbers = []
    while (found := schedule.next(lambda _: True)) is not None:
        numbers.append(found.key.virtual_segment_id)
        schedule.ended(found.key, "")
    return numbers


def test_unread_segments_come_in_order_and_then_read_ones_the_newest_first() -> None:
    found = [replicas(number, at(number)) for number in (5, 3, 1, 4, 2)]
    assert read_all(scheduled(*found, read_to=Position(1, 2, LENGTH))) == [3, 4, 5, 2, 1]


def test_each_entry_has_its_own_cursor() -> None:
    found = [replicas(1, at(1)), replicas(2, at(2)), replicas(3, at(1, entry=1))]
    schedule = Schedule()
    addresses = {address for each in found for address in each.segments}
    schedule.add(found, addresses, new=True)
    cursors = {EntryId(1, 0, 0): Position(1, 1, LENGTH), EntryId(1, 0, 1): EARLIEST}
    schedule.order(dict.fromkeys(addresses, LENGTH), cursors.__getitem__)
    assert read_all(schedule) == [2, 3, 1]


def test_a_segment_that_a_reader_waits_for_comes_first() -> None:
    schedule = scheduled(*(replicas(number, at(number)) for number in (1, 2, 3)))
    schedule.want(at(3))
    schedule.want(at(9))  # no replica has it
    assert read_all(schedule) == [3, 1, 2]


def test_replicas_of_segments_that_others_have_too_come_last() -> None:
    copies = replicas(1)
    copies.also = {at(1)}
    assert read_all(scheduled(copies, replicas(2, at(1)))) == [2, 1]


def test_segments_that_are_no_longer_missing_are_not_read() -> None:
    schedule = scheduled(replicas(1, at(1)), replicas(2, at(2)))
    found = schedule.next(lambda address: address == at(2))
    assert found is not None
    assert found.key.virtual_segment_id == 2
    assert schedule.next(lambda _: True) is None


def test_a_schedule_is_quiet_only_when_no_replica_is_being_read_or_can_be_read() -> None:
    schedule = scheduled(replicas(1, at(1)))
    assert not schedule.quiet
    found = schedule.next(lambda _: True)
    assert found is not None
    assert not schedule.quiet
    schedule.ended(found.key, "")
    assert schedule.quiet


def test_a_failed_replica_waits_for_a_retry() -> None:
    only = replicas(1, at(1))
    schedule = scheduled(only)
    assert schedule.next(lambda _: True) is only
    schedule.ended(only.key, "a bad moment")
    schedule.want(at(1))
    assert schedule.next(lambda _: True) is None
    assert schedule.may_come(at(1), unread=())
    assert schedule.retry() == [(only, "a bad moment")]
    schedule.order({at(1): LENGTH}, lambda _: EARLIEST)
    assert read_all(schedule) == [1]
    assert schedule.retry() == []


def test_no_more_may_come_from_a_replica_that_was_read() -> None:
    schedule = scheduled(replicas(1, at(1)), replicas(2, at(1)))
    first = schedule.next(lambda _: True)
    assert first is not None
    assert {key.virtual_segment_id for key in schedule.unread([at(1)])} == {1, 2}, "being read, and to be read"
    schedule.ended(first.key, "")
    unread = schedule.unread([at(1)])
    assert {key.virtual_segment_id for key in unread} == {2}
    assert schedule.may_come(at(1), unread)
    assert not schedule.may_come(at(1), unread=())


def test_a_replica_is_read_again_when_another_backup_has_it() -> None:
    known = replicas(1, at(1), backups=[1])
    schedule = scheduled(known)
    assert read_all(schedule) == [1]
    known.tried.add(1)
    schedule.add([replicas(1, at(1), backups=[1])], {at(1)}, new=False)
    schedule.order({at(1): LENGTH}, lambda _: EARLIEST)
    assert read_all(schedule) == [], "there is nothing new"

    schedule.add([replicas(1, at(1), backups=[2])], {at(1)}, new=False)
    assert schedule.count_replicas(at(1)) == 2
    schedule.order({at(1): LENGTH}, lambda _: EARLIEST)
    assert read_all(schedule) == [1]


def test_a_replica_is_read_again_when_it_has_other_missing_segments() -> None:
    known = replicas(1, at(1), backups=[1])
    schedule = scheduled(known)
    assert read_all(schedule) == [1]
    known.tried.add(1)
    schedule.add([replicas(1, at(2), backups=[1])], {at(2)}, new=True)
    schedule.order({at(1): LENGTH, at(2): LENGTH}, lambda _: EARLIEST)
    assert read_all(schedule) == [1]
    assert known.tried == set()


def test_a_schedule_is_empty_when_all_segments_have_come() -> None:
    schedule = scheduled(replicas(1, at(1), at(2)))
    schedule.forget(at(1))
    assert len(schedule.unread([at(2)])) == 1
    schedule.forget(at(2))
    assert read_all(schedule) == []
    assert schedule.quiet
    assert schedule.count_replicas(at(1)) == 0
