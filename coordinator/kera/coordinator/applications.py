"""An application: which of its consumers reads which groups of segments, and how far they are. No I/O, no waiting.

Consumers of an application are its *members*. What one of them is given is a *group* of segments (thesis 6.2.3): of an
entry, whose groups follow each other, so several members may read an entry at once, each another part of it.

A group is held by at most one member. Each time it is given, it has a new lease number, and what earlier holders say
about it is refused. What is promised of groups, cursors and gaps is in ``application_progress``; cursors go back only
by `Application.reset`.

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
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from kera.coordinator.application_members import Member, evened_out, leases_of
from kera.coordinator.application_progress import (
    GroupId,
    Streamlet,
    Timeouts,
    key_of,
    known,
    position_of,
    records_in,
)
from kera.core.errors import InvalidArgument, Unavailable
from kera.core.ids import Position
from kera.v1 import application_pb2 as messages
from kera.v1 import common_pb2

AHEAD = 2
"""Groups for each member, where there are so many: while one is at its end, the next one is being fetched."""
MEMBERS_MAX = 1000
MEMBER_ID_CHARS_MAX = 64
CLIENT_CHARS_MAX = 128
TIMEOUT_MS_MIN, TIMEOUT_MS_MAX = 100, 24 * 3600 * 1000
ITEMS_MAX = 8192
"""In each list of a request: steps, starts, groups that were seen. No consumer has more to say at once."""
EXPIRE_INTERVAL_S = 0.05
"""With many members, not each word of one of them has all others looked at."""
LOOK_INTERVAL_S = 0.5
"""How often one of the members looks for new groups."""
LOOKS_MAX = 256
"""Streamlets that a member looks at, at once; the others have their turn."""
ENDED_MAX = 4096
"""Leases that ended well are remembered while there are members: of a repeated report, nobody is to think that it came
too late."""


class StreamShape(NamedTuple):
    """What there is to read of a stream."""

    streamlets: int
    entries: int


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
        if not self.members:
            self._ended.clear()
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
                group.next, group.next_record = position, known(step, "next_record")
                changed.add(key[:2])
            for told in records_in(step.told):
                if told in group.lost:
                    group.lost.remove(told)
                    self._dirty.add(key[:2])
                    changed.add(key[:2])
            if step.finished or step.released:
                group.done = step.finished
                if step.finished and group.end_record is None:
                    group.end_record = known(step, "next_record")
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
        for high, key in evened_out(self.members, recent):
            asked[high].add(key)
        for member_id, member in self.members.items():
            if member.give_back != asked[member_id]:
                member.give_back = asked[member_id]
                self._note(member)


def _keys_of_waiting(key: tuple[int, int], streamlet: Streamlet) -> Iterator[tuple[int, GroupId]]:
    """As `Streamlet.waiting`, with what names them everywhere."""
    return ((depth, GroupId(*key, group_id)) for depth, group_id in streamlet.waiting)


def _check(request: messages.ConsumeRoundRequest) -> None:
    if not 0 < len(request.member_id) <= MEMBER_ID_CHARS_MAX:
        raise InvalidArgument(f"a consumer has an id of 1 to {MEMBER_ID_CHARS_MAX} characters")
    for name in ("session_timeout_ms", "progress_timeout_ms"):
        value = getattr(request, name)
        if not TIMEOUT_MS_MIN <= value <= TIMEOUT_MS_MAX:
            raise InvalidArgument(
                f"{name} must be between {TIMEOUT_MS_MIN} and {TIMEOUT_MS_MAX}, not {value}", field=name, value=value
            )
    for name in ("stream_ids", "steps", "starts", "seen", "ended"):
        check_items(getattr(request, name), name)
    if not request.groups_max or not request.stream_ids:
        raise InvalidArgument("a consumer reads at least one stream, and holds at least one group")


def check_items(items: Sequence[object], name: str) -> None:
    """Raise `InvalidArgument` if there are more than anybody has to say at once."""
    if len(items) > ITEMS_MAX:
        raise InvalidArgument(f"at most {ITEMS_MAX} {name} in a request, not {len(items)}", field=name, limit=ITEMS_MAX)


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
    records = [known(each, "record") for each in start.records] or [None] * shape.entries
    return (start.stream_id, start.streamlet_id), [position_of(cursor) for cursor in start.cursors], records
