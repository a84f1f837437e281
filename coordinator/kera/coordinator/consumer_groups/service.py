"""The consumer groups of a cluster: their state in memory and in the ledger, and the operations on it.

``consumer_group`` decides; here is what is around it: names, records, time, and rounds that wait for something to say.

Invariants:

1. What an answer tells is in the store. Memory is ahead of the store while a write is under way, so every answer waits
   for the write of all that was changed before it (`ConsumerGroups._durable`): one write for all that has gathered.
2. When a write fails, memory goes back to what is in the ledger, of the consumer groups that have changed, and whoever
   waited for it gets the error.
3. Timeouts are extended by the time for which this process was paused.

4. A consumer group that nobody has named, and nobody uses, is forgotten (``uses``).

Records: ``applications/<name>/<stream id, 16 hexadecimal digits>/<streamlet, 8>`` → StreamletProgress.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TypeVar

from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.state import State, streamlet_key
from kera.coordinator.consumer_groups.consumer_group import (
    RESET_STREAMLETS_MAX,
    ConsumerGroup,
    StreamShape,
    check_items,
)
from kera.coordinator.consumer_groups.members import leases_of
from kera.coordinator.consumer_groups.progress import lowest
from kera.coordinator.consumer_groups.uses import CLOCK, USES, Uses
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.core.telemetry import get_logger
from kera.v1 import common_pb2
from kera.v1 import consumer_group_pb2 as messages

log = get_logger("kera.consumer_groups")

T = TypeVar("T")

CONSUMER_GROUPS = "applications/"
NAME_CHARS_MAX = 200
CONSUMER_GROUPS_MAX = 10_000
TICK_S = 0.5
PAUSE_S_MIN = 1.0
"""A tick that comes later than this: the process stood still."""
WAIT_MS_MAX = 30_000

_NAME = re.compile(r"[A-Za-z0-9._-]+")


class ConsumerGroups:
    """All consumer groups. Belongs to one event loop."""

    def __init__(self, state: State, unnamed_retention_ms: int = 0) -> None:
        """`unnamed_retention_ms`: see the coordinator's settings; 0: for ever."""
        self._state = state
        self._clock = state.clock
        self._consumer_groups: dict[str, ConsumerGroup] = {}
        self._active: set[str] = set()
        """Consumer groups to be looked after: those with members, and those that have begun nothing."""
        self._readers: defaultdict[int, set[str]] = defaultdict(set)
        """By stream: the consumer groups that have begun it."""
        self._short: set[str] = set()
        """Consumer groups whose consumers do not take all groups that they should; the log has been told."""
        self._polls: dict[tuple[str, str], asyncio.Event] = {}
        """Rounds that wait, by consumer group and member; set when there is something to say."""
        self._busy: Counter[str] = Counter()
        """Consumer groups that are being changed in steps, and how many times."""
        self._changed: set[str] = set()
        """Consumer groups of which something is to be stored."""
        self._changes = 0
        """Counts whatever may have changed something."""
        self._stored = 0
        """Up to here it is in the store."""
        self._lost: tuple[int, Exception] | None = None
        """Up to here it could not be stored, and why."""
        self._writing = asyncio.Lock()
        self._ticking: asyncio.Task[None] | None = None
        self._awake_s = state.clock.monotonic_s()
        """When this process was last seen to run."""
        self._uses = Uses(unnamed_retention_ms, self._awake_s, int(state.ledger.get(CLOCK) or b"0"))
        self._forgetting: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Take up what the ledger has. Members have as long as any to send a heartbeat."""
        for value in self._state.ledger.values(CONSUMER_GROUPS):
            self._take_up(value)
        for value in self._state.ledger.values(USES):
            self._uses.restore(messages.ConsumerGroupUse.FromString(value))
        for name in self._consumer_groups:
            self._uses.idle_ms(name, self._awake_s)  # those of an earlier version are used now

    def start(self) -> None:
        """Begin to forget consumer groups that nobody uses, and to notice members that do not come back."""
        self._forgetting = asyncio.create_task(self._forget_unused())
        if self._active:
            self._tick_while_needed()

    def _take_up(self, value: bytes) -> None:
        """What the ledger has of a consumer group in a streamlet."""
        record = messages.StreamletProgress.FromString(value)
        name = record.consumer_group
        consumer_group = self._consumer_groups.setdefault(name, ConsumerGroup(name))
        consumer_group.restore(record, self._clock.monotonic_s())
        self._readers[record.stream_id].add(name)
        if consumer_group.members:
            self._active.add(name)

    def _take_back(self, lost: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """Have consumer groups as the ledger has them: those of which changes are lost, and all that have others by
        now.

        `lost`: the streamlets, by consumer group.
        """
        for name in lost.keys() | self._changed:
            consumer_group = self._consumer_groups.pop(name)
            self._active.discard(name)
            self._short.discard(name)
            known = {*lost.get(name, ()), *consumer_group.dirty, *consumer_group.streamlets}
            for stream_id, _ in known:
                self._readers[stream_id].discard(name)
            for streamlet in sorted(known):
                value = self._state.ledger.get(_key(name, *streamlet))
                if value is not None:
                    self._take_up(value)
        self._changed.clear()

    async def close(self) -> None:
        """End what is under way: rounds that wait are answered."""
        for task in (self._ticking, self._forgetting):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        for poll in self._polls.values():
            poll.set()

    def handlers(self) -> Handlers:
        """Requests in, responses out, by method."""
        return {
            api.CONSUME_ROUND: self.consume_round,
            api.KEEP_ALIVE: self.keep_alive,
            api.LEAVE: self.leave,
            api.FETCH_CONSUMER_GROUP: self.fetch,
            api.LIST_CONSUMER_GROUPS: self.list_all,
            api.DESCRIBE_CONSUMER_GROUP: self.describe,
            api.RESET_CONSUMER_GROUP: self.reset,
            api.DELETE_CONSUMER_GROUP: self.delete,
        }

    def cursors_of(self, stream_id: int) -> list[common_pb2.Cursor]:
        """For each entry of a stream that any consumer group has begun: up to where all of them are done with it."""
        return lowest(
            cursor
            for name in self._readers.get(stream_id, ())
            for cursor in self._consumer_groups[name].cursors(stream_id)
        )

    def __len__(self) -> int:
        return len(self._consumer_groups)

    def holdings(self, count_max: int) -> Iterator[tuple[str, int, int]]:
        """Of the first consumer groups by name: the name, how many consumers take part, and groups they hold.

        From whatever thread: it looks at copies that are made in one step.
        """
        for name, consumer_group in heapq.nsmallest(
            count_max, list(self._consumer_groups.items()), key=lambda item: item[0]
        ):
            members = list(consumer_group.members.values())
            yield name, len(members), sum(len(member.held) for member in members)

    # --- of consumers ------------------------------------------------------------------------------------------

    async def consume_round(self, request: messages.ConsumeRoundRequest) -> messages.ConsumeRoundResponse:
        """See `ConsumerGroup.consume_round`. Raises `UnknownStream`, `InvalidArgument`, `Unavailable`."""
        name, member_id = request.consumer_group, request.member_id
        now_s = self._now_s()
        check_items(request.stream_ids, "stream_ids")
        shapes = self._shapes(request.stream_ids)
        consumer_group = self._named(name, create=True)
        self._end_poll(name, member_id)
        was_member = member_id in consumer_group.members
        with self._change(consumer_group):
            self._expire(consumer_group, now_s)
        response = await self._in_slices(consumer_group, consumer_group.consuming(request, shapes, now_s))
        self._use(name, now_s)
        self._tick_while_needed()
        await self._durable()
        removed = was_member and member_id not in consumer_group.members
        if request.wait_ms and not (request.steps or response.look or removed):
            await self._something_to_say(response, request)
        known = self._consumer_groups.get(name)
        if known is None:  # something could not be stored meanwhile, and nothing was stored of it before
            del response.held[:]
            return response
        shapes = self._shapes(request.stream_ids)
        await self._state.in_slices(known.answering(response, member_id, shapes, self._now_s()))
        await self._durable()
        return response

    async def _something_to_say(
        self, response: messages.ConsumeRoundResponse, request: messages.ConsumeRoundRequest
    ) -> None:
        """Wait until the member holds something else than it was told, or it is time to look for groups.

        One that is stuck, and so is no member, waits as long as it has said.
        """
        name, member_id = request.consumer_group, request.member_id
        until_s = asyncio.get_running_loop().time() + min(request.wait_ms, WAIT_MS_MAX) / 1000
        poll = self._polls[name, member_id] = asyncio.Event()
        try:
            while not poll.is_set():
                consumer_group = self._consumer_groups.get(name)
                left_s = until_s - asyncio.get_running_loop().time()
                if consumer_group is None or left_s <= 0:
                    return
                member = consumer_group.members.get(member_id)
                if member is not None:
                    if member.version != member.told_version:
                        return
                    consumer_group.look(response, member_id, self._shapes(request.stream_ids), self._now_s())
                    if response.look:
                        return
                    left_s = min(left_s, max(0.001, consumer_group.next_look_s - self._clock.monotonic_s()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await poll.wait()
        finally:
            if self._polls.get((name, member_id)) is poll:
                del self._polls[name, member_id]

    def _end_poll(self, name: str, member_id: str) -> None:
        poll = self._polls.pop((name, member_id), None)
        if poll is not None:
            poll.set()

    async def keep_alive(self, request: messages.KeepAliveRequest) -> messages.KeepAliveResponse:
        """See `ConsumerGroup.keep_alive`."""
        now_s = self._now_s()
        consumer_group = self._consumer_groups.get(request.consumer_group)
        member = False
        if consumer_group is not None:
            self._use(consumer_group.name, now_s)
            with self._change(consumer_group):
                self._expire(consumer_group, now_s)
                member = consumer_group.keep_alive(request.member_id, request.busy_ms, now_s)
            await self._durable()
        return messages.KeepAliveResponse(member=member)

    async def leave(self, request: messages.LeaveRequest) -> messages.LeaveResponse:
        """See `ConsumerGroup.leave`."""
        check_items(request.steps, "steps")
        consumer_group = self._consumer_groups.get(request.consumer_group)
        if consumer_group is None:
            return messages.LeaveResponse(refused=request.steps)
        self._end_poll(request.consumer_group, request.member_id)
        self._use(consumer_group.name, self._now_s())
        with self._change(consumer_group):
            response = consumer_group.leave(request.member_id, request.steps, self._now_s())
        await self._durable()
        return response

    # --- of people ---------------------------------------------------------------------------------------------

    async def fetch(self, request: messages.FetchConsumerGroupRequest) -> messages.FetchConsumerGroupResponse:
        """The cursors of a consumer group in a stream; none if it has not begun. Raises `UnknownStream`."""
        self._state.catalog.with_id(request.stream_id)
        await self._durable()
        consumer_group = self._consumer_groups.get(request.consumer_group)
        response = messages.FetchConsumerGroupResponse()
        pace = self._state.pace()
        for cursor in consumer_group.cursors(request.stream_id) if consumer_group is not None else ():
            response.cursors.append(cursor)
            await pace.step()
        return response

    async def list_all(self, _: messages.ListConsumerGroupsRequest) -> messages.ListConsumerGroupsResponse:
        """All consumer groups, by name."""
        self._tidy()
        await self._durable()
        now_s, held_back = self._now_s(), self._state.catalog.consumer_groups_waited_for()
        response = messages.ListConsumerGroupsResponse()
        pace = self._state.pace()
        for name, consumer_group in sorted(self._consumer_groups.items()):
            await pace.step()
            response.consumer_groups.add(
                consumer_group=name,
                stream_ids=sorted({stream_id for stream_id, _ in consumer_group.streamlets}),
                members=len(consumer_group.members),
                idle_ms=self._uses.idle_ms(name, now_s),
                unnamed=self._uses.is_unnamed(name),
                expires_in_ms=None if name in held_back else self._uses.expires_in_ms(name, now_s),
            )
        return response

    async def describe(self, request: messages.DescribeConsumerGroupRequest) -> messages.DescribeConsumerGroupResponse:
        """Members and progress of a consumer group. Raises `InvalidArgument` when there is none of this name."""
        self._tidy()
        await self._durable()
        consumer_group, now_s = self._named(request.consumer_group), self._now_s()
        response = messages.DescribeConsumerGroupResponse()
        pace = self._state.pace()
        for _, streamlet in sorted(consumer_group.streamlets.items()):
            await pace.step()
            response.streamlets.append(streamlet.to_message(consumer_group.name))
        for member_id, member in sorted(consumer_group.members.items()):
            await pace.step()
            response.members.add(
                member_id=member_id,
                client=member.client,
                held=leases_of(member),
                silent_ms=round(max(0.0, now_s - member.heard_s) * 1000),
                busy_ms=round(max(0.0, now_s - member.busy_since_s) * 1000) if member.busy_since_s is not None else 0,
                bytes_consumed=member.bytes_consumed,
                session_timeout_ms=member.timeouts.session_ms,
                progress_timeout_ms=member.timeouts.progress_ms,
            )
        return response

    async def reset(self, request: messages.ResetConsumerGroupRequest) -> messages.ResetConsumerGroupResponse:
        """Put cursors elsewhere; a consumer group that there is not yet is made by that.

        Raises `UnknownStream`, and `InvalidArgument` when consumers are at work and it is not forced.
        """
        check_items(request.starts, "starts", RESET_STREAMLETS_MAX)
        shapes = self._shapes({start.stream_id for start in request.starts})
        consumer_group, now_s = self._named(request.consumer_group, create=True), self._now_s()
        steps = consumer_group.resetting(
            request.starts, shapes, now_s, force=request.force, forward_only=request.forward_only
        )
        await self._in_slices(consumer_group, steps)
        self._use(consumer_group.name, now_s, unnamed=request.unnamed)
        await self._durable()
        if not request.forward_only:
            log.info("consumer group reset", consumer_group=request.consumer_group, streams=sorted(shapes))
        return messages.ResetConsumerGroupResponse()

    async def delete(self, request: messages.DeleteConsumerGroupRequest) -> messages.DeleteConsumerGroupResponse:
        """Forget a consumer group. Raises `InvalidArgument` when there is none, or it is in use."""
        consumer_group, now_s = self._named(request.consumer_group), self._now_s()
        with self._change(consumer_group):
            self._expire(consumer_group, now_s)
            if consumer_group.members:
                raise InvalidArgument(
                    f"consumer group {consumer_group.name!r} has {len(consumer_group.members)} active"
                    " consumers; stop them",
                    consumer_group=consumer_group.name,
                    members=len(consumer_group.members),
                )
            if request.idle_ms:
                self._check_idle(consumer_group.name, request.idle_ms, now_s)
            self._forget(consumer_group)
        await self._durable()
        log.info("consumer group deleted", consumer_group=request.consumer_group)
        return messages.DeleteConsumerGroupResponse()

    def _check_idle(self, name: str, wanted_ms: int, now_s: float) -> None:
        """Raise `InvalidArgument` unless it was idle for so long and no retention waits for it."""
        idle_ms = self._uses.idle_ms(name, now_s)
        if idle_ms < wanted_ms:
            raise InvalidArgument(
                f"consumer group {name!r} was used {idle_ms / 1000:.0f} s ago", consumer_group=name, idle_ms=idle_ms
            )
        if name in self._state.catalog.consumer_groups_waited_for():
            raise InvalidArgument(
                f"retention of a stream waits for consumer group {name!r}; take it off there first (kera stream alter)",
                consumer_group=name,
            )

    # --- names and time ----------------------------------------------------------------------------------------

    def _named(self, name: str, *, create: bool = False) -> ConsumerGroup:
        consumer_group = self._consumer_groups.get(name)
        if consumer_group is not None:
            return consumer_group
        if not create:
            raise InvalidArgument(f"there is no consumer group {name!r}", consumer_group=name)
        if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX or name in {".", ".."}:
            raise InvalidArgument(
                f"a consumer group cannot be called {name[: NAME_CHARS_MAX + 1]!r}: a name has 1 to {NAME_CHARS_MAX}"
                " letters, digits, dots, underscores and hyphens, and is not . or ..",
                consumer_group=name[: NAME_CHARS_MAX + 1],
            )
        if len(self._consumer_groups) >= CONSUMER_GROUPS_MAX:
            self._tidy()  # names of requests that were refused are no consumer groups
        if len(self._consumer_groups) >= CONSUMER_GROUPS_MAX:
            raise InvalidArgument(
                f"there are {CONSUMER_GROUPS_MAX} consumer groups, which is the limit; delete those that nobody needs",
                consumer_group=name,
                limit=CONSUMER_GROUPS_MAX,
            )
        consumer_group = self._consumer_groups[name] = ConsumerGroup(name)
        self._active.add(name)
        return consumer_group

    def _shapes(self, stream_ids: Iterable[int]) -> dict[int, StreamShape]:
        found = {stream_id: self._state.catalog.with_id(stream_id).config for stream_id in stream_ids}
        return {stream_id: StreamShape(config.streamlets, config.entries) for stream_id, config in found.items()}

    def _now_s(self) -> float:
        """The time; a pause of this process is made good first."""
        now_s = self._clock.monotonic_s()
        pause_s = now_s - self._awake_s - TICK_S
        self._awake_s = now_s
        if self._ticking is not None and pause_s > PAUSE_S_MIN:
            log.warning("this process stood still; consumers have as much time as before", pause_s=round(pause_s, 1))
            for name in self._active:
                self._consumer_groups[name].extend_timeouts(pause_s)
        return now_s

    def _tick_while_needed(self) -> None:
        if self._ticking is None:
            self._awake_s = self._clock.monotonic_s()
            self._ticking = asyncio.create_task(self._tick())

    def _use(self, name: str, now_s: float, *, unnamed: bool = False) -> None:
        self._uses.use(name, now_s, unnamed=unnamed)
        self._changes += self._uses.dirty

    def _forget(self, consumer_group: ConsumerGroup) -> None:
        """All of it; what is around says that it has changed."""
        consumer_group.forget({stream_id for stream_id, _ in consumer_group.streamlets})
        self._uses.forget(consumer_group.name)
        self._changes += self._uses.dirty

    async def _forget_unused(self) -> None:
        while True:
            await asyncio.sleep(self._uses.note_ms / 1000)
            with contextlib.suppress(Exception):  # what is not stored now is tried again
                await self.forget_unused()

    async def forget_unused(self) -> None:
        """Forget unnamed consumer groups that nobody uses, and write down how much time has gone."""
        self._tidy()
        now_s = self._now_s()
        unused = [name for name, consumer_group in self._consumer_groups.items() if not consumer_group.members]
        for name in self._uses.expired(unused, now_s, self._state.catalog.consumer_groups_waited_for()):
            consumer_group = self._consumer_groups[name]
            with self._change(consumer_group):
                self._forget(consumer_group)
            log.info("consumer group forgotten: nobody had named it, and nobody used it", consumer_group=name)
        self._changes += self._uses.dirty or self._uses.clock_due(now_s)
        await self._durable()

    async def _tick(self) -> None:
        """Find out who is gone, as long as there is anybody."""
        while True:
            await asyncio.sleep(TICK_S)
            self._tidy()
            with contextlib.suppress(Exception):  # whoever asks next is told
                await self._durable()
            if not any(self._consumer_groups[name].members for name in self._active):
                self._ticking = None
                return

    def _tidy(self) -> None:
        """Remove members that are gone, streams that were deleted, and consumer groups that never began."""
        now_s = self._now_s()
        for stream_id in [stream_id for stream_id in self._readers if stream_id not in self._state.catalog]:
            for name in self._readers.pop(stream_id):
                with self._change(self._consumer_groups[name]):
                    self._consumer_groups[name].forget([stream_id])
        for name in list(self._active):
            consumer_group = self._consumer_groups[name]
            with self._change(consumer_group):
                self._expire(consumer_group, now_s)
            unused = not (consumer_group.members or consumer_group.streamlets or name in self._busy)
            if unused and self._stored == self._changes:
                del self._consumer_groups[name]
                self._active.discard(name)
                self._short.discard(name)
                self._uses.forget(name)
                self._changes += self._uses.dirty

    def _expire(self, consumer_group: ConsumerGroup, now_s: float) -> None:
        for member_id in consumer_group.expire(now_s):
            log.warning(
                "consumer is gone; others get its groups", consumer_group=consumer_group.name, member_id=member_id
            )

    # --- the store ---------------------------------------------------------------------------------------------

    async def _in_slices(self, consumer_group: ConsumerGroup, steps: Generator[None, None, T]) -> T:
        """Drive what changes a consumer group; others are served between steps, of this consumer group, too.

        Raises what the store has raised, if what was changed had to be taken back meanwhile.
        """
        self._busy[consumer_group.name] += 1
        try:
            with self._change(consumer_group):
                result = await self._state.in_slices(steps)
        finally:
            self._busy[consumer_group.name] -= 1
            if not self._busy[consumer_group.name]:
                del self._busy[consumer_group.name]
        if self._lost is not None and self._consumer_groups.get(consumer_group.name) is not consumer_group:
            raise self._lost[1]
        return result

    @contextlib.contextmanager
    def _change(self, consumer_group: ConsumerGroup) -> Iterator[None]:
        """Around what may change a consumer group: it is stored with the next write, and rounds that wait are told."""
        try:
            yield
        finally:  # what was done before an error is done
            if self._consumer_groups.get(consumer_group.name) is consumer_group:
                self._note_change(consumer_group)

    def _note_change(self, consumer_group: ConsumerGroup) -> None:
        if consumer_group.dirty:
            self._changes += 1
            self._changed.add(consumer_group.name)
            for key in consumer_group.dirty:
                readers = self._readers[key[0]]
                (readers.add if key in consumer_group.streamlets else readers.discard)(consumer_group.name)
        if consumer_group.members or not consumer_group.streamlets:
            self._active.add(consumer_group.name)
        else:
            self._active.discard(consumer_group.name)
        self._tell_if_short(consumer_group)
        for member_id in consumer_group.take_news():
            poll = self._polls.get((consumer_group.name, member_id))
            if poll is not None:
                poll.set()

    def _tell_if_short(self, consumer_group: ConsumerGroup) -> None:
        """Say once that there are entries that nobody reads."""
        if not consumer_group.is_short:
            self._short.discard(consumer_group.name)
        elif consumer_group.name not in self._short:
            self._short.add(consumer_group.name)
            log.warning(
                "entries wait: all consumers hold as many groups as they want; start more, or raise groups_max",
                consumer_group=consumer_group.name,
                consumers=len(consumer_group.members),
            )

    async def _durable(self) -> None:
        """Return when all that was changed before is in the store. Raises what the store raises."""
        if self._stored >= self._changes:
            return
        await self._state.to_the_end(self._store(self._changes))

    async def _store(self, wanted: int) -> None:
        async with self._writing:
            if self._lost is not None and wanted <= self._lost[0]:
                raise self._lost[1]
            if self._stored >= wanted:
                return
            through = self._changes
            names, self._changed = self._changed, set()
            taken = {self._consumer_groups[name]: self._consumer_groups[name].take_dirty() for name in sorted(names)}
            changes: dict[str, bytes | None] = {}
            pace = self._state.pace()
            for consumer_group, keys in taken.items():
                for key in keys:  # what changes meanwhile is stored once more, with what comes next
                    await pace.step()
                    message = consumer_group.stored(key)
                    changes[_key(consumer_group.name, *key)] = message and message.SerializeToString()
            uses = self._uses.take_changes(self._clock.monotonic_s())
            try:
                if changes or uses:
                    async with self._state.changing:
                        await self._state.write({**changes, **uses})
            except Exception as error:
                self._uses.not_stored(uses)
                self._lost = (self._changes, error)
                self._stored = self._changes
                self._take_back({consumer_group.name: keys for consumer_group, keys in taken.items()})
                raise
            self._stored = through


def _key(name: str, stream_id: int, streamlet_id: int) -> str:
    return streamlet_key(f"{CONSUMER_GROUPS}{name}/", stream_id, streamlet_id)
