"""Requests to one broker: gathers queued chunks of all lanes, keeps several requests in flight, retries.

Lanes and bundles are served in turn. A bundle goes as a whole. It is taken apart, into its lanes, when there is no
connection, when a request has failed, or when a chunk was refused.

A sender works in rounds (`Sender._round`). A round begins when a lane or bundle is queued, when an open chunk may be
due, and when a request is answered. It sends queued chunks; while there is room for more requests, it has due open
chunks closed. Plug-ins decide how long chunks may fill and how large requests are, and measure both (`hooks`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kera.client.cluster.asking import broker_failed
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.retry import pause_s
from kera.client.producing.lanes.bundle import Bundle
from kera.client.producing.lanes.lane import Failure, Lane, PendingChunk
from kera.client.producing.outcomes.deliveries import Stored, StoredBundle
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.sending.fill_time import CloseDueChunks
from kera.client.producing.sending.hooks import FixedBounds, Listeners, Plugged, SenderPort
from kera.client.producing.sending.request import Request
from kera.client.settings import ProducerSettings
from kera.client.stream_config import durability_value
from kera.core.base.alarm import Alarm
from kera.core.base.forks import Origin
from kera.core.base.telemetry import get_logger
from kera.core.errors import InternalError, KeraError, NotOwner, ProducerFenced, Unavailable, Uncertain, invariant
from kera.core.rpc import Channel, Reply, api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2

log = get_logger("kera.producer")

REQUEST_TIMEOUT_S_MIN = 0.05
"""Timeout of the last attempt for a chunk whose time is almost up."""


class LaneOwner(Protocol):
    """The owner of lanes, as a sender sees it: `kera.client.producing.sending.routes`, and behind it the producer."""

    @property
    def close_due_chunks(self) -> CloseDueChunks:
        """See `CloseDueChunks`."""
        ...

    @property
    def fail(self) -> Callable[[KeraError], None]:
        """The function that fails the producer as a whole."""
        ...

    @property
    def unsettled(self) -> set[Lane]:
        """Lanes whose deliveries are all passed to `delivered`; other lanes' only while they have more to send."""
        ...

    async def connect(self, sender: Sender) -> Channel | None:
        """Return a connection to a sender's broker; None if no lane needs it any more."""
        ...

    def ready(self, lane: Lane) -> None:
        """Serve a lane, which may have chunks to send."""
        ...

    def delivered(self, lane: Lane) -> None:
        """Note that a chunk of a lane is delivered."""
        ...

    def lost(self, lane: Lane, error: KeraError) -> None:
        """Note that the broker does not own the lane's streamlet."""
        ...


class Sender:
    """Requests to one broker."""

    def __init__(
        self,
        broker_id: int,
        owner: LaneOwner,
        cluster: Cluster,
        settings: ProducerSettings,
        buffer: Buffer,
        request_chunks_max: int,
        loop: asyncio.AbstractEventLoop,
        plug: Callable[[SenderPort], Plugged],
    ) -> None:
        """`plug`: makes the plug-ins."""
        self.broker_id = broker_id
        self.lanes: set[Lane] = set()
        """All lanes that it serves, see `kera.client.producing.sending.routes`."""
        self._queue: deque[Lane | Bundle] = deque()
        """Bundles, and lanes that may have chunks to send, each at most once; served in turn."""
        self.queued: set[Lane] = set()
        """The lanes in the queue: a new bundle is queued behind them."""
        self._owner = owner
        self._cluster = cluster
        self._buffer = buffer
        self._loop = loop
        self._origin = Origin()
        self._name = settings.name
        self._durability = durability_value(settings.durability)
        self._request_chunks_max = request_chunks_max
        self._alarm = Alarm(loop, self._round)  # goes off when an open chunk is due: one for all lanes
        self._requests = 0
        """Number of requests in flight."""
        self._round_soon = False
        self._retry_at_s = 0.0
        self._attempt = 0
        self._channel: Channel | None = None
        self._connecting: asyncio.Task[None] | None = None
        bounds = FixedBounds(
            int(min(settings.request_bytes_max, cluster.settings.message_bytes_max)), settings.requests_in_flight_max
        )
        port = SenderPort(broker_id, bounds, self._stream_ids, lambda: self._channel, self._alarm.set)
        self.fill_time, self._bounds, hooks = plug(port)
        self._listeners = Listeners(hooks)

    def lane_ready(self, lane: Lane) -> None:
        """Queue a lane, which may have chunks to send."""
        if lane not in self.queued:
            self.queued.add(lane)
            self._queue.append(lane)
        self._begin_soon()

    def send_bundle(self, bundle: Bundle) -> None:
        """Queue a bundle; none of its lanes is queued."""
        self._queue.append(bundle)
        self._begin_soon()

    def _begin_soon(self) -> None:
        if not self._round_soon:
            self._round_soon = True
            self._loop.call_soon(self._round)

    def take_bundles_apart(self) -> None:
        """Take the queued bundles apart: their chunks now wait in their lanes, before later chunks."""
        bundles = [each for each in self._queue if isinstance(each, Bundle)]
        if not bundles:
            return
        self._queue = deque(each for each in self._queue if isinstance(each, Lane))
        for bundle in reversed(bundles):
            for chunk in reversed(self._buffer.take_apart(bundle)):
                for failure in chunk.lane.put_back(chunk):
                    self._buffer.finish(*failure)
        for lane in dict.fromkeys(lane for bundle in bundles for lane in bundle.lanes):
            self._owner.ready(lane)

    def remove(self, lane: Lane) -> None:
        """Remove a lane from the queue, until it is ready again."""
        if lane in self.queued:
            self.queued.discard(lane)
            self._queue.remove(lane)

    def chunk_opened(self, lane: Lane) -> None:
        """Note that a chunk of a lane was opened: it is due after a time, or when nothing is in flight."""
        now_s = self._loop.time()
        wait_s = self.fill_time.wait_s(lane.identity.stream_id, now_s)
        if wait_s:
            self._alarm.set(now_s + wait_s + self.fill_time.grace_s)
            for call in self._listeners.on_chunk_opened:
                call()
        elif not self._requests:
            self._begin_soon()

    def stop(self) -> None:
        """Stop connecting. `_round` notices on its own that the producer has ended."""
        self._alarm.stop()
        if self._connecting is not None and self._connecting is not asyncio.current_task():
            self._connecting.cancel()

    def _round(self) -> None:
        """Send as many requests as may be in flight."""
        self._round_soon = True  # chunks closed and queued here need no further round
        for call in self._listeners.on_round:
            call()
        try:
            self._send_all()
        finally:
            self._round_soon = False
        for call in self._listeners.on_round_end:
            call()

    def _send_all(self) -> None:
        if self._buffer.ended or not self._origin.is_here:  # in a forked process: the parent sends accepted records
            return
        if self._retry_at_s and self._loop.time() < self._retry_at_s:
            return  # the retry's timer begins a round
        while self._requests < self._bounds.in_flight_max:
            if self._channel is None or self._channel.closed:
                self.take_bundles_apart()
                if self._close_due_chunks(idle=True) or self._queue:
                    self._connect()
                return
            bundles, chunks = self._gather(self._bounds.bytes_max)
            if bundles or chunks:
                self._send(self._channel, bundles, chunks)
            elif self._requests and not self.fill_time.holds:
                return  # an unfilled chunk goes on filling until an answer comes: so chunks grow with the load
            elif not self._close_due_chunks(idle=not self._requests):
                return

    def _close_due_chunks(self, *, idle: bool) -> bool:
        """Queue the open chunks that are due, and set the alarm for the next one. Returns whether any were due."""
        due = self._owner.close_due_chunks(self.lanes, self.fill_time, idle=idle)
        now_s = self._loop.time()
        for call in self._listeners.on_looked:
            call(due, now_s)
        if due.next_s is not None:
            self._alarm.set(due.next_s)
            invariant(self._alarm.at_s <= due.next_s, "no open chunk is left beyond its deadline")
        return due.closed

    def _gather(self, bytes_max: int) -> tuple[list[Bundle], list[PendingChunk]]:
        """Take queued chunks for one request: lanes in turn, each lane's chunks in order; bundles before all of them.

        A lane that is queued before a bundle never has a chunk in that bundle.
        """
        bundles: list[Bundle] = []
        chunks: list[PendingChunk] = []
        size = count = 0
        while self._queue:
            each = self._queue[0]
            if isinstance(each, Bundle):
                size, count = size + len(each.bulk), count + each.chunk_count
                if (bundles or chunks) and (size > bytes_max or count > self._request_chunks_max):
                    return bundles, chunks
                bundles.append(each)
                each.taken()
                self._queue.popleft()
                continue
            while (chunk := each.next) is not None:
                size, count = size + chunk.chunk_bytes, count + 1
                if count > 1 and (size > bytes_max or count > self._request_chunks_max):
                    self._queue.rotate(-1)  # the next request begins with another lane
                    return bundles, chunks
                chunks.append(each.take())
            self._queue.popleft()
            self.queued.discard(each)
        return bundles, chunks

    def _send(self, channel: Channel, bundles: list[Bundle], chunks: list[PendingChunk]) -> None:
        self._requests += 1
        now_s = self._loop.time()
        request = Request(bundles, chunks, self._durability, now_s)
        for call in self._listeners.on_request:
            call(request)
        # Not beyond the deadline of a chunk: the chunk is given up then, answered or not.
        timeout_s = min(self._cluster.request_timeout_s, max(request.deadline_s - now_s, REQUEST_TIMEOUT_S_MIN))
        try:
            future = channel.submit(api.MULTI_WRITE_CHUNKS, request.message, request.bulk(), timeout_s=timeout_s)
        except KeraError as error:
            self._requests -= 1
            self._failed(request, error)
            return
        future.when_done(lambda done: self._answered(request, done))

    def _stream_ids(self) -> set[int]:
        return {lane.identity.stream_id for lane in self.lanes}

    def _answered(self, request: Request, done: asyncio.Future[Reply[broker_pb2.MultiWriteChunksResponse]]) -> None:
        self._requests -= 1
        error = done.exception() if not done.cancelled() else Uncertain("request was cancelled")
        if error is not None:
            self._failed(request, error)
            return
        message, now_s = done.result().message, self._loop.time()
        for call in self._listeners.on_answer:
            call(request, message, now_s)
        bundles, chunks = request.bundles, request.chunks
        statuses: Sequence[broker_pb2.ChunkStatus] = message.statuses
        if len(statuses) != request.chunk_count:
            text = f"broker {self.broker_id} answered {len(statuses)} chunks of {request.chunk_count}"
            self._refused(request, InternalError(text, broker_id=self.broker_id))
            return
        places = {place.virtual_segment_id: tuple(place.backup_ids) for place in message.virtual_segments}
        if bundles:
            chunks, statuses = self._bundles_stored(bundles, chunks, statuses, places, all_stored=message.all_stored)
        failed = self._stored(chunks, statuses, places)
        if failed:
            self._came_back(failed)
        else:
            self._attempt = 0
        self._round()

    def _bundles_stored(
        self,
        bundles: list[Bundle],
        chunks: list[PendingChunk],
        statuses: Sequence[broker_pb2.ChunkStatus],
        places: Mapping[int, tuple[int, ...]],
        *,
        all_stored: bool,
    ) -> tuple[list[PendingChunk], list[broker_pb2.ChunkStatus]]:
        """Deliver bundles that are stored. Returns the chunks still to be handled, with their statuses.

        These are the chunks of bundles with failures, and `chunks`, which came behind the bundles in the request.
        `all_stored`: the broker says that no chunk has failed, which saves a look at each status.
        """
        apart: list[PendingChunk] = []
        left: list[broker_pb2.ChunkStatus] = []
        start = 0
        for bundle in bundles:
            end = start + bundle.chunk_count
            first, start = start, end
            if not all_stored and any(status.HasField("error") for status in statuses[first:end]):
                apart += self._buffer.take_apart(bundle)
                left += statuses[first:end]
                continue
            identity = bundle.identity
            self._buffer.deliver_bundle(
                bundle,
                StoredBundle(
                    identity.stream,
                    identity.stream_id,
                    bundle.streamlets,
                    bundle.record_counts,
                    statuses,
                    first,
                    places,
                ),
            )
            for lane in map(bundle.lane, bundle.columns.stored(bundle.streamlets)):
                for failure in lane.line_up():
                    self._buffer.finish(*failure)
                if lane.waiting:
                    self._owner.delivered(lane)
            if self._owner.unsettled:
                for lane in self._owner.unsettled.intersection(bundle.lanes):
                    self._owner.delivered(lane)
        return apart + chunks, left + list(statuses[start:])

    def _stored(
        self,
        chunks: list[PendingChunk],
        statuses: Iterable[broker_pb2.ChunkStatus],
        places: Mapping[int, tuple[int, ...]],
    ) -> list[tuple[PendingChunk, KeraError]]:
        """Deliver answered chunks that are stored. Returns the other chunks with their errors."""
        failed: list[tuple[PendingChunk, KeraError]] = []
        stored: list[Stored] = []
        given_up: list[Failure] = []
        lanes: list[Lane] = []
        unsettled = self._owner.unsettled
        for chunk, status in zip(chunks, statuses, strict=True):
            if status.HasField("error"):
                failed.append((chunk, error_from_message(status.error)))
                continue
            lane = chunk.lane
            identity = lane.identity
            given_up += lane.acknowledged(chunk)
            if lane.waiting or lane in unsettled:
                lanes.append(lane)
            backups = places.get(status.virtual_segment_id, ()) if places else ()
            count = chunk.payload.record_count
            stored.append(Stored(identity.stream, identity.stream_id, identity.streamlet_id, count, status, backups))
        if failed:
            refused = {chunk for chunk, _ in failed}
            chunks = [chunk for chunk in chunks if chunk not in refused]
        self._buffer.deliver(chunks, stored)
        for failure in given_up:
            self._buffer.finish(*failure)
        for lane in lanes:
            self._owner.delivered(lane)
        return failed

    def _failed(self, request: Request, error: BaseException) -> None:
        """Handle a request that was not sent, or not answered."""
        for call in self._listeners.on_failure:
            call(request, error)
        known = error if isinstance(error, KeraError) else InternalError(f"{type(error).__name__}: {error}")
        self._refused(request, known)

    def _refused(self, request: Request, error: KeraError) -> None:
        apart = [chunk for bundle in request.bundles for chunk in self._buffer.take_apart(bundle)]
        self._came_back([(chunk, error) for chunk in [*apart, *request.chunks]])
        self._round()

    def _came_back(self, failed: list[tuple[PendingChunk, KeraError]]) -> None:
        now_s = self._loop.time()
        retried: KeraError | None = None
        lost: dict[Lane, KeraError] = {}
        fenced: ProducerFenced | None = None
        for chunk, failure in failed:
            error = broker_failed(self._cluster, chunk.lane.identity.stream, failure)
            if isinstance(error, ProducerFenced):
                error = fenced = fenced or _shut_out(error, self._name)
            again = self._returned(chunk, error, now_s)
            if isinstance(error, NotOwner):
                lost[chunk.lane] = failure
            elif again:
                retried = retried or error
        if fenced is not None:
            self._owner.fail(fenced)
        for lane, error in lost.items():
            if not lane.idle:
                self._owner.lost(lane, error)
        for lane in dict.fromkeys(chunk.lane for chunk, _ in failed):
            self._owner.ready(lane)
        if retried is not None:
            self._pause(retried, now_s)

    def _returned(self, chunk: PendingChunk, error: KeraError, now_s: float) -> bool:
        """Give a chunk that is not acknowledged back to its lane. Returns whether it will be sent again."""
        given_up = chunk.lane.refused(chunk, error, now_s)
        for failure in given_up:
            self._buffer.finish(*failure)
        if isinstance(error, Unavailable) or type(error) is Uncertain:
            self._channel = None  # a gRPC channel never closes on its own, and the silent broker may be replaced
        return all(failure.chunk is not chunk for failure in given_up)

    def _pause(self, error: KeraError, now_s: float) -> None:
        """Send nothing for a pause that grows with each failure."""
        self._attempt += 1
        pause = pause_s(self._cluster.settings, error, self._attempt)
        deadline_s = _earliest_deadline_s(self._queue)
        if deadline_s is not None:
            pause = min(pause, max(0.0, deadline_s - now_s))  # then there is one attempt left
        self._retry_at_s = now_s + pause
        self._loop.call_later(pause + 0.001, self._round)
        if self._attempt == 1:
            log.warning("broker refused chunks; retrying", broker_id=self.broker_id, error=error.message)

    def _connect(self) -> None:
        if self._connecting is None or self._connecting.done():
            self._connecting = self._loop.create_task(self._connected())
            # `asyncio.run` cancels all tasks before producers are closed: connect again then, unless this has ended.
            self._connecting.add_done_callback(lambda ended: self._round() if ended.cancelled() else None)

    async def _connected(self) -> None:
        """Find the broker and connect to it; while that fails, queued chunks grow older, up to their deadline."""
        error: KeraError
        try:
            async with asyncio.timeout_at(_earliest_deadline_s(self._queue)):
                self._channel = await self._owner.connect(self)
            if self._channel is not None and self._channel.closed:  # it was closed at once
                raise Unavailable(f"broker {self.broker_id} closed the connection", broker_id=self.broker_id)
        except KeraError as failure:
            error = failure
        except TimeoutError:
            error = Unavailable(f"broker {self.broker_id} cannot be reached", broker_id=self.broker_id)
        except Exception as failure:  # noqa: BLE001 - else the chunks would wait for ever
            error = InternalError(f"{type(failure).__name__}: {failure}")
        else:
            for call in self._listeners.on_connected:
                call(self._loop.time())
            self._loop.call_soon(self._round)  # once this task has ended, because the round may have to connect again
            return
        # Open chunks have no deadline yet: close them now, so that their records share the retries and deadlines.
        self._close_due_chunks(idle=True)
        self.take_bundles_apart()
        lanes = [each for each in self._queue if isinstance(each, Lane)]
        self._came_back([(lane.take(), error) for lane in lanes for _ in range(lane.ready_count)])


def _shut_out(error: ProducerFenced, name: str) -> ProducerFenced:
    """Return the error for a refusal that shuts this producer out: another writer has its id or name."""
    if "sequence" in error.attributes:
        return ProducerFenced(f"{error.message}; this producer takes no more records", **error.attributes)
    whose = f"a newer producer with the name {name!r}" if name else "a newer instance of this producer"
    return ProducerFenced(f"{whose} has taken over ({error.message}); this one takes no more", **error.attributes)


def _earliest_deadline_s(queue: Iterable[Lane | Bundle]) -> float | None:
    bundles = [each.deadline_s for each in queue if isinstance(each, Bundle)]
    lanes = [each.waiting[0].deadline_s for each in queue if isinstance(each, Lane) and each.waiting]
    return min(bundles + lanes, default=None)
