"""A consumer group: which of its consumers reads which groups of segments, and their progress. No I/O, no waiting.

The consumers of a consumer group are its *members*. A member gets *groups* of segments (thesis 6.2.3). The groups of an
entry follow each other, so several members may read one entry at once, each a different part of it.

``progress`` has the guarantees about groups, cursors and gaps; cursors go back only by `ConsumerGroup.resetting`.
``assignment`` decides which member gets which group.

A member is removed, and the groups that it held become free, if it is silent for its session time-out, or is in its
user's code for longer than its progress time-out. It learns this only from the answer to its next round.

The store has a `StreamletProgress` for each streamlet that the consumer group has begun; `Leases.take_dirty` returns
the changed ones. After a restart, members are known by the groups that they hold, with their time-outs, which start
anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from kera.coordinator.consumer_groups.assignment import Assignment
from kera.coordinator.consumer_groups.commits import Commits
from kera.coordinator.consumer_groups.discovery import Discovery
from kera.coordinator.consumer_groups.leases import Leases
from kera.coordinator.consumer_groups.members import Member, leases_of
from kera.coordinator.consumer_groups.progress import StreamletProgress, Timeouts, key_of
from kera.coordinator.consumer_groups.requests import StreamShape, check_round, checked_start
from kera.core.errors import InvalidArgument, Unavailable
from kera.v1 import common_pb2
from kera.v1 import consumer_group_pb2 as messages

MEMBERS_MAX = 1000
CLIENT_CHARS_MAX = 128
EXPIRE_INTERVAL_S = 0.05
"""Minimum time between two searches for members that are gone: with many members, not every request needs one."""


class ConsumerGroup:
    """The state of one consumer group."""

    def __init__(self, name: str, *, members_max: int = MEMBERS_MAX) -> None:
        self.name = name
        self._members_max = members_max
        self.leases = Leases()
        self.members = self.leases.members
        self.streamlets = self.leases.streamlets
        self.assignment = Assignment(self.leases)
        self.commits = Commits(self.leases)
        self._discovery = Discovery(self.leases)
        self._expired_s = float("-inf")

    def stored(self, key: tuple[int, int]) -> messages.StreamletProgress | None:
        """Return the record to store for a streamlet; None if it is to be deleted."""
        return self.streamlets[key].to_message(self.name) if key in self.streamlets else None

    # --- members -----------------------------------------------------------------------------------------------

    def consuming(
        self, request: messages.ConsumeRoundRequest, shapes: Mapping[int, StreamShape], now_s: float
    ) -> Generator[None, None, messages.ConsumeRoundResponse]:
        """Carry out a member's request; `answering` adds the groups that it holds. `shapes`: of its streams.

        Yields between streamlets, each in a consistent state, and requests of other members are carried out in between.
        Raises `InvalidArgument`, and `Unavailable` if there are too many members.
        """
        check_round(request)
        self.expire(now_s)
        response = messages.ConsumeRoundResponse(in_order=request.in_order)
        member = self._speaking(request, now_s)
        moved: dict[tuple[int, int, int], common_pb2.Cursor] = {}
        steps: defaultdict[tuple[int, int], list[messages.GroupStep]] = defaultdict(list)
        for step in request.steps:
            steps[key_of(step)[:2]].append(step)
            yield
        for of_streamlet in steps.values():
            changed, refused = self.commits.carry_out(request.member_id, of_streamlet)
            response.refused.extend(refused)
            self.commits.advance(changed, moved)
            yield
        if member is not None:
            for start in request.starts:
                self.commits.advance(self.commits.begin([start], shapes), moved)
                yield
            for seen in request.seen:
                self.commits.advance(self.commits.see([seen]), moved)
                yield
        response.moved.extend(cursor for _, cursor in sorted(moved.items()))
        yield from self.assignment.balancing(now_s)
        if member is not None:
            finished = {key for key, of_streamlet in steps.items() if any(step.finished for step in of_streamlet)}
            self._discovery.look(response, member, shapes, finished, now_s)
        return response

    def look(
        self, response: messages.ConsumeRoundResponse, member_id: str, shapes: Mapping[int, StreamShape], now_s: float
    ) -> None:
        """Add to the response the streamlets in which the member should look for groups, if it is time."""
        member = self.members.get(member_id)
        if member is not None:
            self._discovery.look(response, member, shapes, set(), now_s)

    def answering(
        self, response: messages.ConsumeRoundResponse, member_id: str, shapes: Mapping[int, StreamShape], now_s: float
    ) -> Generator[None, None, None]:
        """Add to the response the groups that the member holds, and where it should look for new ones, if it is time.

        Yields; the response describes the state at the start. The member learns of changes since then from its next
        round,
        which returns at once.
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
        """Take note that a member lives; return False if it is not, or no longer, a member."""
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
        """Remove a member, after its last steps."""
        changed, refused = self.commits.carry_out(member_id, steps)
        moved: dict[tuple[int, int, int], common_pb2.Cursor] = {}
        self.commits.advance(changed, moved)
        self._remove(member_id, now_s)
        return messages.LeaveResponse(refused=refused, moved=[cursor for _, cursor in sorted(moved.items())])

    def expire(self, now_s: float) -> list[str]:
        """Remove the members that are gone; return their ids. Looks for them every `EXPIRE_INTERVAL_S` at most."""
        if 0 <= now_s - self._expired_s < EXPIRE_INTERVAL_S:
            return []
        self._expired_s = now_s
        gone = [member.member_id for member in self.members.values() if member.is_gone(now_s)]
        for member_id in gone:
            self._remove(member_id, now_s, balance=False)
        if gone:
            self.assignment.balance(now_s)
        return gone

    def extend_timeouts(self, pause_s: float) -> None:
        """Extend all time-outs by a pause of this process, in which it could receive no messages."""
        for member in self.members.values():
            member.heard_s += pause_s
            if member.busy_since_s is not None:
                member.busy_since_s += pause_s

    @property
    def next_look_s(self) -> float:
        """The time at which a member is to look for new groups."""
        return self._discovery.next_s

    def _speaking(self, request: messages.ConsumeRoundRequest, now_s: float) -> Member | None:
        """Return the member that sends the request; None if it is stuck, and so no member until it makes progress."""
        member = self.members.get(request.member_id)
        if request.busy_ms > request.progress_timeout_ms:
            self._remove(request.member_id, now_s)
            return None
        if member is None:
            if len(self.members) >= self._members_max:
                raise Unavailable(
                    f"consumer group {self.name!r} has {self._members_max} consumers, which is the limit",
                    limit=self._members_max,
                )
            others = [other.recent(now_s) for other in self.members.values()]
            member = self.members[request.member_id] = Member(
                request.member_id, now_s, bytes_consumed=request.bytes_consumed
            )
            member.count(sum(others) / len(others) if others else 0.0, now_s)
        member.heard_s = now_s
        member.client = request.client[:CLIENT_CHARS_MAX]
        member.timeouts = Timeouts(request.session_timeout_ms, request.progress_timeout_ms)
        member.busy_since_s = now_s - request.busy_ms / 1000 if request.busy_ms else None
        stream_ids = frozenset(request.stream_ids)
        wishes = (request.groups_max, stream_ids, request.splits, request.in_order)
        if (member.groups_max, member.stream_ids, member.splits, member.in_order) != wishes:
            member.groups_max, member.stream_ids, member.splits, member.in_order = wishes
            self.leases.balanced = False
        ended = {key for step in request.ended if (key := key_of(step)) in member.held}
        for key in ended ^ member.ended:
            member.held[key].ended = key in ended
            self.streamlets[key[:2]].changed()
            self.leases.balanced = False
        member.ended = ended
        member.count(max(0, request.bytes_consumed - member.bytes_consumed), now_s)
        member.bytes_consumed = request.bytes_consumed
        return member

    def _remove(self, member_id: str, now_s: float, *, balance: bool = True) -> None:
        member = self.members.pop(member_id, None)
        if member is None:
            return
        self.leases.is_gone(member_id)
        for key in list(member.held):
            self.leases.free(member, key)
        if not self.members:
            self.commits.forget_ended()
        if balance:
            self.assignment.balance(now_s)

    # --- resets and deleted streams ----------------------------------------------------------------------------

    def resetting(
        self,
        starts: Iterable[messages.StreamletStart],
        shapes: Mapping[int, StreamShape],
        now_s: float,
        *,
        force: bool,
        forward_only: bool,
    ) -> Generator[None, None, None]:
        """Set the cursors of streamlets. Raises `InvalidArgument`, also when members are active, unless `force` is set.

        Yields before the first change, and not after it, so that all cursors change together. With `forward_only`,
        cursors only go forward, each streamlet independently, and it yields between streamlets.
        """
        fresh: dict[tuple[int, int], StreamletProgress] = {}
        for start in starts:
            key, cursors, records = checked_start(start, shapes)
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
                self.leases.free_streamlet(key)
                old = self.streamlets.get(key)
                streamlet.lease = old.lease if old is not None else 0
            self.streamlets.update(fresh)
            self.leases.dirty.update(fresh)
        self._discovery.look_soon()

    def _check_idle(self, touched: AbstractSet[int], *, force: bool) -> None:
        active = [m.member_id for m in self.members.values() if not m.stream_ids or m.stream_ids & touched]
        if active and not force:
            raise InvalidArgument(
                f"consumer group {self.name!r} has {len(active)} active consumer{'s' if len(active) > 1 else ''};"
                " stop them, or use force: they lose their leases",
                consumer_group=self.name,
                members=len(active),
            )

    def _go_ahead(self, key: tuple[int, int], fresh: StreamletProgress) -> None:
        """Move the cursors of a streamlet forward, where the new ones are ahead."""
        old = self.streamlets.get(key)
        if old is not None:
            ahead = [max(pair) for pair in zip(old.cursors, fresh.cursors, strict=True)]
            if ahead == old.cursors:
                return
            fresh = old.start_again(ahead, fresh.records)
        self.leases.free_streamlet(key)
        self.streamlets[key] = fresh
        self.leases.dirty.add(key)

    def forget(self, gone: Iterable[int]) -> None:
        """Forget the progress in streams that were deleted."""
        gone = set(gone)
        for key in [key for key in self.streamlets if key[0] in gone]:
            self.leases.free_streamlet(key)
            del self.streamlets[key]
            self.leases.dirty.add(key)

    def cursors(self, stream_id: int) -> Iterator[common_pb2.Cursor]:
        """Yield the cursors of the entries of a stream."""
        for (stream, _), streamlet in sorted(self.streamlets.items()):
            if stream == stream_id:
                yield from map(streamlet.cursor, range(len(streamlet.cursors)))
