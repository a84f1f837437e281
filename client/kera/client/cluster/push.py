"""The reading end of the push channel (thesis 7.4.2): a broker on this node says where chunks lie in its memory.

There is one `PushChannel` per broker, shared by all readers of a `Client`. Each reader is a `Subscriber`, and each
range of an entry that it reads is a `Subscription` (`lane` in messages). The channel has mapped the broker's arena,
read only, and makes of each pushed run a `Fetched` whose bytes lie there.

Promises:

* The runs of a subscription come in order, and then its end. After `Subscription.close`, or the end, nothing comes.
* The generation of a slot shows whether it still holds the segment that the run was pushed for. It is checked here when
  the run arrives, and in `batches_of` when its chunks are opened. Overwritten bytes are never delivered.
* A run keeps its slot until no reference to its bytes is left, or until the connection is gone; then the broker may use
  the slot again, and `PushedSlot.intact` shows that.
* A broker that hangs is noticed (`SILENT_INTERVALS_MAX`); then all ends as when the connection is lost.
* A reader that takes nothing does not block others. The window bounds the data of all subscriptions that were pushed
  and not taken. So if there are several subscribers, one that holds more than its share of the window is *paused*: its
  subscriptions are cancelled, and the bytes it holds are reported as taken. Once it holds at most half of its share,
  the subscriptions begin again where they stopped.

The messages are in ``kera.core.push``; ``locality`` decides whether a broker's memory can be reached at all.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pyarrow as pa

from kera.client.arguments import UINT32_MAX
from kera.client.chunk_batch import PushedSlot
from kera.client.cluster.batches import batched
from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.cluster.push_returns import RETURN_DELAY_S, Returns
from kera.client.types import fill_cursor, position_of
from kera.core.base.forks import cut_off, leave_to_parent
from kera.core.base.ids import Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, ProtocolError, Unavailable
from kera.core.push import (
    SILENT_INTERVALS_MAX,
    Decoder,
    PushKind,
    Run,
    encode,
    encode_numbers,
    runs_of,
    window_bytes_max,
)
from kera.core.rpc.wire import error_from_message, parse
from kera.v1 import push_pb2

log = get_logger("kera.push")

SUBSCRIPTIONS_PER_MESSAGE_MAX = 4096


class Reason(enum.Enum):
    """Why a subscription has ended."""

    REACHED = push_pb2.PushEnd.REACHED
    """All data up to its end have come."""
    MOVED = push_pb2.PushEnd.MOVED
    """The entry goes on at another broker."""
    FAILED = push_pb2.PushEnd.FAILED
    """The subscription has failed with an error."""
    PULL = push_pb2.PushEnd.PULL
    """Readers hold too much of the broker's memory: pull copies for a while."""
    CANCELLED = push_pb2.PushEnd.CANCELLED


class SubscriptionEnd(NamedTuple):
    """How a subscription has ended."""

    reason: Reason
    next: Position
    """Position where the entry continues behind the pushed data."""
    error: KeraError | None = None
    """The error, if it has failed."""


class Subscription:
    """A range of an entry that is being pushed."""

    __slots__ = ("_subscriber", "closed", "next", "number", "on_end", "on_run", "wanted")

    def __init__(
        self,
        subscriber: Subscriber,
        wanted: Wanted,
        on_run: Callable[[Fetched], None],
        on_end: Callable[[SubscriptionEnd], None],
    ) -> None:
        self._subscriber = subscriber
        self.wanted = wanted
        self.on_run = on_run
        self.on_end = on_end
        self.next = wanted.start
        """The position behind the pushed data."""
        self.number: int | None = None
        """Its number at the broker; None while it is paused."""
        self.closed = False

    @property
    def subscriber(self) -> Subscriber:
        """The reader of the range."""
        return self._subscriber

    def close(self) -> None:
        """End the subscription: no further run is delivered."""
        if not self.closed:
            self.closed = True
            self._subscriber.dropped([self])


class Subscriber:
    """A reader over a connection, with its part of the window."""

    def __init__(self, channel: PushChannel, consumer_group: str, window_bytes: int) -> None:
        self.channel = channel
        self.consumer_group = consumer_group
        self.window_bytes = window_bytes
        self.subscriptions: set[Subscription] = set()
        self.held_bytes = 0
        """Bytes that were pushed, and not taken by the caller."""
        self.paused = False
        self._credited_bytes = 0
        """The part of `held_bytes` that was reported to the broker as taken."""
        self.on_taken = self.taken
        """The bound method, made once: there are many runs."""

    def open(
        self, wanted: Wanted, on_run: Callable[[Fetched], None], on_end: Callable[[SubscriptionEnd], None]
    ) -> Subscription:
        """Have a range pushed: `on_run` gets its runs as they come, and `on_end` its end, once.

        Neither may raise. The code that takes a run from where `on_run` has put it must call its `Fetched.taken`.
        """
        subscription = Subscription(self, wanted, on_run, on_end)
        if self.channel.closed:
            subscription.closed = True
            asyncio.get_running_loop().call_soon(on_end, self.channel.lost_end(subscription))
            return subscription
        self.subscriptions.add(subscription)
        if len(self.subscriptions) == 1:
            self.channel.joined(self)
        if not self.paused:
            self.channel.begin(subscription)
        return subscription

    def dropped(self, subscriptions: Iterable[Subscription]) -> None:
        """Remove subscriptions that have ended, or were closed."""
        self.channel.cancel(subscriptions)
        self.subscriptions.difference_update(subscriptions)
        if not self.subscriptions:  # no more data can come, so it needs no window
            self._credit()
            self.paused = False
            self.channel.left(self)

    def taken(self, taken_bytes: int) -> None:
        """Note that the caller has taken pushed bytes."""
        self.held_bytes -= taken_bytes
        credited = min(taken_bytes, self._credited_bytes)
        self._credited_bytes -= credited
        self.channel.taken(taken_bytes - credited)
        if self.paused:
            self.resume_if(self.channel.share_bytes(self))

    def pushed(self, pushed_bytes: int) -> None:
        """Count pushed bytes, and pause if they exceed the subscriber's share."""
        self.held_bytes += pushed_bytes
        if self.paused:
            self._credit()
        elif self.channel.shared and self.held_bytes > self.channel.share_bytes(self):
            self.pause()

    def pause(self) -> None:
        """Cancel all subscriptions for now, so that other subscribers can use the window."""
        self.paused = True
        self._credit()
        self.channel.cancel(self.subscriptions)

    def resume_if(self, share_bytes: int) -> None:
        """Go on when there is room in its share again."""
        if self.held_bytes <= share_bytes // 2:
            self.paused = False
            for each in self.subscriptions:
                if each.number is None:  # for the others, the broker's end is still on its way
                    self.channel.begin(each)

    def _credit(self) -> None:
        self.channel.taken(self.held_bytes - self._credited_bytes)
        self._credited_bytes = self.held_bytes

    def close(self) -> None:
        """Close all subscriptions."""
        subscriptions = list(self.subscriptions)
        for each in subscriptions:
            each.closed = True
        if subscriptions:
            self.dropped(subscriptions)


class _Lease:
    """Keeps a run's slot while any part of the run is in use: only Arrow buffers refer to it.

    It also keeps alive the function that releases the slot, and through it the mapping.
    """

    __slots__ = ("_let_go", "_slot")

    def __init__(self, let_go: Callable[[int], None], slot: int) -> None:
        self._let_go = let_go
        self._slot = slot

    def __del__(self) -> None:
        self._let_go(self._slot)


class PushChannel(asyncio.Protocol):
    """A connection to a broker's push socket. Belongs to one event loop. Made by `push_connect.connect`."""

    def __init__(
        self,
        hello: push_pb2.PushHello,
        memory: memoryview,
        decoder: Decoder,
        path: str,
        return_delay_s: float = RETURN_DELAY_S,
    ) -> None:
        self.broker_id = hello.broker_id
        self.broker_epoch = hello.broker_epoch
        self._path = path
        self._memory = memory
        self._address = pa.py_buffer(memory).address
        rows_end = hello.rows_at + hello.slots * hello.row_bytes
        self._generations = memory[hello.rows_at : rows_end].cast("Q")[:: hello.row_bytes // 8]
        """Live view of the generation of each slot."""
        self._slots_at, self._slot_bytes = hello.slots_at, hello.slot_bytes
        self._window_bytes_max = window_bytes_max(hello.slots, hello.slot_bytes)
        self._window_bytes = 0
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._closed = self._loop.create_future()
        self.failure: ProtocolError | None = None
        """The protocol error of the broker that has ended the connection."""
        self.silent = False
        """Whether the connection was ended because the broker sent nothing for so long that it counts as hanging."""
        self._alive_interval_s = hello.alive_interval_ms / 1000
        """Interval of the broker's signs of life; 0: it sends none."""
        self._heard = True
        """Whether data have come since the last check."""
        self._intervals_silent = 0
        self._reason: object = "closed"
        self._numbers = itertools.count(1)
        self._subscriptions: dict[int, Subscription] = {}
        """Subscriptions that have not ended yet, by number, including closed ones."""
        self._new: list[Subscription] = []
        """Subscriptions that are still to be sent to the broker."""
        self._subscribers: set[Subscriber] = set()
        """Subscribers with subscriptions."""
        self._returns = Returns(self._send, return_delay_s)

    @property
    def closed(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._closed.done() or self._transport is None or self._transport.is_closing()

    async def close(self) -> None:
        """End the connection. Data read over it stay valid only until the broker uses the memory again."""
        if self._transport is not None and not self._closed.done():
            self._transport.abort()
            await asyncio.shield(self._closed)

    def subscriber(self, consumer_group: str, window_bytes: int) -> Subscriber:
        """Make a reader over this connection, which holds about `window_bytes` that it has not taken."""
        return Subscriber(self, consumer_group, window_bytes)

    # -- used by subscribers -----------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether there are several subscribers."""
        return len(self._subscribers) > 1

    def share_bytes(self, subscriber: Subscriber) -> int:
        """Return the maximum that a subscriber may hold before it takes from the share of others."""
        if not self.shared:
            return subscriber.window_bytes
        return max(0, self._window_bytes - self._slot_bytes) // len(self._subscribers)

    def joined(self, subscriber: Subscriber) -> None:
        """Add a subscriber, which has its first subscription."""
        self._subscribers.add(subscriber)
        self._reckon()
        for each in self._subscribers:
            if self.shared and not each.paused and each.held_bytes > self.share_bytes(each):
                each.pause()

    def left(self, subscriber: Subscriber) -> None:
        """Remove a subscriber, which has no subscriptions left."""
        self._subscribers.discard(subscriber)
        self._reckon()
        for each in self._subscribers:
            if each.paused:
                each.resume_if(self.share_bytes(each))

    def _reckon(self) -> None:
        # One slot more than the shares, so that a chunk always has room, however much others hold: no chunk is larger.
        wanted = sum(each.window_bytes for each in self._subscribers) + self._slot_bytes * self.shared
        self._window_bytes = min(self._window_bytes_max, wanted)

    def begin(self, subscription: Subscription) -> None:
        """Send a subscription to the broker, together with others that begin now."""
        subscription.number = next(self._numbers)
        self._subscriptions[subscription.number] = subscription
        self._new.append(subscription)
        if len(self._new) == 1:
            self._loop.call_soon(self._subscribe)

    def cancel(self, subscriptions: Iterable[Subscription]) -> None:
        """Have the broker stop pushing subscriptions, for now or for good."""
        numbers = [each.number for each in subscriptions if each.number is not None]
        if numbers:
            self._subscribe()  # the broker has to know them first
            self._send(encode_numbers(PushKind.CANCEL, numbers))

    def taken(self, taken_bytes: int) -> None:
        """Return bytes of the window to the broker."""
        self._returns.taken(taken_bytes, at_once_bytes=self._window_bytes / 4 if self._subscribers else math.inf)

    # -- to the broker -----------------------------------------------------------------------------------------

    def _send(self, message: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(message)

    def _subscribe(self) -> None:
        new, self._new = self._new, []
        by_consumer_group: dict[str, list[Subscription]] = {}
        for each in new:
            by_consumer_group.setdefault(each.subscriber.consumer_group, []).append(each)
        for consumer_group, subscriptions in by_consumer_group.items():
            for some in batched(subscriptions, SUBSCRIPTIONS_PER_MESSAGE_MAX):
                message = push_pb2.PushSubscribe(consumer_group=consumer_group, window_bytes=self._window_bytes)
                for each in some:
                    row = message.lanes.add(lane=each.number)
                    fill_cursor(row.start, each.wanted.entry, each.next)
                    if each.wanted.end is not None:
                        fill_cursor(row.end, each.wanted.entry, each.wanted.end)
                self._send(encode(PushKind.SUBSCRIBE, message.SerializeToString()))

    # -- from the broker ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = transport  # type: ignore[assignment]
        leave_to_parent(self)
        if self._alive_interval_s:
            self._watch()

    def forked(self) -> None:
        """Cut the connection off in a child process, which must not release its parent's slots.

        See `kera.core.base.forks`.
        """
        if self._transport is not None and not self._closed.done():
            cut_off(self._transport.get_extra_info("socket"))
            self._closed.set_result(None)

    def _watch(self) -> None:
        """Count the intervals without data from the broker, and end the connection after too many.

        Counts intervals instead of time: if this process was stopped, data of the broker are still to be read.
        """
        if self.closed or self._transport is None:
            return
        self._intervals_silent = 0 if self._heard else self._intervals_silent + 1
        self._heard = False
        if self._intervals_silent < SILENT_INTERVALS_MAX:
            self._loop.call_later(self._alive_interval_s, self._watch)
            return
        self.silent = True
        log.warning("a broker is silent; reading from its successor", broker_id=self.broker_id, address=self._path)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._heard = True
        try:
            for kind, body in self._decoder.feed(data):
                if kind is PushKind.RUNS:
                    for run in runs_of(body):
                        self._run(run)
                elif kind is PushKind.END:
                    self._end(parse(push_pb2.PushEnd, body))
                elif kind is not PushKind.ALIVE:
                    raise ProtocolError(f"a broker pushed a message of kind {kind.name}")
        except ProtocolError as error:
            # A copy without the traceback, which would refer to this object. A run that is not taken yet refers to it,
            # too, invisibly to the garbage collector: neither of them, nor the mapping, would ever be freed.
            self.failure = ProtocolError(error.message, **error.attributes)
            log.error("push connection fails", broker_id=self.broker_id, error=error.message)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._closed.set_result(None)
        self._reason = self.failure or ("the broker is silent" if self.silent else exc) or "closed"
        subscriptions = [each for subscriber in self._subscribers for each in subscriber.subscriptions]
        for subscriber in self._subscribers:
            subscriber.subscriptions.clear()
        self._subscribers.clear()
        self._subscriptions.clear()
        self._new.clear()
        for each in subscriptions:
            each.closed = True
            each.on_end(self.lost_end(each))

    def lost_end(self, subscription: Subscription) -> SubscriptionEnd:
        """Return the end of a subscription whose connection is lost."""
        error = Unavailable(
            f"push connection to {self._path} was lost: {self._reason}", broker_id=self.broker_id, address=self._path
        )
        return SubscriptionEnd(Reason.FAILED, subscription.next, error)

    def _run(self, run: Run) -> None:
        number, slot, generation, at, length, segment_id, group_id, offset, lag_records = run
        begin = self._slots_at + slot * self._slot_bytes
        if not (slot < len(self._generations) and length and begin <= at and at + length <= begin + self._slot_bytes):
            raise ProtocolError(f"a run of {length} bytes at {at} does not lie in slot {slot}", slot=slot)
        subscription = self._subscriptions.get(number)
        if subscription is None:
            raise ProtocolError(f"a run was pushed for lane {number}, which is not there", lane=number)
        if subscription.closed:
            self._returns.let_go(slot)
            self.taken(length)
            return
        start = Position(group_id, segment_id, offset)
        if offset + length > UINT32_MAX:
            raise ProtocolError(f"a run of {length} bytes at {tuple(start)} ends beyond all segments", lane=number)
        if start < subscription.next:
            raise ProtocolError(f"a run at {tuple(start)} was pushed after {tuple(subscription.next)}", lane=number)
        if self._generations[slot] != generation:
            self._returns.let_go(slot)
            self.taken(length)
            self._fail(subscription, Unavailable("the pushed chunks have left the broker's memory", slot=slot))
            return
        buffer = pa.foreign_buffer(self._address + at, length, _Lease(self._returns.let_go, slot))
        subscriber = subscription.subscriber
        fetched = Fetched(
            subscription.wanted.entry,
            start,
            Position(group_id, segment_id, offset + length),
            [buffer],
            lag_records,
            None,
            PushedSlot(self._generations, slot, generation),
            subscriber.on_taken,
        )
        subscription.next = fetched.next
        subscriber.pushed(length)
        subscription.on_run(fetched)

    def _fail(self, subscription: Subscription, error: KeraError) -> None:
        subscription.close()
        subscription.on_end(SubscriptionEnd(Reason.FAILED, subscription.next, error))

    def _end(self, message: push_pb2.PushEnd) -> None:
        subscription = self._subscriptions.pop(message.lane, None)
        if subscription is None:
            raise ProtocolError(f"the end of lane {message.lane} was pushed, which is not there", lane=message.lane)
        subscription.number = None
        if subscription.closed:
            return
        try:
            reason = Reason(message.reason)
        except ValueError:
            raise ProtocolError(f"a lane has ended for unknown reason {message.reason}; is the peer newer?") from None
        if reason is Reason.CANCELLED:  # the subscriber was paused
            if not subscription.subscriber.paused:
                self.begin(subscription)
            return
        error = error_from_message(message.error) if reason is Reason.FAILED else None
        position = max(subscription.next, position_of(message.next))
        subscription.closed = True
        subscription.subscriber.dropped([subscription])
        subscription.on_end(SubscriptionEnd(reason, position, error))
