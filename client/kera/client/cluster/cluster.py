"""The SDK's view of the cluster: cached metadata, the coordinator, and brokers (``connections``, ``locality``).

The cache has the newest metadata from the coordinator. Callers that find it stale (`NotOwner`, `UnknownStream`, a lost
connection) call `forget`, and the next look-up asks again. Concurrent look-ups share one request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from kera.client import arguments
from kera.client.cluster.asking import ask_broker, broker_failed, of_broker, same_stream
from kera.client.cluster.at_work import AtWork
from kera.client.cluster.batches import CURSORS_MAX, batched
from kera.client.cluster.connections import Connections
from kera.client.cluster.intervals import check_part, cuts, merged_bounds
from kera.client.cluster.locality import Locality
from kera.client.cluster.retry import retrying
from kera.client.cluster.timing import Timing
from kera.client.settings import ClientSettings
from kera.client.tasks import Tasks
from kera.client.types import (
    BackupDescription,
    BrokerDescription,
    ClusterDescription,
    EntryBounds,
    StreamDescription,
    UnlistedStream,
    fill_cursor,
    position_of,
)
from kera.core.base.closing import close_all, is_being_cancelled
from kera.core.base.forks import Origin
from kera.core.base.ids import EntryId, Position
from kera.core.coordinators import Coordinators
from kera.core.credential_settings import secure
from kera.core.errors import InvalidArgument, KeraError, SchemaMismatch, Unavailable, Uncertain, UnknownStream
from kera.core.rpc import Channel, Method, api
from kera.core.rpc.method import RequestT, ResponseT
from kera.core.rpc.wire import error_from_message
from kera.core.runtime import MACHINE, Runtime
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

REPORT_REASON_CHARS_MAX = 500


class _Cursors(NamedTuple):
    """Positions of entries, in the form for each broker with data before them."""

    of_brokers: dict[int, dict[EntryId, Position]]
    homes: dict[EntryId, int]
    """The brokers that have the positions themselves."""

    @classmethod
    def of(cls, stream: StreamDescription, positions: Mapping[EntryId, Position]) -> _Cursors:
        """Raise `UnknownStream` for positions of an earlier stream of the same name."""
        found = cls({}, {})
        for entry, position in positions.items():
            same_stream(stream, entry.stream_id)
            for broker_id, cut in cuts(stream.assignments[entry.streamlet_id], position).items():
                found.of_brokers.setdefault(broker_id, {})[entry] = cut
                found.homes[entry] = broker_id  # the last of them
        return found

    def starts(
        self, answers: Sequence[Sequence[broker_pb2.CursorResult] | BaseException], *, all_brokers: bool
    ) -> dict[EntryId, Position]:
        """Return the starts of the entries, from the answers of `of_brokers`. Raises the first error that counts."""
        homes = set(self.homes.values())
        starts = {}
        for (broker_id, cursors), answer in zip(self.of_brokers.items(), answers, strict=True):
            if isinstance(answer, BaseException):
                if all_brokers or broker_id in homes or not isinstance(answer, KeraError):
                    raise answer
                continue
            for entry, result in zip(cursors, answer, strict=True):
                at_home = self.homes[entry] == broker_id
                if result.HasField("error") and (at_home or all_brokers):
                    raise of_broker(error_from_message(result.error))
                if at_home:
                    starts[entry] = position_of(result.start)
        return starts


class Cluster:
    """A view of the cluster that the producers, consumers and the admin of one `Client` share."""

    def __init__(
        self,
        bootstrap: str,
        settings: ClientSettings,
        *,
        timing: Timing | None = None,
        coordinators: Coordinators | None = None,
        runtime: Runtime = MACHINE,
    ) -> None:
        """`coordinators`: used instead of those at `bootstrap`."""
        arguments.text("bootstrap", bootstrap, "addresses of coordinators, host:port with commas between them")
        self.settings = settings
        self.timing = timing or Timing()
        self.runtime = runtime = secure(runtime, settings)
        here = runtime.node_id()
        self.locality = Locality(here, settings, self.timing, runtime.introduction)
        """Brokers whose memory can be read in place."""
        self._connections = Connections(
            here,
            settings,
            report_again_s=self.timing.report_again_s,
            report=self._report_broker,
            open_channel=runtime.channel,
            tls=runtime.tls,
            introduction=runtime.introduction,
        )
        self._coordinators = coordinators or Coordinators(
            bootstrap, bulk_bytes_max=settings.message_bytes_max, channel=runtime.channel
        )
        self._streams: dict[str, StreamDescription] = {}
        """Descriptions that are not known to be stale."""
        self._newest: dict[str, StreamDescription] = {}
        """The newest description seen of each stream, stale or not."""
        self._looking: dict[str, asyncio.Task[StreamDescription]] = {}
        """Look-ups in progress, which all concurrent callers share."""
        self._forgotten: set[str] = set()
        """Streams that were found stale since the request for their look-up."""
        self._tasks = Tasks()
        self._origin = Origin()
        self.session_ids = count(1)
        """Ids for read sessions, which share connections."""
        self.at_work = AtWork(runtime.clock)
        """The data that consumers have taken, and the records that producers make from them."""

    @property
    def is_inherited(self) -> bool:
        """Whether this is a child process that has inherited the connections from its parent."""
        return not self._origin.is_here

    @property
    def request_timeout_s(self) -> float:
        """Maximum time to wait for one answer."""
        return self.settings.request_timeout_ms / 1000

    @property
    def coordinator_addresses(self) -> list[str]:
        """The given addresses of coordinators, host:port each."""
        return self._coordinators.addresses

    async def ask(self, method: Method[RequestT, ResponseT], message: RequestT, *, conversation: str = "") -> ResponseT:
        """Call the leading coordinator, with retries. `conversation`: see `Coordinators.ask`."""
        self._origin.check()

        async def attempt() -> ResponseT:
            timeout_s = self.request_timeout_s
            return await self._coordinators.ask(method, message, timeout_s=timeout_s, conversation=conversation)

        return await retrying(attempt, self.settings)

    def end_conversation(self, conversation: str) -> None:
        """See `Coordinators.end_conversation`."""
        self._coordinators.end_conversation(conversation)

    async def all_streams(self) -> list[common_pb2.StreamInfo]:
        """Return all streams, by name; makes as many requests as necessary."""
        found: list[common_pb2.StreamInfo] = []
        more = True
        while more:
            after = found[-1].name if found else ""
            answer = await self.ask(api.LIST_STREAMS, coordinator_pb2.ListStreamsRequest(after=after))
            found += answer.streams
            more = answer.more and bool(answer.streams)
        return found

    async def stream(self, name: str) -> StreamDescription:
        """Return the stream called `name`, from the cache if possible. Raises `UnknownStream`, `InvalidArgument`."""
        arguments.text("stream", name, "the name of a stream")
        known = self._streams.get(name)
        if known is not None:
            return known
        while True:
            looking = self._looking.get(name)
            if looking is None:
                looking = self._looking[name] = self._tasks.start(self._look_up(name))
            try:
                return await asyncio.shield(looking)  # other callers may wait for it, too
            except asyncio.CancelledError:
                if is_being_cancelled():
                    raise
                if self._looking.get(name) is looking:
                    del self._looking[name]  # the look-up was cancelled before it had begun
                # `asyncio.run` has cancelled the look-up at its end; closing a producer after that begins a new one.

    async def _look_up(self, name: str) -> StreamDescription:
        try:
            try:
                answer = await self._ask_where(name)
            except UnknownStream:
                if name not in self._forgotten:
                    raise
                answer = await self._ask_where(name)  # the stream may have been created since
            else:
                if name in self._forgotten:  # the answer became stale before it arrived
                    answer = await self._ask_where(name)
        except UnknownStream:
            self._newest.pop(name, None)
            raise
        finally:
            self._looking.pop(name, None)
        found = StreamDescription.from_message(
            answer.stream, answer.brokers, message_bytes_max=self.settings.message_bytes_max
        )
        newest = self._newest.get(name)
        if newest is not None and found.is_older_than(newest):
            found = newest  # the answer came from a coordinator that was being replaced
        self._newest[name] = found
        if name not in self._forgotten:
            self._streams[name] = found
        return found

    async def _ask_where(self, name: str) -> coordinator_pb2.DescribeStreamResponse:
        self._forgotten.discard(name)
        return await self.ask(api.DESCRIBE_STREAM, coordinator_pb2.DescribeStreamRequest(name=name))

    async def stream_or_last_seen(self, name: str) -> StreamDescription:
        """Return the stream called `name`; if the coordinator does not answer soon, the last known description.

        For callers that can go on with stale metadata: brokers correct it. Raises `UnknownStream`, and `Unavailable`
        for a stream that was never seen.
        """
        try:
            async with asyncio.timeout(self.timing.metadata_wait_s):
                return await self.stream(name)
        except (TimeoutError, Unavailable, Uncertain):
            newest = self._newest.get(name)
            if newest is None:
                raise Unavailable(f"the coordinator does not say where stream {name!r} is", stream=name) from None
            return newest

    async def with_schema(self, stream: StreamDescription, schema_id: int) -> StreamDescription:
        """Look `stream` up again, for a version of its schema that is not known: columns have been added to it.

        Raises `UnknownStream` when it no longer exists, and `SchemaMismatch` when it has no such version.
        """
        self.forget(stream.name)
        now = same_stream(await self.stream(stream.name), stream.stream_id)
        if now.schema_of(schema_id) is None:
            raise SchemaMismatch(
                f"chunk has schema {schema_id}, which stream {stream.name!r} does not have",
                stream=stream.name,
                schema_id=schema_id,
            )
        return now

    def forget(self, name: str) -> None:
        """Ask the coordinator again about a stream, next time. Raises `InvalidArgument` if `name` is not text."""
        arguments.text("stream", name, "the name of a stream")
        self._streams.pop(name, None)
        if name in self._looking:
            self._forgotten.add(name)

    async def describe(self) -> ClusterDescription:
        """Return the brokers and backups of the cluster."""
        answer = await self.ask(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest())
        return ClusterDescription(
            answer.cluster_id,
            [BrokerDescription.from_message(info) for info in answer.brokers],
            [BackupDescription.from_message(info) for info in answer.backups],
            tuple(answer.coordinators),
            tuple(map(UnlistedStream.from_message, answer.unknown_streams)),
            answer.catching_up,
            answer.feature_level,
            answer.security,
        )

    async def bounds(self, name: str, *, promise: bool = False) -> dict[int, list[EntryBounds]]:
        """Ask brokers for the starts and ends of all entries, by streamlet. `promise`: see `Client.bounds`.

        First asks the coordinator for the brokers: the former broker of a moved streamlet would not know its end.
        """

        async def attempt() -> dict[int, list[EntryBounds]]:
            self.forget(name)
            stream = await self.stream(name)
            streamlets: dict[int, list[int]] = {}
            for streamlet_id, assignment in stream.assignments.items():
                for broker_id in assignment.broker_ids:
                    streamlets.setdefault(broker_id, []).append(streamlet_id)
            answers = await asyncio.gather(
                *(self._describe_streamlets(stream, *of_broker, promise=promise) for of_broker in streamlets.items())
            )
            of_brokers = dict(zip(streamlets, answers, strict=True))
            return {
                streamlet_id: [
                    merged_bounds(assignment, entry, {broker: rows[entry] for broker, rows in parts.items()})
                    for entry in range(stream.config.entries)
                ]
                for streamlet_id, assignment in sorted(stream.assignments.items())
                for parts in [{broker: of_brokers[broker][streamlet_id] for broker in assignment.broker_ids}]
            }

        return await retrying(attempt, self.settings)

    async def _describe_streamlets(
        self, stream: StreamDescription, broker_id: int, streamlet_ids: Sequence[int], *, promise: bool
    ) -> dict[int, list[EntryBounds]]:
        found = {}
        for some in batched(streamlet_ids, max(1, CURSORS_MAX // stream.config.entries)):
            request = broker_pb2.DescribeStreamletsRequest(
                stream_id=stream.stream_id, streamlet_ids=some, promise=promise
            )
            answer = await ask_broker(self, stream, broker_id, api.DESCRIBE_STREAMLETS, request)
            for info in answer.streamlets:
                check_part(stream.assignments[info.streamlet_id], broker_id, info)
                found[info.streamlet_id] = [EntryBounds.from_message(entry) for entry in info.entries]
        return found

    async def truncate(self, name: str, positions: Mapping[EntryId, Position]) -> dict[EntryId, Position]:
        """Remove records before `positions`. Returns where the entries start now. See `Admin.truncate_stream`."""
        return await self._with_cursors(name, positions, api.TRUNCATE_STREAMLETS, broker_pb2.TruncateStreamletsRequest)

    async def commit(self, consumer_group: str, name: str, positions: Mapping[EntryId, Position]) -> None:
        """Tell brokers how far a consumer group has read. See `Admin.commit_cursors`.

        Brokers that only have data before a position get the commit, too, so that they can remove these data; if that
        fails, they keep them until the next commit.
        """
        arguments.text("consumer_group", consumer_group, "the name of a consumer group")
        if not consumer_group:
            raise InvalidArgument("a commit is a consumer group's; name it with consumer_group")
        new_request = partial(broker_pb2.CommitCursorsRequest, consumer_group=consumer_group)
        await self._with_cursors(name, positions, api.COMMIT_CURSORS, new_request, all_brokers=False)

    async def _with_cursors(
        self,
        name: str,
        positions: Mapping[EntryId, Position],
        method: Method[Any, Any],
        new_request: Callable[[], broker_pb2.TruncateStreamletsRequest | broker_pb2.CommitCursorsRequest],
        *,
        all_brokers: bool = True,
    ) -> dict[EntryId, Position]:
        """Send each broker the cursors that concern it. Returns the starts of entries, by the brokers of `positions`.

        Waits for all brokers before it raises the first error. After a retriable error it asks all again, because
        repeating does no harm. Unless `all_brokers`, only the brokers of the positions themselves must succeed.
        """

        async def attempt() -> dict[EntryId, Position]:
            stream = await self.stream(name)

            async def send(broker_id: int) -> Sequence[broker_pb2.CursorResult]:
                found: list[broker_pb2.CursorResult] = []
                for some in batched(cursors.of_brokers[broker_id].items(), CURSORS_MAX):
                    request = new_request()
                    for entry, position in some:
                        fill_cursor(request.cursors.add(), entry, position)
                    found += (await ask_broker(self, stream, broker_id, method, request)).results
                return found

            try:
                cursors = _Cursors.of(stream, positions)
                answers = await asyncio.gather(*map(send, cursors.of_brokers), return_exceptions=True)
                return cursors.starts(answers, all_brokers=all_brokers)
            except UnknownStream:
                self.forget(name)
                raise
            except KeraError as error:
                broker_failed(self, name, error)
                raise

        return await retrying(attempt, self.settings)

    async def channel(self, stream: StreamDescription, broker_id: int) -> Channel:
        """Return a live connection to a broker that `stream` names. Raises `Unavailable`."""
        return await self._connections.channel(stream, broker_id)

    def _report_broker(self, broker: BrokerDescription, error: Unavailable) -> None:
        """Tell the coordinator that a broker cannot be reached."""
        report = coordinator_pb2.ReportBrokerRequest(
            broker_id=broker.broker_id,
            broker_epoch=broker.broker_epoch,
            reason=error.message[:REPORT_REASON_CHARS_MAX],
        )
        self._tasks.start(self._send_report(report))

    async def _send_report(self, report: coordinator_pb2.ReportBrokerRequest) -> None:
        with contextlib.suppress(KeraError, TimeoutError):  # the coordinator also notices missing heartbeats
            async with asyncio.timeout(self.timing.report_timeout_s):
                await self.ask(api.REPORT_BROKER, report)

    async def close(self) -> None:
        """Close all connections, also if the caller is cancelled. No new ones can be made."""
        await close_all((self._tasks.end, self._connections.close, self.locality.close, self._coordinators.close))
