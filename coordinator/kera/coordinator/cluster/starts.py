"""Where the entries of streamlets start: what brokers say of it, kept for the recovery of a broker. Pure.

What retention or truncation has removed may still be in replicas, since a virtual segment lives as long as anything in
it does. A recovery that did not know where an entry starts would bring it back, or take the hole behind it for a loss.

Each broker tells the starts of what it has; so an entry has one for each interval of its streamlet. When a recovery
joins intervals, the earliest start of an entry counts until the new owner has all of them, and has told its own: one
that is too early costs some work, one that is too late would hide what was acknowledged. So a start with the first
record of its interval, before which nothing was removed there, says nothing of older intervals: where a broker has one,
or they are one by now, it does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kera.coordinator.cluster.intervals import index_of_group, intervals_of
from kera.v1.common_pb2 import Cursor, EntryStart, GroupInterval, StreamletAssignment


def merged(
    assignment: StreamletAssignment, known: Iterable[EntryStart], told: Iterable[EntryStart]
) -> list[EntryStart]:
    """The starts of a streamlet after a broker told some."""
    before = _by_place(assignment, known)
    after = _by_place(assignment, [_where_it_is_gone(assignment, start) for start in told])
    kept = []
    for place in sorted({*before, *after}):
        old, new = before[place], after[place]
        if not new:
            kept += old
        elif new[-1].removed:  # whoever removes something does so with all that is older
            kept.append(max([*old, new[-1]], key=_order))
        elif not old:
            # The sender may not know yet that it has an older interval, too: where its own began is not news then.
            kept += [] if assignment.sources else [new[-1]]
        elif assignment.sources:
            kept += [old[0], max(old[-1], new[-1], key=_order)] if old[0] != new[-1] else [old[0]]
        else:
            kept.append(max(old[0], new[-1], key=_order))
    return kept


def without_interval(assignment: StreamletAssignment, known: Iterable[EntryStart], index: int) -> list[EntryStart]:
    """The starts of a streamlet once nothing is left of one of its intervals.

    Of the one behind the first nothing else says then with which records its entries begin.
    """
    left = [start for start in known if index_of_group(assignment, start.start.group_id) != index]
    if index == 0:
        following = intervals_of(assignment)[1]
        told = {start.start.entry for start in left if index_of_group(assignment, start.start.group_id) == 1}
        begins = {"group_id": following.first_group_id, "segment_id": 1, "streamlet_id": assignment.streamlet_id}
        left += [
            EntryStart(start=Cursor(entry=entry, **begins), first_record=record)
            for entry, record in enumerate(following.first_records)
            if record and entry not in told
        ]
    return left


def joined(before: StreamletAssignment, after: StreamletAssignment, known: Iterable[EntryStart]) -> list[EntryStart]:
    """The starts of a streamlet of which intervals have become one: of none does a later one say where it starts."""
    begins = [interval.first_group_id for interval in intervals_of(after)]

    def counts(start: EntryStart) -> bool:
        first = index_of_group(before, begins[index_of_group(after, start.start.group_id)])
        return index_of_group(before, start.start.group_id) == first or _tells_of_a_removal(before, start)

    return list(filter(counts, known))


def _tells_of_a_removal(assignment: StreamletAssignment, start: EntryStart) -> bool:
    """Whether records of its interval are gone, and so all that was before them."""
    interval = intervals_of(assignment)[index_of_group(assignment, start.start.group_id)]
    return start.removed or start.first_record > _first_record(interval, start.start.entry)


def starts_at(assignment: StreamletAssignment, broker_id: int, known: Iterable[EntryStart]) -> list[EntryStart]:
    """Where the entries start of what one broker has of a streamlet, as far as that is known.

    If a later interval has lost records of an entry to retention or truncation, that is where the entry starts.
    """
    intervals = intervals_of(assignment)
    oldest = next((index for index, interval in enumerate(intervals) if interval.broker_id == broker_id), 0)
    first: dict[int, EntryStart] = {}
    for start in sorted(known, key=_order):
        index, entry = index_of_group(assignment, start.start.group_id), start.start.entry
        if start.removed and index > oldest:
            first[entry] = start
        elif intervals[index].broker_id == broker_id and (index == oldest or _tells_of_a_removal(assignment, start)):
            first.setdefault(entry, start)
    return [first[entry] for entry in sorted(first)]


def _where_it_is_gone(assignment: StreamletAssignment, start: EntryStart) -> EntryStart:
    """Up to where an entry is gone, when a broker has removed something of it and starts with an interval of its own.

    That is its interval before that one, and what is older; what others have in between may still be there.
    """
    intervals = intervals_of(assignment)
    entry, index = start.start.entry, index_of_group(assignment, start.start.group_id)
    if not start.removed or start.first_record > _first_record(intervals[index], entry):
        return start
    mine = [number for number in range(index) if intervals[number].broker_id == intervals[index].broker_id]
    if not mine:
        return EntryStart(start=start.start, first_record=start.first_record)
    behind = intervals[mine[-1] + 1]
    place = Cursor(
        stream_id=start.start.stream_id,
        streamlet_id=start.start.streamlet_id,
        entry=entry,
        group_id=behind.first_group_id,
        segment_id=1,
    )
    return EntryStart(start=place, first_record=_first_record(behind, entry), removed=True)


def _first_record(interval: GroupInterval, entry: int) -> int:
    return interval.first_records[entry] if entry < len(interval.first_records) else 0


def _by_place(
    assignment: StreamletAssignment, starts: Iterable[EntryStart]
) -> defaultdict[tuple[int, int], list[EntryStart]]:
    """The starts of each entry in each interval, in their order."""
    places: defaultdict[tuple[int, int], list[EntryStart]] = defaultdict(list)
    for start in sorted(starts, key=_order):
        places[index_of_group(assignment, start.start.group_id), start.start.entry].append(start)
    return places


def _order(start: EntryStart) -> tuple[int, int, int]:
    cursor = start.start
    return cursor.group_id, cursor.segment_id, cursor.position
