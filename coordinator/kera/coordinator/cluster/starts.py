"""Where the entries of streamlets start, as brokers report it, kept for the recovery of a broker. Pure.

Records that retention or truncation has removed may still be in replicas, since a virtual segment lives as long as
anything in it does. A recovery that did not know where an entry starts would bring removed records back, or take the
hole behind them for a loss.

Each broker reports the starts of its own part, so an entry has one start per interval of its streamlet. When a recovery
joins intervals, the earliest start of an entry counts until the new owner has all of them and has reported its own. A
start that is too early costs some work; a start that is too late would hide acknowledged records. A start at the first
record of its interval, before which nothing was removed in it, says nothing about older intervals. So such a start does
not count if the same broker has an older interval, or if the intervals are joined by now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kera.coordinator.cluster.intervals import index_of_group, intervals_of
from kera.v1.common_pb2 import Cursor, EntryStart, GroupInterval, StreamletAssignment


def merged(
    assignment: StreamletAssignment, known: Iterable[EntryStart], told: Iterable[EntryStart]
) -> list[EntryStart]:
    """Return the starts of a streamlet after a broker reported the starts `told`."""
    before = _by_place(assignment, known)
    after = _by_place(assignment, [_where_it_is_gone(assignment, start) for start in told])
    kept = []
    for place in sorted({*before, *after}):
        old, new = before[place], after[place]
        if not new:
            kept += old
        elif new[-1].removed:  # a broker removes records only together with everything older
            kept.append(max([*old, new[-1]], key=_order))
        elif not old:
            # The sender may not know yet of an older interval that it also has: where its own begins is no news then.
            kept += [] if assignment.sources else [new[-1]]
        elif assignment.sources:
            kept += [old[0], max(old[-1], new[-1], key=_order)] if old[0] != new[-1] else [old[0]]
        else:
            kept.append(max(old[0], new[-1], key=_order))
    return kept


def without_interval(assignment: StreamletAssignment, known: Iterable[EntryStart], index: int) -> list[EntryStart]:
    """Return the starts of a streamlet once nothing is left of one of its intervals.

    Without the first interval, only the second one's `first_records` say with which records its entries begin.
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
    """Return the starts of a streamlet some of whose intervals were joined: in each, only the first part's starts
    count.

    A start of a later part counts only if it reports a removal.
    """
    begins = [interval.first_group_id for interval in intervals_of(after)]

    def counts(start: EntryStart) -> bool:
        first = index_of_group(before, begins[index_of_group(after, start.start.group_id)])
        return index_of_group(before, start.start.group_id) == first or _tells_of_a_removal(before, start)

    return list(filter(counts, known))


def _tells_of_a_removal(assignment: StreamletAssignment, start: EntryStart) -> bool:
    """Whether records of the start's interval are gone, and thus everything before them."""
    interval = intervals_of(assignment)[index_of_group(assignment, start.start.group_id)]
    return start.removed or start.first_record > _first_record(interval, start.start.entry)


def starts_at(assignment: StreamletAssignment, broker_id: int, known: Iterable[EntryStart]) -> list[EntryStart]:
    """Return where the entries start in one broker's part of a streamlet, as far as that is known.

    If a later interval has lost records of an entry to retention or truncation, the entry starts there.
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
    """Return up to where an entry is gone, for a broker that removed records and starts at the beginning of an
    interval.

    Its own interval before that one is gone, and everything older; other brokers may still have the intervals in
    between.
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
    """Return the starts of each entry in each interval, in order."""
    places: defaultdict[tuple[int, int], list[EntryStart]] = defaultdict(list)
    for start in sorted(starts, key=_order):
        places[index_of_group(assignment, start.start.group_id), start.start.entry].append(start)
    return places


def _order(start: EntryStart) -> tuple[int, int, int]:
    cursor = start.start
    return cursor.group_id, cursor.segment_id, cursor.position
