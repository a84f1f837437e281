"""Which sender serves which lane: that of the broker that owns the lane's streamlet, wherever it moves.

    sender of the owner ──NotOwner──► looked for: a pause, the coordinator's word ──► sender of the new owner
            ▲                                                                              │ (or the same one)
            └──────────────────────────────────────────────────────────────────────────────┘

Invariants:

* a lane changes its sender only while nothing of it is in flight. So chunks reach the new owner in the order of their
  sequences, and none of them while the outcome of an earlier one at the old owner is open;
* nothing is sent of a lane that is being looked for; the other lanes of its sender go on;
* a sender without lanes ends.

A broker that cannot be reached is no different in the end: its sender asks the coordinator before each attempt to
connect, and the lanes that are elsewhere by then leave it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kera.client.cluster.retry import route_pause_s
from kera.client.producing.lane import Lane
from kera.client.producing.sender import Sender
from kera.client.types import StreamDescription
from kera.core.errors import KeraError, Unavailable, UnknownStream
from kera.core.rpc import Channel
from kera.core.telemetry import get_logger

if TYPE_CHECKING:
    from kera.client.producing.producer import Producer
    from kera.client.producing.stream_writer import StreamWriter

log = get_logger("kera.producer")


class Route:
    """Where the chunks of a lane go."""

    __slots__ = ("attempt", "looking", "sender", "writer")

    def __init__(self, writer: StreamWriter) -> None:
        self.writer = writer
        self.sender: Sender | None = None
        self.attempt = 0
        """How many times in a row its broker was not the owner."""
        self.looking = False
        """The owner is being looked for."""


class Routes:
    """See the head of this module. Belongs to one `Producer`."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._senders: dict[int, Sender] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def broker_ids(self) -> list[int]:
        """The brokers that have a sender."""
        return sorted(self._senders)

    def sender(self, lane: Lane) -> Sender:
        """The sender that serves a lane."""
        route: Route = lane.route
        owner = route.writer.stream.assignments[lane.identity.streamlet_id].broker_id
        sender = route.sender
        if sender is None or (sender.broker_id != owner and not lane.in_flight):
            sender = self._move(lane, route, owner)
        return sender

    def _move(self, lane: Lane, route: Route, owner: int) -> Sender:
        self._leave(lane, route)
        sender = self._senders.get(owner)
        if sender is None:
            sender = self._senders[owner] = Sender(self._producer, owner)
        sender.lanes.add(lane)
        route.sender = sender
        if lane.identity.streamlet_id in route.writer.open_chunks:
            sender.chunk_opened()
        return sender

    def _leave(self, lane: Lane, route: Route) -> None:
        sender, route.sender = route.sender, None
        if sender is None:
            return
        sender.remove(lane)
        sender.lanes.discard(lane)
        if not sender.lanes:
            sender.stop()
            del self._senders[sender.broker_id]

    def ready(self, lane: Lane) -> None:
        """A lane may have chunks to send."""
        route: Route = lane.route
        if lane.exhausted:
            self._producer.used_up(lane)
        error = self._producer.failure or route.writer.deleted
        if error is not None:
            self._abandon(lane, error)
        elif not route.looking:
            self.sender(lane).lane_ready(lane)

    def _abandon(self, lane: Lane, error: KeraError) -> None:
        for failure in lane.abandon(error):
            self._producer.finish(*failure)
        if lane.idle:
            self._leave(lane, lane.route)

    def fail(self, writer: StreamWriter, error: KeraError) -> None:
        """Send nothing more of a stream. What is in flight comes to its end."""
        for lane in writer.lanes:
            self._abandon(lane, error)

    def delete(self, writer: StreamWriter, error: UnknownStream) -> None:
        """A stream is not there any more."""
        if writer.deleted is None:
            writer.deleted = error
            self._producer.cluster.forget(writer.stream.name)
            self.fail(writer, error)

    def lost(self, lane: Lane, error: KeraError) -> None:
        """Its broker does not have the streamlet: `error` says so. Look for the owner; send nothing meanwhile."""
        route: Route = lane.route
        if route.looking or route.sender is None:
            return
        route.looking = True
        route.attempt += 1
        if route.attempt == 1:
            identity = lane.identity
            log.info(
                "looking for the owner", stream=identity.stream, streamlet=identity.streamlet_id, error=error.message
            )
        route.sender.remove(lane)
        task = self._producer.loop.create_task(self._find(lane, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(self, lane: Lane, error: KeraError) -> None:
        route: Route = lane.route
        gone = error if isinstance(error, UnknownStream) else None
        try:
            # Not beyond the deadline of its chunks: then there is one attempt left, wherever it goes.
            async with asyncio.timeout_at(lane.deadline_s):
                await asyncio.sleep(route_pause_s(self._producer.cluster.settings, route.attempt))
                await self.refresh(route.writer, gone)
        except (KeraError, TimeoutError):
            pass  # as it was when it was last seen
        finally:
            route.looking = False
        self.ready(lane)

    async def refresh(self, writer: StreamWriter, gone: UnknownStream | None = None) -> None:
        """Learn where a stream's streamlets are now, and let lanes go there. `gone`: who said that it is deleted.

        Raises `Unavailable`.
        """
        name = writer.stream.name
        try:
            stream = await self._producer.cluster.stream_or_last_seen(name)
        except UnknownStream as error:
            self.delete(writer, gone or error)
            return
        if stream.stream_id != writer.stream.stream_id:
            text = f"stream {name!r} was deleted and created again; prepare it again"
            self.delete(writer, gone or UnknownStream(text, stream=name, stream_id=writer.stream.stream_id))
        elif not stream.is_older_than(writer.stream):
            self._replace(writer, stream)

    def _replace(self, writer: StreamWriter, stream: StreamDescription) -> None:
        moved = stream.assignments != writer.stream.assignments
        writer.stream = stream
        if moved:
            for lane in writer.lanes:
                if lane.route.sender is not None:
                    self.ready(lane)

    async def connect(self, sender: Sender) -> Channel | None:
        """A connection to a sender's broker; None if no lane needs it any more. Raises `Unavailable`."""
        writers: dict[StreamWriter, None] = dict.fromkeys(lane.route.writer for lane in sender.lanes)
        for writer in writers:
            await self.refresh(writer)
        if not sender.lanes:
            return None
        for writer in writers:
            if sender.broker_id in writer.stream.brokers:
                return await self._producer.cluster.channel(writer.stream, sender.broker_id)
        raise Unavailable(f"broker {sender.broker_id} is not known any more", broker_id=sender.broker_id)

    def stop(self) -> None:
        """Connect to nobody any more, look for nobody."""
        for sender in self._senders.values():
            sender.stop()
        for task in self._tasks:
            task.cancel()
