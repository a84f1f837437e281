"""An application: which of its consumers reads which groups of segments, and how far they are. No I/O, no waiting.

Consumers of an application are its *members*. What one of them is given is a *group* of segments (thesis 6.2.3): of an
entry, whose groups follow each other, so several members may read an entry at once, each another part of it.

Invariants:

1. A group is held by at most one member. Each time it is given, it has a new lease number, and what earlier holders say
   about it is refused.
2. Positions of groups, and cursors of entries, never go back but by `Application.reset`.
3. No group is left out: members name the groups of a streamlet in intervals of ids that follow each other
   (`Streamlet.see`), and a group stays known until it is done.
4. Everything before an entry's cursor is done.
5. Records are not passed over silently. Groups that go as a whole before any member has found them leave a gap between
   the ordinals of their neighbours. It belongs to the group behind it (`Group.lost`), whose holder tells the user, and
   says so with a step; if that group is done before, to the entry's next one.

Who gets what (`Application._balance`): the oldest group of each entry that is not done, and more of them as long as
somebody has fewer than `AHEAD`. A free group goes to whoever holds least, and of those to whoever has consumed least
lately. So holdings differ by at most one, and as groups come to their ends, the extra ones go round. When a member
joins and nothing is free, those who hold most are asked to give back groups: nobody else is disturbed.

A member that is not heard of for its session time-out, or is in its user's code for longer than its progress time-out,
is no member any more: what it held is free. Nothing tells it but the answer to its next round.

What is stored is a `StreamletProgress` for each streamlet that the application has begun; `Application.take_changes`
has those that changed. Members are known by the groups that they hold, with their time-outs, and get a full one after a
restart.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kera.core.errors import InvalidArgument, Unavailable
from kera.core.ids import EARLIEST, EntryId, Position
from kera.v1 import application_pb2 as messages
from kera.v1 import common_pb2

AHEAD = 2
"""Groups for each member, where there are so many: while one is at its end, the next one is being fetched."""
MEMBERS_MAX = 1000
STREAMLET_GROUPS_MAX = 2048
"""Groups of a streamlet that are known and not left behind: a record of some 250 KB. A group that stays behind holds up
its streamlet when there are so many after it."""
WAITING_MAX = 128
"""Groups of a streamlet that nobody holds, of those that are known. Of a backlog the next ones are found when half of
them are given; so what is stored and looked at does not grow with it."""
MEMBER_ID_CHARS_MAX = 64
CLIENT_CHARS_MAX = 128
TIMEOUT_MS_MIN, TIMEOUT_MS_MAX = 100, 24 * 3600 * 1000
EXPIRE_INTERVAL_S = 0.05
"""With many members, not each word of one of them has all others looked at."""
LOOK_INTERVAL_S = 0.5
"""How often one of the members looks for new groups."""
LOOKS_MAX = 256
"""Streamlets that a member looks at, at once; the others have their turn."""
RECENT_HALF_LIFE_S = 60.0
"""What was consumed longer ago counts less."""
SESSION_DEFAULT_MS = 10_000
"""Of members whose time-outs nobody has written down."""
ENDED_MAX = 4096
"""Leases that ended well are remembered: of a repeated report, nobody is to think that it came too late."""


class StreamShape(NamedTuple):
    """What there is to read of a stream."""

    streamlets: int
    entries: int


class GroupId(NamedTuple):
    """Names a group."""

    stream_id: int
    streamlet_id: int
    group_id: int


class Records(NamedTuple):
    """Records of an entry by their ordinals: from the first one up to `end`.

    Of a gap, `end` is below `first` when ordinals went back, with the memory of a host: nobody knows how many went.
    """

    first: int
    end: int


class Timeouts(NamedTuple):
    """How long a member may be silent, and in its user's code, in milliseconds."""

    session_ms: int
    progress_ms: int
    """0: not known."""


UNKNOWN_TIMEOUTS = Timeouts(SESSION_DEFAULT_MS, 0)


@dataclass(slots=True)
class Group:
    """A group that is not left behind yet."""

    entry: int
    next: Position
    """Next byte to read; of one that is done, its end."""
    done: bool = False
    member_id: str = ""
    """Who holds it; empty: nobody."""
    ended: bool = False
    """Who holds it has nothing more to do with it but to commit."""
    lease: int = 0
    """Of the last one who held it."""
    first_record: int | None = None
    """Ordinal of the record with which it begins; None here and below: not known."""
    next_record: int | None = None
    """Ordinal of the record at `next`."""
    end_record: int | None = None
    """Ordinal of its end."""
    joined: bool = False
    """It is known what there was between the entry's group before it and this one."""
    lost: list[Records] = field(default_factory=list)
    """Gaps before `next` that nobody has told the user."""
    timeouts: Timeouts = UNKNOWN_TIMEOUTS
    """Of who holds it: a new coordinator knows its member by what it holds."""


@dataclass(slots=True)
class Member:
    """A consumer."""

    member_id: str
    heard_s: float
    joined_s: float
    client: str = ""
    timeouts: Timeouts = UNKNOWN_TIMEOUTS
    busy_since_s: float | None = None
    """When it went into its user's code; None: it waits for records."""
    groups_max: int = 0
    stream_ids: frozenset[int] = frozenset()
    """Empty: not known yet; it gets nothing."""
    bytes_consumed: int = 0
    held: dict[GroupId, Group] = field(default_factory=dict)
    give_back: set[GroupId] = field(default_factory=set)
    """Of those it holds."""
    ended: set[GroupId] = field(default_factory=set)
    """Likewise: it has nothing more to do with them but to commit."""
    version: int = 0
    """Changes with what it holds, is to give back or to tell."""
    told_version: int = -1
    """Of what it was told last."""
    _recent: float = 0.0
    _recent_s: float = 0.0

    @property
    def at_work(self) -> int:
        """How many groups it reads."""
        return len(self.held) - len(self.ended)

    def recent(self, now_s: float) -> float:
        """Bytes consumed lately."""
        return self._recent * math.exp2((self._recent_s - now_s) / RECENT_HALF_LIFE_S)

    def count(self, consumed_bytes: float, now_s: float) -> None:
        """It has consumed more."""
        self._recent, self._recent_s = self.recent(now_s) + consumed_bytes, now_s

    def is_gone(self, now_s: float) -> bool:
        """Dead or stuck."""
        if now_s - self.heard_s > self.timeouts.session_ms / 1000:
            return True
        return self.busy_since_s is not None and 0 < self.timeouts.progress_ms / 1000 < now_s - self.busy_since_s


class Streamlet:
    """How far an application is in a streamlet."""

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
        """Per entry: all before it is done."""
        self.records = list(records) or [None] * len(self.cursors)
        """Per entry: ordinal of what comes behind the last group that was left behind, or at the cursor."""
        self.lost: list[list[Records]] = [[] for _ in self.cursors]
        """Per entry: gaps that nobody has told the user; the next group gets them."""
        self.leases = [0] * len(self.cursors)
        """Per entry: with which the last group that was left behind was held."""
        self.listed = max(0, min((cursor.group_id for cursor in self.cursors), default=0) - 1)
        """Groups up to this id are done, or in `groups`."""
        self.groups: dict[int, Group] = {}
        """By id, in that order."""
        self.lease = lease
        """The last one that was given."""
        self._waiting: list[tuple[int, int]] | None = None

    @classmethod
    def from_message(cls, message: messages.StreamletProgress) -> Streamlet:
        """From its stored form."""
        cursors = map(position_of, message.cursors)
        records = [_known(each, "record") for each in message.records]
        self = cls(message.stream_id, message.streamlet_id, cursors, records, lease=message.lease)
        for entry, each in enumerate(message.records):
            self.lost[entry], self.leases[entry] = records_in(each.lost), each.lease
        self.listed = message.listed_group_id
        for item in message.groups:
            self.groups[item.next.group_id] = Group(
                item.next.entry,
                position_of(item.next),
                item.done,
                item.member_id,
                lease=item.lease,
                first_record=_known(item, "first_record"),
                next_record=_known(item, "next_record"),
                end_record=_known(item, "end_record"),
                joined=item.joined,
                lost=records_in(item.lost),
                timeouts=Timeouts(item.session_timeout_ms or SESSION_DEFAULT_MS, item.progress_timeout_ms),
            )
        return self

    def to_message(self, application_id: str) -> messages.StreamletProgress:
        """Its stored form."""
        message = messages.StreamletProgress(
            application_id=application_id,
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
        for group in self.groups.values():
            held = bool(group.member_id)
            message.groups.add(
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
            )
        return message

    def cursor(self, entry: int) -> common_pb2.Cursor:
        """An entry's cursor as a message."""
        return self._cursor(entry, self.cursors[entry])

    def _cursor(self, entry: int, position: Position) -> common_pb2.Cursor:
        return cursor_of(EntryId(self.stream_id, self.streamlet_id, entry), position)

    @property
    def waiting(self) -> list[tuple[int, int]]:
        """Groups that nobody holds, in the order in which they are to be given.

        Of each: how many groups of its entry come before it that are to be read, and its id.
        """
        if self._waiting is None:
            self._waiting = self._find_waiting()
        return self._waiting

    def _find_waiting(self) -> list[tuple[int, int]]:
        found = []
        depths: Counter[int] = Counter()
        for group_id, group in self.groups.items():
            if group.done or group.ended:
                continue
            if not group.member_id:
                found.append((depths[group.entry], group_id))
            depths[group.entry] += 1
        return sorted(found)

    def changed(self) -> None:
        """To be called when a group was given, done, or otherwise may wait or wait no longer."""
        self._waiting = None

    def has_done(self, step: messages.GroupStep) -> bool:
        """Whether what somebody says of a group that it held with this lease is known."""
        place = step.next
        group = self.groups.get(place.group_id)
        if group is None:  # left behind
            return step.finished and step.lease > 0 and step.lease in self.leases[place.entry : place.entry + 1]
        if group.lease != step.lease:
            return False
        return group.done if step.finished else step.released and position_of(place) <= group.next

    @property
    def room(self) -> int:
        """How many more groups are taken up."""
        return max(0, min(STREAMLET_GROUPS_MAX - len(self.groups), WAITING_MAX - len(self.waiting)))

    @property
    def wants_groups(self) -> bool:
        """Whether it is worth while to look for more."""
        return bool(self.room) and len(self.waiting) <= WAITING_MAX // 2

    def see(self, seen: messages.SeenGroups) -> bool:
        """Take up the groups of an interval of ids; True if that changes anything.

        An interval that does not join on to what is known is of no use: groups in between could be left out.
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
            group = newest[start.entry] = self.groups[last] = self._found(each, newest.get(start.entry))
            group.next_record, group.end_record = group.first_record, _known(each, "end_record")
        self.listed = max(self.listed, seen.through_group_id)
        return self.listed > before

    def _found(self, seen: messages.SeenGroup, previous: Group | None) -> Group:
        """A group that was found behind `previous`, the entry's last one that is known."""
        entry, start = seen.start.entry, position_of(seen.start)
        cursor, record = self.cursors[entry], self.records[entry]
        if start.group_id == cursor.group_id:
            return Group(entry, cursor, first_record=record, joined=True)
        if previous is None and record is None and cursor == EARLIEST:
            return Group(entry, start, first_record=seen.first_record, joined=True)
        begin = Position(start.group_id, 1, 0)
        if start <= begin or (record if previous is None else previous.end_record) is not None:
            return Group(entry, start, first_record=seen.first_record)
        return Group(entry, begin)  # its start is gone, and the reader is told of that

    def settle(self) -> tuple[list[int], list[Group]]:
        """Find gaps, leave behind what is done, and move cursors.

        The entries whose cursor has moved, and the groups that have something more to tell.
        """
        self.changed()
        telling = self._join()
        moved: set[int] = set()
        unfinished: set[int] = set()
        for group_id, group in list(self.groups.items()):
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
                del self.groups[group_id]
                self.records[group.entry], self.leases[group.entry] = group.end_record, group.lease
            else:
                unfinished.add(group.entry)
            if group.next > self.cursors[group.entry]:
                self.cursors[group.entry] = group.next
                moved.add(group.entry)
        return sorted(moved), telling

    def _join(self) -> list[Group]:
        """See what was between groups whose ends are known by now, and the next ones of their entries.

        The groups before which there is a gap.
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

    def start_again(self, cursors: Sequence[Position], records: Sequence[int | None]) -> Streamlet:
        """The same streamlet, to be read from other cursors on; entries whose cursor stays keep what is known there."""
        fresh = Streamlet(self.stream_id, self.streamlet_id, cursors, records, lease=self.lease)
        for entry, cursor in enumerate(self.cursors):
            if cursor != cursors[entry]:
                continue
            fresh.records[entry], fresh.lost[entry] = self.records[entry], list(self.lost[entry])
            group = next((group for group in self.groups.values() if group.entry == entry), None)
            if group is not None and group.next == cursor:
                fresh.records[entry] = group.next_record
                fresh.lost[entry] += group.lost
        return fresh


class Application:
    """The state of one application."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[str, Member] = {}
        self.streamlets: dict[tuple[int, int], Streamlet] = {}
        self._dirty: set[tuple[int, int]] = set()
        self._ended: OrderedDict[tuple[int, int, int], str] = OrderedDict()
        """(Stream, streamlet, lease) → the member that finished or released the group."""
        self._news: set[str] = set()
        """Members that hold something else than before, or have gone."""
        self._balanced = False
        """Nothing has changed since groups were given, on which that depends."""
        self.is_short = False
        """The next group of some entry is with nobody: the members hold as many as they want."""
        self._expired_s = float("-inf")
        self._looked_s = float("-inf")
        self._look_at = 0
        """Whose turn it is to be looked at."""

    # --- what is stored ----------------------------------------------------------------------------------------

    def restore(self, message: messages.StreamletProgress, now_s: float) -> None:
        """Take up what was stored. Holders of groups are members, and count as just heard of."""
        streamlet = Streamlet.from_message(message)
        self.streamlets[message.stream_id, message.streamlet_id] = streamlet
        for group_id, group in streamlet.groups.items():
            if group.member_id:
                member = self.members.setdefault(
                    group.member_id, Member(group.member_id, now_s, now_s, timeouts=group.timeouts)
                )
                member.held[GroupId(message.stream_id, message.streamlet_id, group_id)] = group

    def take_changes(self) -> dict[tuple[int, int], messages.StreamletProgress | None]:
        """What is to be stored, by stream and streamlet; None: nothing any more. It counts as stored from now on."""
        dirty, self._dirty = self._dirty, set()
        return {
            key: self.streamlets[key].to_message(self.name) if key in self.streamlets else None for key in sorted(dirty)
        }

    @property
    def dirty(self) -> AbstractSet[tuple[int, int]]:
        """Streamlets of which something is to be stored."""
        return self._dirty

    def take_news(self) -> set[str]:
        """Members that have to be told something, since this was called last."""
        news, self._news = self._news, set()
        return news

    def _note(self, member: Member) -> None:
        """What a member holds, or is to give back or tell, is no longer the same."""
        member.version += 1
        self._news.add(member.member_id)

    # --- members -----------------------------------------------------------------------------------------------

    def consume_round(
        self, request: messages.ConsumeRoundRequest, shapes: Mapping[int, StreamShape], now_s: float
    ) -> messages.ConsumeRoundResponse:
        """What a member says, carried out; `answer` adds what it holds. `shapes`: of its streams.

        Raises `InvalidArgument`, `Unavailable` when there are too many members.
        """
        _check(request)
        self.expire(now_s)
        response = messages.ConsumeRoundResponse()
        member = self._speaking(request, now_s)
        changed, refused = self._carry_out(request.member_id, request.steps)
        response.refused.extend(refused)
        if member is not None:
            changed |= self._begin(request.starts, shapes) | self._see(request.seen)
        response.moved.extend(self._settle(changed))
        self._balance(now_s)
        if member is not None:
            finished = {key_of(step)[:2] for step in request.steps if step.finished}
            self._look(response, member, shapes, finished, now_s)
        return response

    def answer(
        self, response: messages.ConsumeRoundResponse, member_id: str, shapes: Mapping[int, StreamShape], now_s: float
    ) -> None:
        """Say what the member holds now, and what to look at if it is time."""
        del response.held[:]
        member = self.members.get(member_id)
        if member is None:
            return
        self._look(response, member, shapes, set(), now_s)
        response.held.extend(leases_of(member))

    def keep_alive(self, member_id: str, busy_ms: int, now_s: float) -> bool:
        """A member lives; False if it is none."""
        self.expire(now_s)
        member = self.members.get(member_id)
        if member is None:
            return False
        member.heard_s = now_s
        member.busy_since_s = now_s - busy_ms / 1000 if busy_ms else None
        gone = member.is_gone(now_s)
        if gone:
            self._remove(member_id, now_s)
        return not gone

    def leave(self, member_id: str, steps: Iterable[messages.GroupStep], now_s: float) -> messages.LeaveResponse:
        """A member ends, after its last steps."""
        changed, refused = self._carry_out(member_id, steps)
        moved = self._settle(changed)
        self._remove(member_id, now_s)
        return messages.LeaveResponse(refused=refused, moved=moved)

    def expire(self, now_s: float) -> list[str]:
        """Remove the members that are gone; who they are. Looks for them every `EXPIRE_INTERVAL_S` at most."""
        if 0 <= now_s - self._expired_s < EXPIRE_INTERVAL_S:
            return []
        self._expired_s = now_s
        gone = [member.member_id for member in self.members.values() if member.is_gone(now_s)]
        for member_id in gone:
            self._remove(member_id, now_s, balance=False)
        if gone:
            self._balance(now_s)
        return gone

    def excuse(self, pause_s: float) -> None:
        """Nobody could be heard for so long: that is nobody's silence."""
        for member in self.members.values():
            member.heard_s += pause_s
            if member.busy_since_s is not None:
                member.busy_since_s += pause_s

    @property
    def next_look_s(self) -> float:
        """When a member is to look for new groups."""
        return self._looked_s + LOOK_INTERVAL_S

    # --- from outside ------------------------------------------------------------------------------------------

    def reset(
        self,
        starts: Iterable[messages.StreamletStart],
        shapes: Mapping[int, StreamShape],
        now_s: float,
        *,
        force: bool,
        forward_only: bool,
    ) -> None:
        """Put cursors elsewhere. Raises `InvalidArgument`, also when members are at work, unless it is forced."""
        self.expire(now_s)
        starts = list(starts)
        places = [_checked_start(start, shapes) for start in starts]
        touched = {start.stream_id for start in starts}
        active = [m.member_id for m in self.members.values() if not m.stream_ids or m.stream_ids & touched]
        if active and not force:
            raise InvalidArgument(
                f"application {self.name!r} has {len(active)} active consumer{'s' if len(active) > 1 else ''};"
                " stop them, or force it: they lose what they hold",
                application=self.name,
                members=len(active),
            )
        for key, cursors, records in places:
            old = self.streamlets.get(key)
            fresh = Streamlet(*key, cursors, records, lease=old.lease if old is not None else 0)
            if old is not None and forward_only:
                ahead = [max(pair) for pair in zip(old.cursors, cursors, strict=True)]
                if ahead == old.cursors:
                    continue
                fresh = old.start_again(ahead, records)
            self._free_streamlet(key)
            self.streamlets[key] = fresh
            self._dirty.add(key)
        self._looked_s = float("-inf")

    def forget(self, gone: Iterable[int]) -> None:
        """Streams have been deleted."""
        gone = set(gone)
        for key in [key for key in self.streamlets if key[0] in gone]:
            self._free_streamlet(key)
            del self.streamlets[key]
            self._dirty.add(key)

    def cursors(self, stream_id: int) -> Iterator[common_pb2.Cursor]:
        """The cursors of the entries of a stream."""
        for (stream, _), streamlet in sorted(self.streamlets.items()):
            if stream == stream_id:
                yield from map(streamlet.cursor, range(len(streamlet.cursors)))

    # --- steps -------------------------------------------------------------------------------------------------

    def _speaking(self, request: messages.ConsumeRoundRequest, now_s: float) -> Member | None:
        """The member that speaks; None if it is stuck: it is no member then, until it goes on."""
        member = self.members.get(request.member_id)
        if request.busy_ms > request.progress_timeout_ms:
            self._remove(request.member_id, now_s)
            return None
        if member is None:
            if len(self.members) >= MEMBERS_MAX:
                raise Unavailable(
                    f"application {self.name!r} has {MEMBERS_MAX} consumers, which is the limit", limit=MEMBERS_MAX
                )
            others = [other.recent(now_s) for other in self.members.values()]
            member = self.members[request.member_id] = Member(
                request.member_id, now_s, now_s, bytes_consumed=request.bytes_consumed
            )
            member.count(sum(others) / len(others) if others else 0.0, now_s)
        member.heard_s = now_s
        member.client = request.client[:CLIENT_CHARS_MAX]
        member.timeouts = Timeouts(request.session_timeout_ms, request.progress_timeout_ms)
        member.busy_since_s = now_s - request.busy_ms / 1000 if request.busy_ms else None
        stream_ids = frozenset(request.stream_ids)
        if (member.groups_max, member.stream_ids) != (request.groups_max, stream_ids):
            member.groups_max, member.stream_ids = request.groups_max, stream_ids
            self._balanced = False
        ended = {key for step in request.ended if (key := key_of(step)) in member.held}
        for key in ended ^ member.ended:
            member.held[key].ended = key in ended
            self.streamlets[key[:2]].changed()
            self._balanced = False
        member.ended = ended
        member.count(max(0, request.bytes_consumed - member.bytes_consumed), now_s)
        member.bytes_consumed = request.bytes_consumed
        return member

    def _remove(self, member_id: str, now_s: float, *, balance: bool = True) -> None:
        member = self.members.pop(member_id, None)
        if member is None:
            return
        self._balanced = False
        self._news.add(member_id)
        for key in list(member.held):
            self._free(member, key)
        if balance:
            self._balance(now_s)

    def _free(self, member: Member, key: GroupId) -> None:
        group = member.held.pop(key)
        group.member_id, group.ended = "", False
        self.streamlets[key[:2]].changed()
        member.give_back.discard(key)
        member.ended.discard(key)
        self._note(member)
        self._balanced = False
        self._dirty.add(key[:2])

    def _free_streamlet(self, key: tuple[int, int]) -> None:
        for member in self.members.values():
            for held in [held for held in member.held if held[:2] == key]:
                self._free(member, held)

    def _carry_out(
        self, member_id: str, steps: Iterable[messages.GroupStep]
    ) -> tuple[set[tuple[int, int]], list[messages.GroupStep]]:
        """Carry out steps; the streamlets that they change, and the steps that came too late."""
        changed = set()
        refused = []
        member = self.members.get(member_id)
        for step in steps:
            key = key_of(step)
            group = member.held.get(key) if member is not None else None
            if member is None or group is None or group.lease != step.lease:
                if not self._is_repeated(member_id, step, key):
                    refused.append(step)
                continue
            if step.next.entry != group.entry:
                raise InvalidArgument(f"group {key.group_id} belongs to entry {group.entry}, not {step.next.entry}")
            position = position_of(step.next)
            if position > group.next:
                self._dirty.add(key[:2])  # also if a later step makes no sense
                group.next, group.next_record = position, _known(step, "next_record")
                changed.add(key[:2])
            for told in records_in(step.told):
                if told in group.lost:
                    group.lost.remove(told)
                    self._dirty.add(key[:2])
                    changed.add(key[:2])
            if step.finished or step.released:
                group.done = step.finished
                if step.finished and group.end_record is None:
                    group.end_record = _known(step, "next_record")
                self._ended[(*key[:2], step.lease)] = member_id
                if len(self._ended) > ENDED_MAX:
                    self._ended.popitem(last=False)
                self._free(member, key)
                changed.add(key[:2])
        return changed, refused

    def _is_repeated(self, member_id: str, step: messages.GroupStep, key: GroupId) -> bool:
        """Whether a step was carried out before, and its answer was lost."""
        if self._ended.get((*key[:2], step.lease)) == member_id:
            return True
        streamlet = self.streamlets.get(key[:2])
        return streamlet is not None and streamlet.has_done(step)

    def _begin(
        self, starts: Iterable[messages.StreamletStart], shapes: Mapping[int, StreamShape]
    ) -> set[tuple[int, int]]:
        begun = set()
        for start in starts:
            key, cursors, records = _checked_start(start, shapes)
            if key not in self.streamlets:
                self.streamlets[key] = Streamlet(*key, cursors, records)
                begun.add(key)
        return begun

    def _see(self, seen: Iterable[messages.SeenGroups]) -> set[tuple[int, int]]:
        changed = set()
        for each in seen:
            key = (each.stream_id, each.streamlet_id)
            if key in self.streamlets and self.streamlets[key].see(each):
                changed.add(key)
                self._balanced = False
        return changed

    def _settle(self, changed: Iterable[tuple[int, int]]) -> list[common_pb2.Cursor]:
        moved = []
        for key in sorted(changed):
            self._dirty.add(key)
            streamlet = self.streamlets[key]
            entries, telling = streamlet.settle()
            moved += [streamlet.cursor(entry) for entry in entries]
            for group in telling:
                if group.member_id:
                    self._note(self.members[group.member_id])
        return moved

    def _look(
        self,
        response: messages.ConsumeRoundResponse,
        member: Member,
        shapes: Mapping[int, StreamShape],
        finished: set[tuple[int, int]],
        now_s: float,
    ) -> None:
        """Have the member look for new groups: where it has finished one, and everywhere if it is time."""
        keys = sorted(finished)
        if now_s >= self.next_look_s:
            everywhere = [
                (stream_id, streamlet_id)
                for stream_id in sorted(member.stream_ids)
                for streamlet_id in range(shapes[stream_id].streamlets)
            ]
            self._looked_s = now_s
            first = self._look_at % max(1, len(everywhere))
            turn = (everywhere[first:] + everywhere[:first])[:LOOKS_MAX]
            self._look_at = first + len(turn)
            keys += [key for key in turn if key not in finished]
        for key in keys:
            streamlet = self.streamlets.get(key)
            if streamlet is None:
                response.look.add(stream_id=key[0], streamlet_id=key[1], start=True)
            elif streamlet.wants_groups:
                response.look.add(stream_id=key[0], streamlet_id=key[1], after_group_id=streamlet.listed)

    # --- who gets what -----------------------------------------------------------------------------------------

    def _balance(self, now_s: float) -> None:
        """Give free groups to members, and decide who is to give back some. See the head of this file."""
        if self._balanced:
            return
        self._balanced = True
        recent = {member_id: member.recent(now_s) for member_id, member in self.members.items()}

        def rank(member: Member) -> tuple[int, float, str]:
            return member.at_work, recent[member.member_id], member.member_id

        self.is_short = False
        wanted = {stream_id for stream_id, _ in self.streamlets}
        """Streams of which somebody may take more. The deeper groups wait, the fewer take them."""
        for depth, key in heapq.merge(*(_keys_of_waiting(key, each) for key, each in self.streamlets.items())):
            if not wanted:
                break
            if key.stream_id not in wanted:
                continue
            able = [
                member
                for member in self.members.values()
                if key.stream_id in member.stream_ids and len(member.held) < member.groups_max
            ]
            member = min(able, key=rank, default=None)
            if member is None and not depth:
                self.is_short |= any(key.stream_id in other.stream_ids for other in self.members.values())
            if member is None or (depth and member.at_work >= AHEAD):
                wanted.discard(key.stream_id)
                continue
            self._give(key, member)
        self._ask_back(recent)

    def _give(self, key: GroupId, member: Member) -> None:
        streamlet = self.streamlets[key[:2]]
        streamlet.changed()
        group = streamlet.groups[key.group_id]
        streamlet.lease += 1
        group.lease = streamlet.lease
        group.member_id, group.timeouts = member.member_id, member.timeouts
        member.held[key] = group
        self._note(member)
        self._dirty.add(key[:2])

    def _ask_back(self, recent: Mapping[str, float]) -> None:
        """Decide anew who is to give back what, as much as possible the same as before."""
        asked: dict[str, set[GroupId]] = {member_id: set() for member_id in self.members}
        for high, key in self._evened_out(recent):
            asked[high].add(key)
        for member_id, member in self.members.items():
            if member.give_back != asked[member_id]:
                member.give_back = asked[member_id]
                self._note(member)

    def _evened_out(self, recent: Mapping[str, float]) -> Iterator[tuple[str, GroupId]]:
        """Who gives back which group, in turn: the first of those with most to the first of those with least.

        That goes on until nobody has two groups more than somebody who could take one of them. It is done for each
        member that joins, also when many do at once: so both are kept in heaps, into which a member is put anew
        whenever its count changes. What was said of it before is passed over.
        """
        count = {member_id: member.at_work for member_id, member in self.members.items()}
        able = {m.member_id: m.groups_max for m in self.members.values() if m.stream_ids}
        takers = [(count[name], recent[name], name) for name, limit in able.items() if count[name] < limit]
        if not takers or max(count.values()) - min(takers)[0] < 2:
            return
        givers = [(-count[name], -recent[name], name) for name in self.members]
        heapq.heapify(takers)
        heapq.heapify(givers)
        offers: dict[str, list[tuple[bool, GroupId]]] = {}
        while takers:
            has, _, low = heapq.heappop(takers)
            if has != count[low]:
                continue
            found = self._offer(self.members[low], givers, count, offers)
            if found is None:
                continue  # nor will there be anything later: others have ever less to give
            yield found
            high = found[0]
            count[high] -= 1
            count[low] += 1
            for name in (high, low):
                heapq.heappush(givers, (-count[name], -recent[name], name))
                if count[name] < able.get(name, 0):
                    heapq.heappush(takers, (count[name], recent[name], name))

    def _offer(
        self,
        low: Member,
        givers: list[tuple[int, float, str]],
        count: Mapping[str, int],
        offers: dict[str, list[tuple[bool, GroupId]]],
    ) -> tuple[str, GroupId] | None:
        """The first of the givers that has a group for a member, and two more than it; and which group."""
        passed = []
        found: tuple[str, GroupId] | None = None
        while givers and found is None and -givers[0][0] - count[low.member_id] >= 2:
            giver = heapq.heappop(givers)
            high = giver[2]
            if -giver[0] != count[high]:
                continue
            offer = offers.get(high)
            if offer is None:
                member = self.members[high]
                offer = sorted((key in member.give_back, key) for key in member.held.keys() - member.ended)
                offers[high] = offer
            at = next((at for at in reversed(range(len(offer))) if offer[at][1].stream_id in low.stream_ids), None)
            if at is None:
                passed.append(giver)
            else:
                found = high, offer.pop(at)[1]
        for giver in passed:
            heapq.heappush(givers, giver)
        return found


def _keys_of_waiting(key: tuple[int, int], streamlet: Streamlet) -> Iterator[tuple[int, GroupId]]:
    """As `Streamlet.waiting`, with what names them everywhere."""
    return ((depth, GroupId(*key, group_id)) for depth, group_id in streamlet.waiting)


def leases_of(member: Member) -> Iterator[messages.GroupLease]:
    """What a member holds, as it is told."""
    for key, group in sorted(member.held.items()):
        entry = EntryId(key.stream_id, key.streamlet_id, group.entry)
        yield messages.GroupLease(
            next=cursor_of(entry, group.next),
            lease=group.lease,
            give_back=key in member.give_back,
            next_record=group.next_record,
            end_record=group.end_record,
            lost=ranges_of(group.lost),
        )


def lowest(cursors: Iterable[common_pb2.Cursor]) -> list[common_pb2.Cursor]:
    """Of several applications' cursors, the lowest of each entry."""
    found: dict[EntryId, common_pb2.Cursor] = {}
    for cursor in cursors:
        entry = EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry)
        if entry not in found or position_of(cursor) < position_of(found[entry]):
            found[entry] = cursor
    return [cursor for _, cursor in sorted(found.items())]


def key_of(step: messages.GroupStep) -> GroupId:
    """The group of a step."""
    return GroupId(step.next.stream_id, step.next.streamlet_id, step.next.group_id)


def position_of(cursor: common_pb2.Cursor) -> Position:
    """The position in a cursor."""
    return Position(cursor.group_id, cursor.segment_id, cursor.position) if cursor.group_id else EARLIEST


def records_in(ranges: Iterable[messages.RecordRange]) -> list[Records]:
    """Records in a message."""
    return [Records(each.first_record, each.end_record) for each in ranges]


def ranges_of(records: Iterable[Records]) -> Iterator[messages.RecordRange]:
    """Records as a message has them."""
    return (messages.RecordRange(first_record=each.first, end_record=each.end) for each in records)


def _known(message: Any, field_name: str) -> int | None:
    """An ordinal that may not be there."""
    return getattr(message, field_name) if message.HasField(field_name) else None


def cursor_of(entry: EntryId, position: Position) -> common_pb2.Cursor:
    """A position of an entry as a message."""
    return common_pb2.Cursor(
        stream_id=entry.stream_id,
        streamlet_id=entry.streamlet_id,
        entry=entry.entry,
        group_id=position.group_id,
        segment_id=position.segment_id,
        position=position.offset,
    )


def _check(request: messages.ConsumeRoundRequest) -> None:
    if not 0 < len(request.member_id) <= MEMBER_ID_CHARS_MAX:
        raise InvalidArgument(f"a consumer has an id of 1 to {MEMBER_ID_CHARS_MAX} characters")
    for name in ("session_timeout_ms", "progress_timeout_ms"):
        value = getattr(request, name)
        if not TIMEOUT_MS_MIN <= value <= TIMEOUT_MS_MAX:
            raise InvalidArgument(
                f"{name} must be between {TIMEOUT_MS_MIN} and {TIMEOUT_MS_MAX}, not {value}", field=name, value=value
            )
    if not request.groups_max or not request.stream_ids:
        raise InvalidArgument("a consumer reads at least one stream, and holds at least one group")


def _checked_start(
    start: messages.StreamletStart, shapes: Mapping[int, StreamShape]
) -> tuple[tuple[int, int], list[Position], list[int | None]]:
    """Where it is, the cursors, and the ordinals of the records there."""
    shape = shapes.get(start.stream_id)
    if shape is None:
        raise InvalidArgument(f"stream {start.stream_id} is not one of the consumer's", stream_id=start.stream_id)
    if (
        start.streamlet_id >= shape.streamlets
        or len(start.cursors) != shape.entries
        or len(start.records) not in (0, shape.entries)
    ):
        raise InvalidArgument(
            f"stream {start.stream_id} has {shape.streamlets} streamlets with {shape.entries} entries each",
            stream_id=start.stream_id,
        )
    records = [_known(each, "record") for each in start.records] or [None] * shape.entries
    return (start.stream_id, start.streamlet_id), [position_of(cursor) for cursor in start.cursors], records
