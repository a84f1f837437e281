from kera.coordinator.cluster.starts import joined, merged, starts_at, without_interval
from kera.v1.common_pb2 import Cursor, EntryStart, RecoverySource, StreamletAssignment
from tests.unit.coordinator.test_intervals import assignment


def start(group_id: int, *, entry: int = 0, position: int = 0) -> EntryStart:
    return EntryStart(start=Cursor(entry=entry, group_id=group_id, segment_id=1, position=position), first_record=7)


def recovering(of: StreamletAssignment) -> StreamletAssignment:
    of.sources.append(RecoverySource(broker_id=9, before_epoch=9))
    return of


def groups(starts: list[EntryStart]) -> list[tuple[int, int]]:
    return [(one.start.entry, one.start.group_id) for one in starts]


def test_the_last_start_of_each_entry_in_each_interval_counts() -> None:
    two = assignment((1, 1), (2, 57))
    known = [start(3), start(4, entry=1), start(60)]

    assert groups(merged(two, known, [start(5), start(58, entry=1)])) == [(0, 5), (1, 4), (0, 60), (1, 58)]
    assert groups(merged(two, known, [start(2)])) == [(0, 3), (1, 4), (0, 60)]
    assert merged(two, [start(3)], [start(3, position=128)]) == [start(3, position=128)]
    assert merged(two, known, []) == [start(3), start(4, entry=1), start(60)]


def test_the_starts_for_a_recovery_are_those_of_the_brokers_last_own_intervals() -> None:
    three = assignment((1, 1), (2, 57), (1, 90))
    known = [start(3), start(60), start(91), start(92, entry=1)]

    assert groups(starts_at(three, 1, known)) == [(0, 3), (1, 92)]
    assert groups(starts_at(three, 2, known)) == [(0, 60)]
    assert starts_at(three, 3, known) == []


def test_the_earliest_start_counts_until_joined_intervals_are_recovered() -> None:
    """The owner may report a start in its own part before it knows that it has the older part too."""
    joined = recovering(assignment((2, 1)))
    known = [start(3), start(60)]

    told = merged(joined, known, [start(61)])

    assert groups(starts_at(joined, 2, told)) == [(0, 3)]
    assert groups(merged(joined, told, [start(62)])) == [(0, 3), (0, 62)]
    assert groups(merged(assignment((2, 1)), told, [start(70)])) == [(0, 70)]


def test_the_next_interval_gets_its_beginning_as_start_when_the_first_is_removed() -> None:
    """A single interval does not record its first records."""
    two = assignment((1, 1), (2, 57))
    two.intervals[1].first_records[:] = [5, 0, 9]
    (first, third) = without_interval(two, [start(3)], 0)
    assert (first.start.entry, first.start.group_id, first.start.segment_id, first.first_record) == (0, 57, 1, 5)
    assert (third.start.entry, third.first_record) == (2, 9)
    assert groups(without_interval(two, [start(3), start(60)], 0)) == [(0, 60), (2, 57)]
    assert groups(without_interval(two, [start(3), start(60)], 1)) == [(0, 3)]


def with_records(of: StreamletAssignment, *records: int) -> StreamletAssignment:
    """Set the first record of each interval but the first one."""
    for interval, record in zip(of.intervals[1:], records, strict=True):
        interval.first_records[:] = [record]
    return of


def test_the_beginning_of_a_later_interval_is_no_start_after_a_join() -> None:
    """The report came from a broker with only the later interval; it would hide older groups elsewhere."""
    two, one = with_records(assignment((1, 1), (2, 57)), 7), assignment((2, 1))

    assert joined(two, one, [start(57)]) == []
    assert groups(joined(two, one, [start(3), start(57)])) == [(0, 3)]
    removed = with_records(assignment((1, 1), (2, 57)), 6)
    assert groups(joined(removed, one, [start(57)])) == [(0, 57)], "record 6 is gone, and so is what was before it"
    three = with_records(assignment((1, 1), (2, 57), (1, 90)), 7, 7)
    assert groups(joined(three, assignment((1, 1), (2, 90)), [start(57), start(90)])) == [(0, 90)]


def test_the_beginning_of_a_brokers_later_interval_is_no_start_of_its_groups() -> None:
    three = with_records(assignment((1, 1), (2, 57), (1, 90)), 3, 7)

    assert starts_at(three, 1, [start(90)]) == []
    assert groups(starts_at(three, 2, [start(57)])) == [(0, 57)]
    assert groups(starts_at(with_records(three, 3, 6), 1, [start(90)])) == [(0, 90)]


def test_a_first_start_during_a_recovery_does_not_hide_the_older_groups() -> None:
    one = recovering(assignment((2, 1)))
    assert merged(one, [], [start(61)]) == []
    assert groups(merged(assignment((2, 1)), [], [start(61)])) == [(0, 61)]


def test_a_removal_counts_even_if_older_records_are_elsewhere() -> None:
    """Otherwise a recovery would take the removed records for lost, as no broker has them any more."""
    removed = start(61)
    removed.removed = True
    one = recovering(assignment((2, 1)))

    assert merged(one, [], [removed]) == [removed]
    assert merged(one, [start(3), start(60)], [removed]) == [removed]
    assert merged(one, [start(70)], [removed]) == [start(70)]
    two = with_records(assignment((1, 1), (2, 57)), 7)
    assert joined(two, one, [removed]) == [removed]
    assert starts_at(with_records(assignment((2, 1), (1, 30), (2, 57)), 3, 7), 2, [removed]) == [removed]


def test_a_removal_by_a_later_owner_covers_older_groups_at_another_broker() -> None:
    """Otherwise a recovery of the older groups would bring back truncated records."""
    removed = start(61)
    removed.removed = True
    two = with_records(assignment((1, 1), (2, 57)), 3)

    assert starts_at(two, 1, [start(4), removed]) == [removed]
    assert starts_at(two, 1, [removed]) == [removed]
    assert groups(starts_at(two, 1, [start(4), start(61)])) == [(0, 4)], "that one merely begins there"
    three = with_records(assignment((2, 1), (1, 57), (3, 90)), 3, 9)
    assert groups(starts_at(three, 3, [removed, start(91)])) == [(0, 91)]


def test_a_removal_of_an_older_interval_does_not_cover_the_interval_between() -> None:
    """All of the broker's older interval was truncated, up to a place at the broker of the next interval."""
    three = with_records(assignment((1, 1), (2, 57), (1, 90)), 3, 7)
    told = start(90)
    told.removed = True

    (gone,) = merged(three, [], [told])
    assert (gone.start.group_id, gone.start.segment_id, gone.start.position) == (57, 1, 0)
    assert (gone.first_record, gone.removed) == (3, True)
    assert starts_at(three, 2, [gone]) == [gone], "what that one has is all there"
    assert starts_at(three, 1, [start(1), gone]) == [gone], "and nothing of the older interval is"
    assert merged(three, [], [start(90)]) == [start(90)]


def test_a_removal_at_the_beginning_of_a_brokers_only_interval_does_not_count() -> None:
    two = with_records(assignment((2, 1), (1, 90)), 7)
    told = start(90)
    told.removed = True
    assert merged(two, [], [told]) == [start(90)]
