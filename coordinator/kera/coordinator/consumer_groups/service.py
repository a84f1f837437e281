"""The consumer groups of a cluster: the requests of consumers and of operators, and time-outs.

``consumer_group`` decides the outcome of a request, ``registry`` has the consumer groups, ``durability`` stores them.

Invariants:

1. Everything in an answer is in the store. Memory is ahead of the store while a write is under way, so every answer
   waits for the write of all earlier changes (`Durability.durable`).
2. Timeouts are extended by the time for which this process was paused.
3. An unused consumer group without a chosen name is forgotten (``uses``).

Records: ``applications/<name>/<stream id, 16 hexadecimal digits>/<streamlet, 8>`` → StreamletProgress.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.shares import NO_SHARES, Shares
from kera.coordinator.cluster.state import State
from kera.coordinator.consumer_groups.consumer_group import ConsumerGroup
from kera.coordinator.consumer_groups.durability import Durability
from kera.coordinator.consumer_groups.members import leases_of
from kera.coordinator.consumer_groups.polls import Polls
from kera.coordinator.consumer_groups.registry import CONSUMER_GROUPS_MAX, ConsumerGroupRegistry, check_name
from kera.coordinator.consumer_groups.requests import RESET_STREAMLETS_MAX, StreamShape, check_items, check_member_id
from kera.coordinator.consumer_groups.uses import CLOCK, USES, Uses
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, KeraError, LeaseLost
from kera.core.rpc import api
from kera.v1 import consumer_group_pb2 as messages

log = get_logger("kera.consumer_groups")

T = TypeVar("T")

TICK_S = 0.5
PAUSE_S_MIN = 1.0
"""A tick that is more than this many seconds late shows that the process was paused."""
WAIT_MS_MAX = 30_000
LEFT_MAX = 4096
"""Maximum of members that have left and are remembered."""


class ConsumerGroups:
    """All consumer groups. Belongs to one event loop."""

    def __init__(
        self,
        state: State,
        unnamed_retention_ms: int = 0,
        *,
        tick_s: float = TICK_S,
        groups_max: int = CONSUMER_GROUPS_MAX,
        shares: Shares = NO_SHARES,
    ) -> None:
        """`unnamed_retention_ms`: see the coordinator's settings; 0: forever."""
        self._state = state
        self._clock = state.clock
        self._tick_s = tick_s
        self._awake_s = state.clock.monotonic_s()
        """When this process was last seen to run, on the monotonic clock."""
        self._uses = Uses(unnamed_retention_ms, self._awake_s, int(state.ledger.get(CLOCK) or b"0"))
        self.polls = Polls()
        self.registry = ConsumerGroupRegistry(state, self._uses, self.polls, shares, groups_max=groups_max)
        self._durability = Durability(state, self.registry, self._uses)
        self._left: OrderedDict[tuple[str, str], None] = OrderedDict()
        """The last members that have left: calls may overtake each other, and a member's round that comes after
        its departure must
        not make it a member again.
        """
        self._ticking: asyncio.Task[None] | None = None
        self._forgetting: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Load the consumer groups, and their last uses, from the ledger."""
        self.registry.load(self._awake_s)
        for value in self._state.ledger.values(USES):
            self._uses.restore(messages.ConsumerGroupUse.FromString(value))
        for name in self.registry.groups:
            self._uses.idle_ms(name, self._awake_s)  # groups of an earlier version count as used now

    @property
    def is_ticking(self) -> bool:
        """Whether members are checked regularly, because there are some."""
        return self._ticking is not None

    def start(self) -> None:
        """Begin to forget unused consumer groups, and to notice members that do not come back."""
        self._forgetting = asyncio.create_task(self._forget_unused())
        if self.registry.active():
            self._tick_while_needed()

    async def close(self) -> None:
        """Stop the background work, and answer the rounds that wait."""
        for task in (self._ticking, self._forgetting):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self.polls.close()

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
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

    # --- requests of consumers ---------------------------------------------------------------------------------

    async def consume_round(self, request: messages.ConsumeRoundRequest) -> messages.ConsumeRoundResponse:
        """See `ConsumerGroup.consuming`. Raises `UnknownStream`, `InvalidArgument`, `Unavailable`, `LeaseLost`."""
        name, member_id = request.consumer_group, request.member_id
        if (name, member_id) in self._left:
            raise LeaseLost(f"member {member_id} has left consumer group {name!r}", consumer_group=name)
        now_s = self._now_s()
        check_items(request.stream_ids, "stream_ids")
        shapes = self._shapes(request.stream_ids)
        consumer_group = self.registry.create(name, now_s)
        self.polls.end(name, member_id)
        was_member = member_id in consumer_group.members
        with self.registry.change(consumer_group):
            self.registry.expire(consumer_group, now_s)
        response = await self._in_slices(consumer_group, consumer_group.consuming(request, shapes, now_s))
        self.registry.use(name, now_s)
        self._tick_while_needed()
        await self._durability.durable()
        removed = was_member and member_id not in consumer_group.members
        if request.wait_ms and not (request.steps or response.look or removed):
            await self._wait_for_news(response, request)
        known = self.registry.groups.get(name)
        if known is None:  # a write has failed meanwhile, and the store had nothing of the group before
            del response.held[:]
            return response
        shapes = self._shapes(request.stream_ids)
        await self._state.in_slices(known.answering(response, member_id, shapes, self._now_s()))
        await self._durability.durable()
        return response

    async def _wait_for_news(
        self, response: messages.ConsumeRoundResponse, request: messages.ConsumeRoundRequest
    ) -> None:
        """Wait until the member's leases differ from the last answer, or it is time to look for groups.

        A stuck member, which does not count as a member, waits for the whole time that it asked for.
        """
        name, member_id = request.consumer_group, request.member_id
        until_s = asyncio.get_running_loop().time() + min(request.wait_ms, WAIT_MS_MAX) / 1000
        with self.polls.begin(name, member_id) as poll:
            while not poll.is_set():
                consumer_group = self.registry.groups.get(name)
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

    async def keep_alive(self, request: messages.KeepAliveRequest) -> messages.KeepAliveResponse:
        """See `ConsumerGroup.keep_alive`."""
        now_s = self._now_s()
        consumer_group = self.registry.groups.get(request.consumer_group)
        member = False
        if consumer_group is not None:
            self.registry.use(consumer_group.name, now_s)
            with self.registry.change(consumer_group):
                self.registry.expire(consumer_group, now_s)
                member = consumer_group.keep_alive(request.member_id, request.busy_ms, now_s)
            await self._durability.durable()
        return messages.KeepAliveResponse(member=member)

    async def leave(self, request: messages.LeaveRequest) -> messages.LeaveResponse:
        """See `ConsumerGroup.leave`. Raises `InvalidArgument`."""
        check_items(request.steps, "steps")
        check_name(request.consumer_group)
        check_member_id(request.member_id)
        self._left[request.consumer_group, request.member_id] = None
        if len(self._left) > LEFT_MAX:
            self._left.popitem(last=False)
        consumer_group = self.registry.groups.get(request.consumer_group)
        if consumer_group is None:
            return messages.LeaveResponse(refused=request.steps)
        self.polls.end(request.consumer_group, request.member_id)
        self.registry.use(consumer_group.name, self._now_s())
        with self.registry.change(consumer_group):
            response = consumer_group.leave(request.member_id, request.steps, self._now_s())
        await self._durability.durable()
        return response

    # --- requests of operators ---------------------------------------------------------------------------------

    async def fetch(self, request: messages.FetchConsumerGroupRequest) -> messages.FetchConsumerGroupResponse:
        """Return the cursors of a consumer group in a stream; none if it has not begun the stream. Raises
        `UnknownStream`.
        """
        self._state.catalog.with_id(request.stream_id)
        await self._durability.durable()
        consumer_group = self.registry.groups.get(request.consumer_group)
        response = messages.FetchConsumerGroupResponse()
        pace = self._state.pace()
        for cursor in consumer_group.cursors(request.stream_id) if consumer_group is not None else ():
            response.cursors.append(cursor)
            await pace.step()
        return response

    async def list_all(self, _: messages.ListConsumerGroupsRequest) -> messages.ListConsumerGroupsResponse:
        """List all consumer groups, by name."""
        self.registry.tidy(self._now_s())
        await self._durability.durable()
        now_s, held_back = self._now_s(), self._state.catalog.consumer_groups_waited_for()
        response = messages.ListConsumerGroupsResponse()
        pace = self._state.pace()
        for name, consumer_group in sorted(self.registry.groups.items()):
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
        """Describe members and progress of a consumer group. Raises `InvalidArgument` if there is none of this name."""
        self.registry.tidy(self._now_s())
        await self._durability.durable()
        consumer_group, now_s = self.registry.named(request.consumer_group), self._now_s()
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
        """Set cursors of a consumer group, which is created if it does not exist.

        Raises `UnknownStream`, and `InvalidArgument` if consumers are active and the request does not force it.
        """
        check_items(request.starts, "starts", RESET_STREAMLETS_MAX)
        shapes = self._shapes({start.stream_id for start in request.starts})
        now_s = self._now_s()
        consumer_group = self.registry.create(request.consumer_group, now_s)
        steps = consumer_group.resetting(
            request.starts, shapes, now_s, force=request.force, forward_only=request.forward_only
        )
        await self._in_slices(consumer_group, steps)
        self.registry.use(consumer_group.name, now_s, unnamed=request.unnamed)
        await self._durability.durable()
        if not request.forward_only:
            log.info("consumer group reset", consumer_group=request.consumer_group, streams=sorted(shapes))
        return messages.ResetConsumerGroupResponse()

    async def delete(self, request: messages.DeleteConsumerGroupRequest) -> messages.DeleteConsumerGroupResponse:
        """Delete a consumer group. Raises `InvalidArgument` if it does not exist, or is in use."""
        consumer_group, now_s = self.registry.named(request.consumer_group), self._now_s()
        with self.registry.change(consumer_group):
            self.registry.expire(consumer_group, now_s)
            if consumer_group.members:
                raise InvalidArgument(
                    f"consumer group {consumer_group.name!r} has {len(consumer_group.members)} active"
                    " consumers; stop them",
                    consumer_group=consumer_group.name,
                    members=len(consumer_group.members),
                )
            if request.idle_ms:
                self._check_idle(consumer_group.name, request.idle_ms, now_s)
            self.registry.forget(consumer_group)
        await self._durability.durable()
        log.info("consumer group deleted", consumer_group=request.consumer_group)
        return messages.DeleteConsumerGroupResponse()

    def _check_idle(self, name: str, wanted_ms: int, now_s: float) -> None:
        """Raise `InvalidArgument` unless the group was idle for `wanted_ms` and no retention waits for it."""
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

    # --- time --------------------------------------------------------------------------------------------------

    def _shapes(self, stream_ids: Iterable[int]) -> dict[int, StreamShape]:
        found = {stream_id: self._state.catalog.with_id(stream_id).config for stream_id in stream_ids}
        return {stream_id: StreamShape(config.streamlets, config.entries) for stream_id, config in found.items()}

    def _now_s(self) -> float:
        """Return the time, after extending time-outs by a pause of this process, if there was one."""
        now_s = self._clock.monotonic_s()
        pause_s = now_s - self._awake_s - self._tick_s
        self._awake_s = now_s
        if self._ticking is not None and pause_s > PAUSE_S_MIN:
            log.warning("this process was paused; timeouts of consumers are extended", pause_s=round(pause_s, 1))
            for consumer_group in self.registry.active():
                consumer_group.extend_timeouts(pause_s)
        return now_s

    def _tick_while_needed(self) -> None:
        if self._ticking is None:
            self._awake_s = self._clock.monotonic_s()
            self._ticking = asyncio.create_task(self._tick())

    async def _forget_unused(self) -> None:
        failing = Repeated(log)
        while True:
            await asyncio.sleep(self._uses.note_ms / 1000)
            with _logged(failing):  # changes that are not stored now are stored later
                await self.forget_unused()

    async def forget_unused(self) -> None:
        """Forget unused consumer groups without a chosen name, and store the clock of uses."""
        now_s = self._now_s()
        self.registry.tidy(now_s)
        unused = [name for name, consumer_group in self.registry.groups.items() if not consumer_group.members]
        for name in self._uses.expired(unused, now_s, self._state.catalog.consumer_groups_waited_for()):
            consumer_group = self.registry.groups[name]
            with self.registry.change(consumer_group):
                self.registry.forget(consumer_group)
            log.info("consumer group without a chosen name forgotten: it was unused", consumer_group=name)
        if self._uses.dirty or self._uses.clock_due(now_s):
            self.registry.note_change()
        await self._durability.durable()

    async def _tick(self) -> None:
        """Remove members that are gone, as long as there are members."""
        failing = Repeated(log)
        while True:
            await asyncio.sleep(self._tick_s)
            with _logged(failing):  # the next caller gets an error of the store as well
                self.registry.tidy(self._now_s())
                await self._durability.durable()
                if not any(consumer_group.members for consumer_group in self.registry.active()):
                    self._ticking = None
                    return

    async def _in_slices(self, consumer_group: ConsumerGroup, steps: Generator[None, None, T]) -> T:
        """Run the steps of a change of a consumer group; other requests are served in between, of this consumer
        group, too.

        Raises the store's error if changes had to be taken back meanwhile.
        """
        with self.registry.changing_in_steps(consumer_group):
            result = await self._state.in_slices(steps)
        self._durability.check_kept(consumer_group)
        return result


@contextlib.contextmanager
def _logged(failing: Repeated) -> Iterator[None]:
    """Log an error of periodic work, which goes on."""
    try:
        yield
    except KeraError as error:
        failing.goes_on("cannot store changes of consumer groups", error=error.message)
    except Exception as error:  # noqa: BLE001 - it is logged
        failing.goes_on("unexpected exception in the check of consumer groups", level="error", exc_info=error)
    else:
        failing.over("the check of consumer groups goes on")
