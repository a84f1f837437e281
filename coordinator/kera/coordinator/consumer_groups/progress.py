"""The progress of a consumer group in a streamlet: its known groups of segments, their holders, and what is done.

No I/O, no waiting. ``assignment`` decides which member holds what. This module follows each group from its discovery
until it and all before it is done, finds the gaps between groups, and defines the stored form.

Invariants:

1. Positions of groups, and cursors of entries, never go back.
2. No group is left out: members report the groups of a streamlet in intervals of ids that follow each other
   (`StreamletProgress.see`), and a group stays known until it is done. The parts of a group follow each other without
   a gap: each ends where the next one starts, and the last one ends with the group.
3. Everything before an entry's cursor is done.
4. Records are never skipped silently. Groups that are removed as a whole before any member has found them leave a gap
   between the ordinals of their neighbours. The gap belongs to the group behind it (`Group.lost`), whose holder reports
   it to the user and confirms that with a step. If that group is done before, the entry's next group gets the gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import InvalidArgument
from kera.v1 import common_pb2
from kera.v1 import consumer_group_pb2 as messages

STREAMLET_GROUPS_MAX = 2048
"""Maximum of groups of a streamlet that are known and not dropped: a record of some 250 KB.

A group that is not finished holds up its streamlet once there are this many after it.
"""
WAITING_MAX = 128
"""Maximum of known groups of a streamlet without a holder.

Members look for the next groups of a backlog once half of these are given, so what is stored and examined does not grow
with the backlog.
"""
PARTS_MAX = 128
"""Maximum of known parts of groups of a streamlet: groups are not split further while there are this many.

That bounds the stored record when a part is not finished: later parts stay known until it is done.
"""
SESSION_DEFAULT_MS = 10_000
"""Session time-out of members without a stored one, in milliseconds."""


def parts_in(progress: messages.StreamletProgress) -> Iterator[messages.GroupProgress]:
    """Yield the groups of a record; for a split group, its parts.

    Parts are within the group's own entry, which describes the whole: a coordinator that does not know parts continues
    at the first place that is not done, and leaves nothing out.
    """
    for group in progress.groups:
        yield from group.parts or (group,)


def describe_whole(whole: messages.GroupProgress) -> None:
    """Set the progress of a split group as a whole. It has no holder and no lease, so no step refers to it."""
    first, last = whole.parts[0], whole.parts[-1]
    reached = next((part for part in whole.parts if not part.done), last)
    whole.next.CopyFrom(reached.next)
    whole.done = reached.done
    whole.joined = first.joined
    if first.HasField("first_record"):
        whole.first_record = first.first_record
    if reached.HasField("next_record"):
        whole.next_record = reached.next_record
    if last.HasField("end_record"):
        whole.end_record = last.end_record
    for part in whole.parts:
        whole.lost.extend(part.lost)


class GroupId(NamedTuple):
    """The id of a group, or of a part of one."""

    stream_id: int
    streamlet_id: int
    group_id: int
    part: int = 0
    """Number of the part within the group; a group that was not split is its part 0."""


class Records(NamedTuple):
    """Records of an entry by their ordinals: from `first` up to, and without, `end`.

    In a gap, `end` is below `first` if ordinals went back with the memory of a host; then the number of lost records is
    unknown.
    """

    first: int
    end: int


class Timeouts(NamedTuple):
    """How long a member may be silent, and how long it may be in its user's code, in milliseconds."""

    session_ms: int
    progress_ms: int
    """0: not known."""


UNKNOWN_TIMEOUTS = Timeouts(SESSION_DEFAULT_MS, 0)


@dataclass(slots=True)
class Group:
    """A group, or a part of one, that is still known."""

    entry: int
    next: Position
    """Next byte to read; of a finished group, its end."""
    end: Position | None = None
    """Where the part ends, and the group's next part starts; None: it ends with the group."""
    done: bool = False
    member_id: str = ""
    """The member that holds it; empty: none."""
    ended: bool = False
    """The holder has read it to the end, and only has to commit."""
    lease: int = 0
    """Number of the last lease."""
    first_record: int | None = None
    """Ordinal of the record with which it begins; None here and below: not known."""
    next_record: int | None = None
    """Ordinal of the record at `next`."""
    end_record: int | None = None
    """Ordinal of the record behind its end."""
    joined: bool = False
    """The gap between the entry's previous group and this one, if any, has been determined."""
    lost: list[Records] = field(default_factory=list)
    """Gaps before `next` that were not reported to the user yet."""
    timeouts: Timeouts = UNKNOWN_TIMEOUTS
    """Time-outs of the holder: a new coordinator knows its members by the groups that they hold."""


class StreamletProgress:
    """The progress of a consumer group in a streamlet."""

    def __init__(
        self,
        stream_id: int,
        streamlet_id: int,
        cursors: Iterable[Position],
        records: Iterable[int | None] = (),
        *,
        lease: int = 0,
    ) -> None:
        self.stream_id = stream_id
        self.streamlet_id = streamlet_id
        self.cursors = list(cursors)
        """Per entry: everything before this position is done."""
        self.records = list(records) or [None] * len(self.cursors)
        """Per entry: ordinal of the record behind the last dropped group, or at the cursor."""
        self.lost: list[list[Records]] = [[] for _ in self.cursors]
        """Per entry: gaps that were not reported to the user yet; the next group gets them."""
        self.leases = [0] * len(self.cursors)
        """Per entry: the last lease of the group that was dropped last."""
        self.listed = max(0, min((cursor.group_id for cursor in self.cursors), default=0) - 1)
        """Groups up to this id are done, or in `groups`."""
        self.groups: dict[tuple[int, int], Group] = {}
        """The known groups by id and part, sorted."""
        self.lease = lease
        """The last lease number that was given."""
        self._waiting: list[tuple[int, int, int]] | None = None
        self.parts = 0
        """The number of `groups` that are parts of a split group."""

    @classmethod
    def from_message(cls, message: messages.StreamletProgress) -> StreamletProgress:
        """Return the progress from its stored form."""
        cursors = map(position_of, message.cursors)
        records = [known(each, "record") for each in message.records]
        self = cls(message.stream_id, message.streamlet_id, cursors, records, lease=message.lease)
        for entry, each in enumerate(message.records):
            self.lost[entry], self.leases[entry] = records_in(each.lost), each.lease
        self.listed = message.listed_group_id
        for item in parts_in(message):
            self.groups[item.next.group_id, item.part] = Group(
                item.next.entry,
                position_of(item.next),
                position_of(item.end) if item.HasField("end") else None,
                item.done,
                item.member_id,
                lease=item.lease,
                first_record=known(item, "first_record"),
                next_record=known(item, "next_record"),
                end_record=known(item, "end_record"),
                joined=item.joined,
                lost=records_in(item.lost),
                timeouts=Timeouts(item.session_timeout_ms or SESSION_DEFAULT_MS, item.progress_timeout_ms),
            )
        self.parts = sum(_is_part(key, group) for key, group in self.groups.items())
        return self

    def to_message(self, consumer_group: str) -> messages.StreamletProgress:
        """Return the stored form."""
        message = messages.StreamletProgress(
            consumer_group=consumer_group,
            stream_id=self.stream_id,
            streamlet_id=self.streamlet_id,
            cursors=[self.cursor(entry) for entry in range(len(self.cursors))],
            listed_group_id=self.listed,
            lease=self.lease,
            records=[
                messages.EntryRecords(record=record, lost=ranges_of(lost), lease=left)
                for record, lost, left in zip(self.records, self.lost, self.leases, strict=True)
            ],
        )
        wholes: dict[int, messages.GroupProgress] = {}
        for (group_id, part), group in self.groups.items():
            if not _is_part((group_id, part), group):
                message.groups.append(self._stored(part, group))
                continue
            if group_id not in wholes:
                wholes[group_id] = message.groups.add()
            wholes[group_id].parts.append(self._stored(part, group))
        for whole in wholes.values():
            describe_whole(whole)
        return message

    def _stored(self, part: int, group: Group) -> messages.GroupProgress:
        held = bool(group.member_id)
        return messages.GroupProgress(
            next=self._cursor(group.entry, group.next),
            done=group.done,
            member_id=group.member_id,
            lease=group.lease,
            first_record=group.first_record,
            next_record=group.next_record,
            end_record=group.end_record,
            joined=group.joined,
            lost=ranges_of(group.lost),
            session_timeout_ms=group.timeouts.session_ms if held else 0,
            progress_timeout_ms=group.timeouts.progress_ms if held else 0,
            end=self._cursor(group.entry, group.end) if group.end is not None else None,
            part=part,
        )

    def cursor(self, entry: int) -> common_pb2.Cursor:
        """Return an entry's cursor as a message."""
        return self._cursor(entry, self.cursors[entry])

    def _cursor(self, entry: int, position: Position) -> common_pb2.Cursor:
        return cursor_of(EntryId(self.stream_id, self.streamlet_id, entry), position)

    @property
    def waiting(self) -> list[tuple[int, int, int]]:
        """Groups and parts without a holder, in the order in which to give them to members.

        Each is a tuple: how many unfinished groups of its entry come before it, its id, and its part.
        """
        if self._waiting is None:
            self._waiting = self._find_waiting()
        return self._waiting

    def _find_waiting(self) -> list[tuple[int, int, int]]:
        found = []
        depths: Counter[int] = Counter()
        for (group_id, part), group in self.groups.items():
            if group.done or group.ended:
                continue
            if not group.member_id:
                found.append((depths[group.entry], group_id, part))
            depths[group.entry] += 1
        return sorted(found)

    def changed(self) -> None:
        """Call this when a group was given or finished, or may wait or not wait for another reason."""
        self._waiting = None

    def has_done(self, step: messages.GroupStep) -> bool:
        """Whether a member's report on a group that it held with this lease is already recorded."""
        place = step.next
        group = self.groups.get((place.group_id, step.part))
        if group is None:  # left behind
            return step.finished and step.lease > 0 and step.lease in self.leases[place.entry : place.entry + 1]
        if group.lease != step.lease:
            return False
        return group.done if step.finished else step.released and position_of(place) <= group.next

    @property
    def room(self) -> int:
        """How many more groups can be added."""
        return max(0, min(STREAMLET_GROUPS_MAX - len(self.groups), WAITING_MAX - len(self.waiting)))

    @property
    def wants_groups(self) -> bool:
        """Whether members should look for more groups."""
        return bool(self.room) and len(self.waiting) <= WAITING_MAX // 2

    def see(self, seen: messages.SeenGroups) -> bool:
        """Add the groups of an interval of ids; return whether that changes anything.

        An interval that does not adjoin the known ids is ignored: groups in between could be left out. Raises
        `InvalidArgument`
        if the groups are not sorted, or are outside the interval or the entries.
        """
        before = self.listed
        if seen.after_group_id > before:
            return False
        newest = {group.entry: group for group in self.groups.values()}
        last, room = 0, self.room
        self.changed()
        for each in seen.groups:
            start = each.start
            if start.group_id <= last or start.group_id > seen.through_group_id or start.entry >= len(self.cursors):
                raise InvalidArgument(
                    "groups are listed in the order of their ids, within the interval and the entries"
                )
            last = start.group_id
            if last <= self.listed:
                continue
            if not room:
                return self.listed > before
            self.listed = last
            if last < self.cursors[start.entry].group_id:
                continue
            room -= 1
            group = newest[start.entry] = self.groups[last, 0] = self._found(each, newest.get(start.entry))
            group.next_record, group.end_record = group.first_record, known(each, "end_record")
        self.listed = max(self.listed, seen.through_group_id)
        return self.listed > before

    def _found(self, seen: messages.SeenGroup, previous: Group | None) -> Group:
        """Return a group that was found behind `previous`, the entry's last known group."""
        entry, start = seen.start.entry, position_of(seen.start)
        cursor, record = self.cursors[entry], self.records[entry]
        if start.group_id == cursor.group_id:
            return Group(entry, cursor, first_record=record, joined=True)
        if previous is None and record is None and cursor == EARLIEST:
            return Group(entry, start, first_record=seen.first_record, joined=True)
        begin = Position(start.group_id, 1, 0)
        if start <= begin or (record if previous is None else previous.end_record) is not None:
            return Group(entry, start, first_record=seen.first_record)
        return Group(entry, begin)  # its start is removed, and the reader learns of that

    def is_next(self, key: GroupId) -> bool:
        """Whether everything before a group or part in its entry is done."""
        entry = self.groups[key[2:]].entry
        return key[2:] == next(each for each, group in self.groups.items() if group.entry == entry and not group.done)

    @property
    def may_split(self) -> bool:
        """Whether a group may get another part."""
        return self.parts < PARTS_MAX

    def split(self, key: GroupId, at: Position, record: int | None) -> bool:
        """End a part at a position, where the record with that ordinal is; the rest becomes the group's next part.

        Returns False if that is not possible: the part does not end with its group, more of it is done already, or
        there are `PARTS_MAX` parts. Repeating a split changes nothing and returns True.
        """
        group = self.groups[key[2:]]
        if group.end is not None:
            return group.end == at
        if at < group.next or not self.may_split:
            return False
        following = Group(
            group.entry, at, first_record=record, next_record=record, end_record=group.end_record, joined=True
        )
        self.parts += 1 if key.part else 2
        group.end, group.end_record = at, record
        self.groups[key.group_id, key.part + 1] = following
        self.groups = dict(sorted(self.groups.items(), key=lambda item: item[0]))
        self.changed()
        return True

    def unsplit(self) -> bool:
        """Join the parts of each group of which no part is held; return whether there were any.

        The joined group starts at the first place that is not done, and what was done behind that is read again. This
        serves members that do not understand parts, when there are no others.
        """
        parts: dict[int, list[tuple[tuple[int, int], Group]]] = {}
        for key, group in self.groups.items():
            if _is_part(key, group):
                parts.setdefault(key[0], []).append((key, group))
        found = False
        for group_id, items in parts.items():
            first, last = items[0][1], items[-1][1]
            whole = next((group for _, group in items if not group.done), None)
            if whole is None or any(group.member_id for _, group in items):
                continue
            found = True
            whole.lost = [gap for _, group in items for gap in group.lost]
            whole.first_record, whole.joined = first.first_record, first.joined
            whole.end, whole.end_record, whole.lease = None, last.end_record, 0
            self.parts -= len(items)
            for key, _ in items:
                del self.groups[key]
            self.groups[group_id, 0] = whole
        if found:
            self.groups = dict(sorted(self.groups.items(), key=lambda item: item[0]))
            self.changed()
        return found

    def advance(self) -> tuple[list[int], list[Group]]:
        """Find gaps, drop groups that are done, and move cursors.

        Returns the entries whose cursor has moved, and the groups that have new gaps to report.
        """
        self.changed()
        telling = self._join()
        moved: set[int] = set()
        unfinished: set[int] = set()
        for key, group in list(self.groups.items()):
            pending = self.lost[group.entry]
            if group.done:
                pending += group.lost
                group.lost = []
            elif pending:
                group.lost = pending + group.lost
                self.lost[group.entry] = []
                telling.append(group)
            if group.entry in unfinished:
                continue
            if group.done:
                self.parts -= _is_part(key, group)
                del self.groups[key]
                self.records[group.entry], self.leases[group.entry] = group.end_record, group.lease
            else:
                unfinished.add(group.entry)
            if group.next > self.cursors[group.entry]:
                self.cursors[group.entry] = group.next
                moved.add(group.entry)
        return sorted(moved), telling

    def _join(self) -> list[Group]:
        """Determine the gaps between groups whose ends are known by now and the next groups of their entries.

        Returns the groups that follow a gap.
        """
        behind_gaps = []
        previous: dict[int, Group] = {}
        for group in self.groups.values():
            before = previous.get(group.entry)
            previous[group.entry] = group
            if group.joined or (before is not None and not before.done and before.end_record is None):
                continue
            group.joined = True
            end = self.records[group.entry] if before is None else before.end_record
            if end is not None and group.first_record is not None and end != group.first_record:
                group.lost.append(Records(end, group.first_record))
                behind_gaps.append(group)
        return behind_gaps

    def start_again(self, cursors: Sequence[Position], records: Sequence[int | None]) -> StreamletProgress:
        """Return the streamlet's progress with other cursors; an entry whose cursor stays keeps what is known there."""
        fresh = StreamletProgress(self.stream_id, self.streamlet_id, cursors, records, lease=self.lease)
        for entry, cursor in enumerate(self.cursors):
            if cursor != cursors[entry]:
                continue
            fresh.records[entry], fresh.lost[entry] = self.records[entry], list(self.lost[entry])
            group = next((group for group in self.groups.values() if group.entry == entry), None)
            if group is not None and group.next == cursor:
                fresh.records[entry] = group.next_record
                fresh.lost[entry] += group.lost
        return fresh


def _is_part(key: tuple[int, int], group: Group) -> bool:
    return key[1] > 0 or group.end is not None


def lowest(cursors: Iterable[common_pb2.Cursor]) -> list[common_pb2.Cursor]:
    """Return the lowest cursor of each entry, over several consumer groups."""
    found: dict[EntryId, common_pb2.Cursor] = {}
    for cursor in cursors:
        entry = EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry)
        if entry not in found or position_of(cursor) < position_of(found[entry]):
            found[entry] = cursor
    return [cursor for _, cursor in sorted(found.items())]


def key_of(step: messages.GroupStep) -> GroupId:
    """Return the group of a step."""
    return GroupId(step.next.stream_id, step.next.streamlet_id, step.next.group_id, step.part)


def position_of(cursor: common_pb2.Cursor) -> Position:
    """Return the position in a cursor."""
    return Position(cursor.group_id, cursor.segment_id, cursor.position) if cursor.group_id else EARLIEST


def records_in(ranges: Iterable[messages.RecordRange]) -> list[Records]:
    """Return the records in a message."""
    return [Records(each.first_record, each.end_record) for each in ranges]


def ranges_of(records: Iterable[Records]) -> Iterator[messages.RecordRange]:
    """Return records in the form of a message."""
    return (messages.RecordRange(first_record=each.first, end_record=each.end) for each in records)


def known(message: Any, field_name: str) -> int | None:
    """Return an ordinal, or None if the message does not have it."""
    return getattr(message, field_name) if message.HasField(field_name) else None


def cursor_of(entry: EntryId, position: Position) -> common_pb2.Cursor:
    """Return a position of an entry as a message."""
    return common_pb2.Cursor(
        stream_id=entry.stream_id,
        streamlet_id=entry.streamlet_id,
        entry=entry.entry,
        group_id=position.group_id,
        segment_id=position.segment_id,
        position=position.offset,
    )
