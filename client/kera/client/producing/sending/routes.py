"""Assigns each lane to the sender of the broker that owns its streamlet, also when the streamlet moves.

    sender of the owner ──NotOwner──► search: a pause, then ask the coordinator ──► sender of the new owner
            ▲                                                                              │ (or the same one)
            └──────────────────────────────────────────────────────────────────────────────┘

Invariants:

* a lane changes its sender only while none of its chunks is in flight. So chunks reach the new owner in the order of
  their sequences, and only once the outcomes of earlier chunks at the old owner are known;
* a lane sends nothing during the search for its owner; the other lanes of its sender go on;
* a sender without lanes ends.

An unreachable broker is handled similarly: its sender asks the coordinator before each attempt to connect, and lanes
whose streamlets have moved leave the sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kera.client.cluster.asking import same_stream
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.retry import route_pause_s
from kera.client.producing.encoding.partition_payloads import Payloads
from kera.client.producing.encoding.payloads import Payload
from kera.client.producing.lanes.bundle import Bundle
from kera.client.producing.lanes.lane import Lane, PendingChunk
from kera.client.producing.lanes.lane_columns import NOBODY
from kera.client.producing.lanes.stream_lanes import StreamLanes
from kera.client.producing.outcomes.outcome import BundleOutcome, Outcome
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.sending.fill_time import CloseDueChunks
from kera.client.producing.sending.hooks import Plugins, without_plugins
from kera.client.producing.sending.sender import Sender
from kera.client.settings import ProducerSettings
from kera.client.tasks import Tasks
from kera.core.base.ids import PRODUCER_EPOCHS
from kera.core.base.telemetry import get_logger
from kera.core.errors import ClosedError, KeraError, Unavailable, UnknownStream
from kera.core.rpc import Channel
from kera.core.rpc.limits import REQUEST_CHUNKS_MAX

log = get_logger("kera.producer")


class ProducerLimits(NamedTuple):
    """Bounds of a producer that are not settings: constants of the protocol, which tests make smaller."""

    epochs: int = PRODUCER_EPOCHS
    """Producer epochs of one instance of a named producer."""
    request_chunks_max: int = REQUEST_CHUNKS_MAX


LIMITS = ProducerLimits()


@dataclass(slots=True, eq=False)
class _Route:
    """The route of a lane's chunks."""

    lanes: StreamLanes
    """The lanes of the same stream."""
    sender: Sender | None = None
    attempt: int = 0
    """Number of times in a row that its broker was not the owner."""
    looking: bool = False
    """Whether a search for the owner is under way."""


class Routes:
    """Assigns each lane to the sender of its streamlet's owner, and moves it only while no chunk is in flight.

    Belongs to one `Producer`.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ProducerSettings,
        buffer: Buffer,
        *,
        close_due_chunks: CloseDueChunks,
        fail: Callable[[KeraError], None],
        limits: ProducerLimits,
        plugins: Plugins | None = None,
    ) -> None:
        """`close_due_chunks`: see `fill_time.CloseDueChunks`. `fail`: fails the producer as a whole.

        `plugins`: for the senders; None: nothing is plugged in.
        """
        self.close_due_chunks = close_due_chunks
        self.fail = fail
        self._cluster = cluster
        self._settings = settings
        self._buffer = buffer
        self._limits = limits
        self._plugins = without_plugins(settings) if plugins is None else plugins
        self._delivery_timeout_s = settings.delivery_timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._routes: dict[Lane, _Route] = {}
        """Routes of the lanes that a sender serves."""
        self.unsettled: set[Lane] = set()
        """Lanes whose broker was not the owner at the last request, and abandoned lanes with chunks in flight."""
        self.deleted: set[str] = set()
        """Names of deleted streams that the producer has not looked up again."""
        self._senders: dict[int, Sender] = {}
        self._first_wait_s = (settings.linger_ms or 0.0) / 1000
        """Time for which a chunk of a lane without a sender may fill."""
        self._searches = Tasks()
        self._stopped = False

    @property
    def broker_ids(self) -> list[int]:
        """The brokers that have a sender."""
        return sorted(self._senders)

    @property
    def searches(self) -> int:
        """The number of searches for owners under way."""
        return len(self._searches)

    # -- used by the code that fills the lanes -----------------------------------------------------------------

    def wait_s(self, lane: Lane) -> float:
        """Return how long a chunk of a lane, opened now, may fill; 0: until nothing is in flight."""
        route = self._routes.get(lane)
        if route is None or route.sender is None:
            return self._first_wait_s
        return route.sender.fill_time.wait_s(lane.identity.stream_id, self._loop.time())

    def chunk_opened(self, lanes: StreamLanes, lane: Lane) -> None:
        """Note that a chunk of `lane`, one of `lanes`, was opened."""
        self._sender(lane, self._route(lanes, lane)).chunk_opened(lane)

    def enqueue(
        self,
        lanes: StreamLanes,
        streamlet: int,
        payload: Payload,
        created_us: int,
        outcome: Outcome,
        accepted_s: float,
        closed_s: float,
    ) -> None:
        """Queue a chunk as the last one of its streamlet, which is one of `lanes`.

        `created_us`: by the producer's clock; `accepted_s`: when its oldest record was accepted; `closed_s`: when the
        decision to close it was made.
        """
        lane, broker_id = lanes.lanes[streamlet], lanes.stream.assignments[streamlet].broker_id
        broker_us = self._plugins.created_us(broker_id, lanes.stream, accepted_s)
        made_us = created_us if broker_us is None else broker_us
        chunk = PendingChunk(lane, payload, made_us, accepted_s + self._delivery_timeout_s, outcome, closed_s)
        lane.add(chunk)
        self._buffer.add(chunk)
        route = self._routes.get(lane)
        if route and route.sender and lanes.columns.is_settled(streamlet) and not lane.exhausted:
            route.sender.lane_ready(lane)  # the route is still valid
        else:
            self._serve(lane, self._route(lanes, lane))

    def add_bundles(
        self, lanes: StreamLanes, payloads: Payloads, created_us: int, accepted_s: float
    ) -> tuple[list[BundleOutcome], list[int]]:
        """Queue chunks in bundles if their lanes, which are some of `lanes`, are free and settled.

        Returns the outcomes of the bundles, and the indexes of the other chunks, which have to be added one by one.
        """
        streamlets, columns = payloads.streamlets, lanes.columns
        brokers = columns.brokers(streamlets)
        outcomes: list[BundleOutcome] = []
        for broker_id in [*dict.fromkeys(brokers.tolist())]:
            sender = self._senders.get(broker_id)
            if sender is None:
                brokers[brokers == broker_id] = NOBODY
                continue
            goes = brokers == broker_id
            if sender.queued:  # a lane with queued chunks cannot join: these must go before its chunk in the bundle
                goes &= [lanes.lanes[streamlet] not in sender.queued for streamlet in streamlets.tolist()]
                brokers[(brokers == broker_id) & ~goes] = NOBODY
                if not goes.any():
                    continue
            part = payloads if goes.all() else payloads.some(goes)
            epochs, sequences = columns.join(part.streamlets)
            try:
                broker_us = self._plugins.created_us(broker_id, lanes.stream, self._loop.time())
                made_us = created_us if broker_us is None else broker_us
                bundle = Bundle(lanes, epochs, sequences, part, made_us, accepted_s + self._delivery_timeout_s)
            except BaseException:
                columns.leave(part.streamlets)
                raise
            self._buffer.add_bundle(bundle)
            sender.send_bundle(bundle)
            outcomes.append(bundle.delivered)
        return outcomes, np.flatnonzero(brokers == NOBODY).tolist()

    def abandon(self, lanes: StreamLanes, error: KeraError) -> None:
        """Send nothing more of a stream. Requests in flight are still finished."""
        for sender in list(self._senders.values()):
            sender.take_bundles_apart()
        for lane in lanes.lanes:
            self._abandon(lane, error)

    async def refresh(self, lanes: StreamLanes, gone: UnknownStream | None = None) -> None:
        """Look up the owners of a stream's streamlets, and move lanes there. `gone`: a broker's error if it is deleted.

        Raises `Unavailable`.
        """
        known = lanes.stream
        try:
            stream = same_stream(await self._cluster.stream_or_last_seen(known.name), known.stream_id)
        except UnknownStream as error:
            if lanes.deleted is None:
                lanes.delete(gone or error)
                self.deleted.add(known.name)
                self._cluster.forget(known.name)
                self.abandon(lanes, gone or error)
            return
        if lanes.update(stream):
            for lane in lanes.lanes:
                self.ready(lane)

    def stop(self) -> None:
        """Stop all attempts to connect, and all searches for owners."""
        self._stopped = True
        for sender in self._senders.values():
            sender.stop()
        self._searches.cancel()

    # -- used by senders, see `sender.LaneOwner` ------------------------------------------

    def ready(self, lane: Lane) -> None:
        """Serve a lane, which may have chunks to send."""
        route = self._routes.get(lane)
        if route is not None:
            self._serve(lane, route)

    def delivered(self, lane: Lane) -> None:
        """Note that a chunk of a lane is delivered: its broker is the owner."""
        route = self._routes.get(lane)
        if route is not None:
            route.attempt = 0
            if route.lanes.deleted is None:
                self.unsettled.discard(lane)
            has_room = lane.next is not None  # it may have had too many chunks in flight
            if has_room or (not lane.in_flight and not (lane.idle and route.lanes.deleted is None)):
                self._serve(lane, route)

    def lost(self, lane: Lane, error: KeraError) -> None:
        """Search for the owner of a lane whose broker refused it with `error`; send nothing meanwhile."""
        route = self._routes.get(lane)
        if route is None or route.sender is None or route.looking:
            return
        route.looking = True
        route.lanes.unsettle(lane)
        route.attempt += 1
        self.unsettled.add(lane)
        if route.attempt == 1:
            identity = lane.identity
            log.info(
                "looking for the owner", stream=identity.stream, streamlet=identity.streamlet_id, error=error.message
            )
        route.sender.remove(lane)
        self._searches.start(self._find(lane, route, error))

    async def connect(self, sender: Sender) -> Channel | None:
        """Return a connection to a sender's broker; None if no lane needs it any more. Raises `Unavailable`."""
        streams = dict.fromkeys(self._routes[lane].lanes for lane in sender.lanes)
        for lanes in streams:
            await self.refresh(lanes)
        if not sender.lanes:
            return None
        for lanes in streams:
            if sender.broker_id in lanes.stream.brokers:
                return await self._cluster.channel(lanes.stream, sender.broker_id)
        raise Unavailable(f"broker {sender.broker_id} is not known any more", broker_id=sender.broker_id)

    # -- inside ------------------------------------------------------------------------------------------------

    def _route(self, lanes: StreamLanes, lane: Lane) -> _Route:
        route = self._routes.get(lane)
        if route is None:
            route = self._routes[lane] = _Route(lanes)
        return route

    def _sender(self, lane: Lane, route: _Route) -> Sender:
        """Return the sender that serves a lane; moves the lane to its owner's sender if possible."""
        owner, sender = route.lanes.owner(lane), route.sender
        if sender is None or (sender.broker_id != owner and not lane.in_flight):
            self._leave(lane, route)
            sender = self._senders.get(owner)
            if sender is None:
                sender = self._senders[owner] = Sender(
                    owner,
                    self,
                    self._cluster,
                    self._settings,
                    self._buffer,
                    self._limits.request_chunks_max,
                    self._loop,
                    self._plugins.at_sender,
                )
            sender.lanes.add(lane)
            route.sender = sender
            sender.chunk_opened(lane)  # only this sender will close the lane's open chunk, if there is one
        return sender

    def _leave(self, lane: Lane, route: _Route) -> None:
        sender = route.sender
        route.lanes.unsettle(lane)
        route.sender = None
        if sender is None:
            return
        sender.remove(lane)
        sender.lanes.discard(lane)
        if not sender.lanes:
            sender.stop()
            del self._senders[sender.broker_id]

    def _serve(self, lane: Lane, route: _Route) -> None:
        if lane.exhausted:
            identity = lane.identity
            text = (
                f"the producer has failed so often in streamlet {identity.streamlet_id} of stream {identity.stream!r}"
                f" that its {self._limits.epochs} epochs are used up; make a new one with the same name"
            )
            self.fail(ClosedError(text, stream=identity.stream, streamlet_id=identity.streamlet_id))
        error = self._buffer.failure or route.lanes.deleted
        if error is not None:
            self._abandon(lane, error)
        elif not route.looking:
            sender = self._sender(lane, route)
            if sender.broker_id == route.lanes.owner(lane):
                route.lanes.settle(lane, sender.broker_id)
            sender.lane_ready(lane)

    def _abandon(self, lane: Lane, error: KeraError) -> None:
        for failure in lane.abandon(error):
            self._buffer.finish(*failure)
        route = self._routes.get(lane)
        if route is None:
            return
        if lane.idle:
            self._leave(lane, self._routes.pop(lane))
            self.unsettled.discard(lane)
        else:
            route.lanes.unsettle(lane)
            self.unsettled.add(lane)

    async def _find(self, lane: Lane, route: _Route, error: KeraError) -> None:
        gone = error if isinstance(error, UnknownStream) else None
        try:
            # Not beyond the deadline of its chunks: at that time they get one last attempt, at the last known owner.
            async with asyncio.timeout_at(lane.deadline_s):
                await asyncio.sleep(route_pause_s(self._cluster.settings, route.attempt))
                await self.refresh(route.lanes, gone)
        except (KeraError, TimeoutError):
            pass  # the last known owner stays
        finally:
            route.looking = False
            if not self._stopped:  # a cancellation without `stop` comes from elsewhere, as when `asyncio.run` ends
                self.ready(lane)
