"""A consumer group: which of its consumers reads which groups of segments, and how far they are. No I/O, no waiting.

Consumers of a consumer group are its *members*. What one of them is given is a *group* of segments (thesis 6.2.3): of
an entry, whose groups follow each other, so several members may read an entry at once, each another part of it.

A group is held by at most one member. Each time it is given, it has a new lease number, and what earlier holders say
about it is refused. What is promised of groups, cursors and gaps is in ``consumer_group_progress``; cursors go back
only by `ConsumerGroup.reset`.

Who gets what (`ConsumerGroup._balance`): the oldest group of each entry that is not done, and more of them as long as
somebody has fewer than `AHEAD`. A free group goes to whoever holds least, and of those to whoever has consumed least
lately. So holdings differ by at most one, and as groups come to their ends, the extra ones go round. When a member
joins and nothing is free, those who hold most are asked to give back groups: nobody else is disturbed.

A member that is not heard of for its session time-out, or is in its user's code for longer than its progress time-out,
is no member any more: what it held is free. Nothing tells it but the answer to its next round.

What is stored is a `StreamletProgress` for each streamlet that the consumer group has begun;
`ConsumerGroup.take_changes` has those that changed. Members are known by the groups that they hold, with their
time-outs, and get a full one after a restart.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from kera.coordinator.consumer_groups.members import Member, evened_out, leases_of
from kera.coordinator.consumer_groups.progress import (
    GroupId,
    StreamletProgress,
    Timeouts,
    key_of,
    known,
    position_of,
    records_in,
)
from kera.core.errors import InvalidArgument, Unavailable
from kera.core.ids import Position
from kera.core.turns import at_once
from kera.v1 import common_pb2
from kera.v1 import consumer_group_pb2 as messages

AHEAD = 2
"""Groups for each member, where there are so many: while one is at its end, the next one is being fetched."""
MEMBERS_MAX = 1000
MEMBER_ID_CHARS_MAX = 64
CLIENT_CHARS_MAX = 128
TIMEOUT_MS_MIN, TIMEOUT_MS_MAX = 100, 24 * 3600 * 1000
ITEMS_MAX = 8192
"""In each list of a request: steps, starts, groups that were seen. No consumer has more to say at once."""
RESET_STREAMLETS_MAX = 1024
"""Of one request: each is a record to be stored, and they are stored at once."""
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


class ConsumerGroup:
    """The state of one consumer group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[str, Member] = {}
        self.streamlets: dict[tuple[int, int], StreamletProgress] = {}
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
        streamlet = StreamletProgress.from_message(message)
        self.streamlets[message.stream_id, message.streamlet_id] = streamlet
        for group_id, group in streamlet.groups.items():
            if group.member_id:
                member = self.members.setdefault(
                    group.member_id, Member(group.member_id, now_s, now_s, timeouts=group.timeouts)
                )
                member.held[GroupId(message.stream_id, message.streamlet_id, group_id)] = group

    def take_dirty(self) -> list[tuple[int, int]]:
        """The streamlets of which something is to be stored, see `stored`. It counts as stored from now on."""
        dirty, self._dirty = self._dirty, set()
        return sorted(dirty)

    def stored(self, key: tuple[int, int]) -> messages.StreamletProgress | None:
        """What is to be stored of a streamlet; None: nothing any more."""
        return self.streamlets[key].to_message(self.name) if key in self.streamlets else None

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
        return at_once(self.consuming(request, shapes, now_s))

    def consuming(
        self, request: messages.ConsumeRoundRequest, shapes: Mapping[int, StreamShape], now_s: float
    ) -> Generator[None, None, messages.ConsumeRoundResponse]:
        """`consume_round`, in steps: yields between streamlets, each of which is in good order then.

        What others say meanwhile is carried out in between.
        """
        _check(request)
        self.expire(now_s)
        response = messages.ConsumeRoundResponse()
        member = self._speaking(request, now_s)
        moved: dict[tuple[int, int, int], common_pb2.Cursor] = {}
        steps: defaultdict[tuple[int, int], list[messages.GroupStep]] = defaultdict(list)
        for step in request.steps:
            steps[key_of(step)[:2]].append(step)
            yield
        for of_streamlet in steps.values():
            changed, refused = self._carry_out(request.member_id, of_streamlet)
            response.refused.extend(refused)
            self._settle(changed, moved)
            yield
        if member is not None:
            for start in request.starts:
                self._settle(self._begin([start], shapes), moved)
                yield
            for seen in request.seen:
                self._settle(self._see([seen]), moved)
                yield
        response.moved.extend(cursor for _, cursor in sorted(moved.items()))
        yield from self._balancing(now_s)
        if member is not None:
            finished = {key for key, of_streamlet in steps.items() if any(step.finished for step in of_streamlet)}
            self._look(response, member, shapes, finished, now_s)
        return response

    def look(
        self, response: messages.ConsumeRoundResponse, member_id: str, shapes: Mapping[int, StreamShape], now_s: float
    ) -> None:
        """Say what the member is to look at, if it is time."""
        member = self.members.get(member_id)
        if member is not None:
            self._look(response, member, shapes, set(), now_s)

    def answering(
        self, response: messages.ConsumeRoundResponse, member_id: str, shapes: Mapping[int, StreamShape], now_s: float
    ) -> Generator[None, None, None]:
        """Say what the member holds now, and what to look at if it is time. Yields; what it is told is of the start.

        If that changes meanwhile, it is told with its next round, which finds something to say.
        """
        del response.held[:]
        self.look(response, member_id, shapes, now_s)
        member = self.members.get(member_id)
        if member is not None:
            member.told_version = member.version
            for lease in leases_of(member):
                response.held.append(lease)
                yield

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
        moved: dict[tuple[int, int, int], common_pb2.Cursor] = {}
        self._settle(changed, moved)
        self._remove(member_id, now_s)
        return messages.LeaveResponse(refused=refused, moved=[cursor for _, cursor in sorted(moved.items())])

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

    def extend_timeouts(self, pause_s: float) -> None:
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
        at_once(self.resetting(starts, shapes, now_s, force=force, forward_only=forward_only))

    def resetting(
        self,
        starts: Iterable[messages.StreamletStart],
        shapes: Mapping[int, StreamShape],
        now_s: float,
        *,
        force: bool,
        forward_only: bool,
    ) -> Generator[None, None, None]:
        """`reset`, in steps: yields before anything has changed, and not from then on.

        But for `forward_only`: then each cursor counts for itself, and it yields between streamlets.
        """
        fresh: dict[tuple[int, int], StreamletProgress] = {}
        for start in starts:
            key, cursors, records = _checked_start(start, shapes)
            fresh[key] = StreamletProgress(*key, cursors, records)
            yield
        self.expire(now_s)
        self._check_idle({stream_id for stream_id, _ in fresh}, force=force)
        if forward_only:
            for key, streamlet in fresh.items():
                self._go_ahead(key, streamlet)
                yield
        else:
            for key, streamlet in fresh.items():
                self._free_streamlet(key)
                old = self.streamlets.get(key)
                streamlet.lease = old.lease if old is not None else 0
            self.streamlets.update(fresh)
            self._dirty.update(fresh)
        self._looked_s = float("-inf")

    def _check_idle(self, touched: AbstractSet[int], *, force: bool) -> None:
        active = [m.member_id for m in self.members.values() if not m.stream_ids or m.stream_ids & touched]
        if active and not force:
            raise InvalidArgument(
                f"consumer group {self.name!r} has {len(active)} active consumer{'s' if len(active) > 1 else ''};"
                " stop them, or force it: they lose what they hold",
                consumer_group=self.name,
                members=len(active),
            )

    def _go_ahead(self, key: tuple[int, int], fresh: StreamletProgress) -> None:
        """Put cursors of a streamlet forward."""
        old = self.streamlets.get(key)
        if old is not None:
            ahead = [max(pair) for pair in zip(old.cursors, fresh.cursors, strict=True)]
            if ahead == old.cursors:
                return
            fresh = old.start_again(ahead, fresh.records)
        self._free_streamlet(key)
        self.streamlets[key] = fresh
        self._dirty.add(key)

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
                    f"consumer group {self.name!r} has {MEMBERS_MAX} consumers, which is the limit", limit=MEMBERS_MAX
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
        streamlet = self.streamlets.get(key)
        for group_id, group in list(streamlet.groups.items()) if streamlet is not None else ():
            if group.member_id:
                self._free(self.members[group.member_id], GroupId(*key, group_id))

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
                self.streamlets[key] = StreamletProgress(*key, cursors, records)
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

    def _settle(self, changed: Iterable[tuple[int, int]], moved: dict[tuple[int, int, int], common_pb2.Cursor]) -> None:
        """Have streamlets in good order; cursors that have moved by that come to `moved`."""
        for key in sorted(changed):
            self._dirty.add(key)
            streamlet = self.streamlets[key]
            entries, telling = streamlet.settle()
            moved.update({(*key, entry): streamlet.cursor(entry) for entry in entries})
            for group in telling:
                if group.member_id:
                    self._note(self.members[group.member_id])

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
            self._looked_s = now_s
            total = sum(shapes[stream_id].streamlets for stream_id in member.stream_ids)
            first = self._look_at % max(1, total)
            turn = _some(member.stream_ids, shapes, first, min(LOOKS_MAX, total))
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
        at_once(self._balancing(now_s))

    def _balancing(self, now_s: float) -> Generator[None, None, None]:
        """`_balance`, in steps: yields before each group. What has changed meanwhile is for who comes next."""
        if self._balanced:
            return
        self._balanced = True
        try:
            yield from self._giving(now_s)
        except BaseException:  # nobody waits for it any more: others begin anew
            self._balanced = False
            raise

    def _giving(self, now_s: float) -> Generator[None, None, None]:
        recent = {member_id: member.recent(now_s) for member_id, member in self.members.items()}
        takers: dict[int, list[tuple[int, float, str]]] = {}
        """By stream, those who may take more of it, as a heap: how much they have, and had lately."""
        waiting = []
        for key2, each in list(self.streamlets.items()):
            if each.waiting:
                waiting.append(_keys_of_waiting(key2, each))
            yield
        self.is_short = False
        wanted = {stream_id for stream_id, _ in self.streamlets}
        """Streams of which somebody may take more. The deeper groups wait, the fewer take them."""
        for depth, key in heapq.merge(*waiting):
            if not wanted:
                break
            if key.stream_id not in wanted:
                continue
            yield
            streamlet = self.streamlets.get(key[:2])
            group = streamlet.groups.get(key.group_id) if streamlet is not None else None
            if group is None or group.member_id or group.done:
                continue  # since it was looked for
            if key.stream_id not in takers:
                takers[key.stream_id] = self._takers(key.stream_id, recent)
            taker = self._taker(takers[key.stream_id])
            if taker is None and not depth:
                self.is_short |= any(key.stream_id in other.stream_ids for other in self.members.values())
            if taker is None or (depth and taker.at_work >= AHEAD):
                wanted.discard(key.stream_id)
                continue
            self._give(key, taker)
        self._ask_back({member_id: member.recent(now_s) for member_id, member in self.members.items()})

    def _takers(self, stream_id: int, recent: Mapping[str, float]) -> list[tuple[int, float, str]]:
        found = [
            (member.at_work, recent.get(member_id, 0.0), member_id)
            for member_id, member in self.members.items()
            if stream_id in member.stream_ids
        ]
        heapq.heapify(found)
        return found

    def _taker(self, heap: list[tuple[int, float, str]]) -> Member | None:
        """Who has least, of those who may take more; what the heap says of others is brought up to date."""
        while heap:
            at_work, recent, member_id = heap[0]
            member = self.members.get(member_id)
            if member is None or len(member.held) >= member.groups_max:
                heapq.heappop(heap)
            elif member.at_work != at_work:
                heapq.heapreplace(heap, (member.at_work, recent, member_id))
            else:
                return member
        return None

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


def _some(
    stream_ids: AbstractSet[int], shapes: Mapping[int, StreamShape], first: int, count: int
) -> list[tuple[int, int]]:
    """So many of all streamlets of streams, from one on and round: of thousands, no list is made of all."""
    found: list[tuple[int, int]] = []
    at, ordered = first, sorted(stream_ids)
    while len(found) < count:
        for stream_id in ordered:
            streamlets = shapes[stream_id].streamlets
            if at < streamlets:
                found += ((stream_id, number) for number in range(at, min(streamlets, at + count - len(found))))
            at = max(0, at - streamlets)
    return found


def _keys_of_waiting(key: tuple[int, int], streamlet: StreamletProgress) -> Iterator[tuple[int, GroupId]]:
    """As `StreamletProgress.waiting`, with what names them everywhere."""
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


def check_items(items: Sequence[object], name: str, limit: int = ITEMS_MAX) -> None:
    """Raise `InvalidArgument` if there are more than anybody has to say at once."""
    if len(items) > limit:
        raise InvalidArgument(f"at most {limit} {name} in a request, not {len(items)}", field=name, limit=limit)


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
