"""The conversation of a member of a consumer group with the coordinator, in *rounds*.

In each round the member sends its reports, and learns which groups it has now. A round begins whenever there is
something to report (`Rounds.speak_soon`), and otherwise about once a second: a round without reports waits at the
coordinator until there is news for this member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from kera.client.cluster.cluster import Cluster
from kera.client.cluster.retry import backoff_s
from kera.client.consuming.groups.discovery import Discovery, Finds
from kera.client.consuming.groups.leases import Leases
from kera.client.consuming.groups.liveness import Liveness
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.client.tasks import Tasks
from kera.client.types import StreamDescription, position_of
from kera.core.base.clock import Clock
from kera.core.base.ids import EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import ClosedError, InvalidArgument, KeraError, LeaseLost
from kera.core.rpc import api
from kera.core.rpc.method import Method, RequestT, ResponseT
from kera.v1 import common_pb2, consumer_group_pb2

log = get_logger("kera.consumer")

LEAVE_TIMEOUT_S = 5.0


class BrokerCursors:
    """Cursors of a consumer group, sent to brokers as well as to the coordinator, for retention by consumption."""

    def __init__(
        self, cluster: Cluster, consumer_group: str, streams: Mapping[int, StreamDescription], tasks: Tasks
    ) -> None:
        self._cluster = cluster
        self._consumer_group = consumer_group
        self._streams = streams
        self._tasks = tasks
        self._moved: dict[EntryId, Position] = {}
        self._sending = False

    def note(self, moved: Iterable[common_pb2.Cursor]) -> None:
        """Note cursors that have moved."""
        for cursor in moved:
            self._moved[EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry)] = position_of(cursor)

    def send_soon(self) -> None:
        """Send the moved cursors to the brokers, in the background."""
        if self._moved and not self._sending:
            self._sending = True
            self._tasks.start(self._send_in_background())

    async def _send_in_background(self) -> None:
        try:
            await self.send()
        finally:
            self._sending = False

    async def send(self) -> None:
        """Send the moved cursors to the brokers."""
        while self._moved:
            moved, self._moved = self._moved, {}
            for stream_id, stream in self._streams.items():
                positions = {entry: position for entry, position in moved.items() if entry.stream_id == stream_id}
                if not positions:
                    continue
                try:
                    await self._cluster.commit(self._consumer_group, stream.name, positions)
                except KeraError as error:  # the next move makes up for it
                    log.info("brokers do not know a cursor", consumer_group=self._consumer_group, error=error.message)


class Rounds:
    """The rounds of one member."""

    def __init__(
        self,
        cluster: Cluster,
        settings: GroupConsumerSettings,
        member_id: str,
        streams: Mapping[int, StreamDescription],
        *,
        leases: Leases,
        liveness: Liveness,
        tasks: Tasks,
        clock: Clock,
    ) -> None:
        """`tasks`: of the member; an error of one of them ends the member."""
        self._cluster = cluster
        self._settings = settings
        self._member_id = member_id
        self._streams = streams
        self._leases = leases
        self._liveness = liveness
        self._discovery = Discovery(cluster, streams, tasks, start=settings.start, on_found=self.speak_soon)
        self._broker_cursors = BrokerCursors(cluster, settings.consumer_group, streams, tasks)
        self._clock = clock
        self._speak = asyncio.Event()
        """Set when there is something to report to the coordinator."""
        self._answered = asyncio.Event()
        """Set, and replaced, with each answer of the coordinator."""
        self._commits: list[asyncio.Future[None]] = []
        """Calls that wait for a commit."""
        self._steps_left = False
        """Whether the last round could not take all reports."""
        self._reported_s = clock.boottime_s()
        self.bytes_delivered = 0
        """Bytes of all chunks that the caller has got."""

    def speak_soon(self) -> None:
        """Begin a round soon: there is something to report to the coordinator."""
        self._speak.set()

    def delivered(self, chunk_bytes: int) -> None:
        """Count a chunk that the caller has got."""
        self.bytes_delivered += chunk_bytes

    async def answer(self) -> None:
        """Begin a round soon, and wait until the coordinator has answered, or `fail` is called."""
        answered = self._answered
        self._speak.set()
        await answered.wait()

    async def commit(self) -> None:
        """Wait until all chunks that are processed now are committed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commits.append(waiter)
        self._speak.set()
        await waiter

    def fail(self, error: BaseException) -> None:
        """End all waits, as there will be no more answers: calls that wait for a commit raise `error`."""
        self._answered.set()
        _fail(self._commits, error)

    async def run(self) -> None:
        """Make rounds with the coordinator until one fails with an error that is not retriable, and raise it."""
        attempt = 0
        while True:
            self._speak.clear()
            commits, self._commits = self._commits, []
            request = self._request(committing=bool(commits))
            sent_s = self._clock.boottime_s()
            try:
                answer = await self._exchange(request)
                attempt = 0
                if answer is not None:
                    self._apply(request, answer, sent_s)
                    if self._steps_left:
                        self._commits += commits  # they end once everything is reported
                    else:
                        self._committed(commits)
            except BaseException as error:
                # After any error, calls must not wait for ever.
                _fail(commits, error if isinstance(error, Exception) else ClosedError("the consumer is closed"))
                if not isinstance(error, KeraError) or not error.retriable:
                    raise
                self._discovery.finds.add(Finds(list(request.starts), list(request.seen)))
                attempt += 1
                if attempt == 1:
                    log.warning(
                        "round failed; trying again", consumer_group=request.consumer_group, error=error.message
                    )
                await asyncio.sleep(backoff_s(self._cluster.settings, attempt))

    def _committed(self, commits: Iterable[asyncio.Future[None]]) -> None:
        if not commits:
            return
        try:
            self._leases.raise_lost(committing=True)
        except LeaseLost as error:
            _fail(commits, error)
        for waiter in commits:
            if not waiter.done():
                waiter.set_result(None)

    async def _say(self, method: Method[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """Ask the coordinator in this member's conversation: rounds may wait there, and must arrive in their order."""
        return await self._cluster.ask(method, request, conversation=self._member_id)

    async def _exchange(
        self, request: consumer_group_pb2.ConsumeRoundRequest
    ) -> consumer_group_pb2.ConsumeRoundResponse | None:
        """Make one round. Returns None if it waited at the coordinator, and there is something to report now."""
        asking = asyncio.ensure_future(self._say(api.CONSUME_ROUND, request))
        if not request.wait_ms:
            return await asking
        speaking = asyncio.ensure_future(self._speak.wait())
        try:
            await asyncio.wait((asking, speaking), return_when=asyncio.FIRST_COMPLETED)
            return await asking if asking.done() else None
        finally:
            for each in (asking, speaking):
                each.cancel()
                each.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _empty_request(self) -> consumer_group_pb2.ConsumeRoundRequest:
        """Return a request that describes the member, without reports."""
        return consumer_group_pb2.ConsumeRoundRequest(
            consumer_group=self._settings.consumer_group,
            member_id=self._member_id,
            client=self._cluster.runtime.process_name(),
            session_timeout_ms=self._settings.session_timeout_ms,
            progress_timeout_ms=self._settings.progress_timeout_ms,
            busy_ms=self._liveness.busy_ms,
            bytes_consumed=self.bytes_delivered,
            groups_max=self._settings.groups_max,
            stream_ids=self._streams,
            splits=True,
            in_order=self._settings.in_order,
        )

    def _request(self, *, committing: bool) -> consumer_group_pb2.ConsumeRoundRequest:
        finds = self._discovery.finds.take()
        request = self._empty_request()
        request.starts.extend(finds.starts)
        request.seen.extend(finds.seen)
        interval_s, now_s = self._settings.commit_interval_ms / 1000, self._clock.boottime_s()
        due = committing or self._steps_left or (interval_s > 0 and now_s >= self._reported_s + interval_s)
        self._steps_left = self._leases.report(request, due=due)
        if due:
            self._reported_s = now_s
        if not (request.steps or request.starts or request.seen or committing):
            waits_ms = [self._settings.heartbeat_interval_ms, round(self._cluster.request_timeout_s * 500)]
            if interval_s:
                waits_ms.append(self._settings.commit_interval_ms)
            request.wait_ms = max(1, min(waits_ms))
        return request

    def _apply(
        self,
        request: consumer_group_pb2.ConsumeRoundRequest,
        answer: consumer_group_pb2.ConsumeRoundResponse,
        sent_s: float,
    ) -> None:
        if request.in_order and not answer.in_order:
            raise InvalidArgument(
                "in_order: the coordinator is older than this setting, and would have several consumers read an"
                " entry at once; upgrade the coordinators, or read without it",
                setting="in_order",
            )
        self._leases.apply(request, answer)
        self._discovery.look(answer.look)
        self._broker_cursors.note(answer.moved)
        self._broker_cursors.send_soon()
        self._liveness.answered(sent_s)
        answered, self._answered = self._answered, asyncio.Event()
        answered.set()

    async def leave(self) -> None:
        """Report the progress of leases to the coordinator and the brokers, and leave the consumer group."""
        group = self._settings.consumer_group
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                *before, last = self._leases.last_steps()
                for steps in before:
                    request = self._empty_request()
                    request.steps.extend(steps)
                    self._broker_cursors.note((await self._say(api.CONSUME_ROUND, request)).moved)
                leaving = consumer_group_pb2.LeaveRequest(consumer_group=group, member_id=self._member_id, steps=last)
                self._broker_cursors.note((await self._say(api.LEAVE, leaving)).moved)
                await self._broker_cursors.send()
        except (KeraError, TimeoutError) as error:
            log.warning(
                "could not tell the coordinator that this consumer leaves", consumer_group=group, error=str(error)
            )
        finally:
            self._cluster.end_conversation(self._member_id)


def _fail(waiters: Iterable[asyncio.Future[None]], error: BaseException) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error)
