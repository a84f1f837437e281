"""The reading end of the push channel (thesis 7.4.2): a broker on this node says where chunks lie in its memory.

One `PushConnection` per broker, shared by all who read over a `Client`; each of them is a `Subscriber`, and each range
of an entry that it reads a `Lane`. The connection maps the broker's arena, read only, and makes of each run that is
pushed a `Fetched` whose bytes lie there.

Promises:

* The runs of a lane come in order, and then its end. After `Lane.close`, or the end, nothing comes.
* A slot that holds another segment than the run was pushed for is seen by its generation: here when the run arrives,
  and in `batches_of` when its chunks are opened. Such bytes are never given out.
* A run keeps its slot until no reference to its bytes is left; or until the connection is gone, then the broker may use
  the slot again, and `PushedSlot.intact` tells.
* A broker that stands still is noticed (`SILENT_INTERVALS_MAX`), and its lanes end as when the connection is lost.
* Whoever takes nothing stops nobody else. The window bounds what was pushed and not taken over all lanes. So of several
  subscribers, one that holds more than its share of it is *paused*: its lanes are cancelled, what it holds is reported
  as taken, and the lanes are begun again where they stopped once it has taken half of that.

The messages are in ``kera.core.push``; whether a broker's memory can be reached at all is ``locality``'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pyarrow as pa

from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.types import PushedSlot, fill_cursor, position_of
from kera.core.errors import InvalidArgument, KeraError, ProtocolError, Unavailable
from kera.core.ids import Position
from kera.core.push import (
    BODY_BYTES_MAX,
    SILENT_INTERVALS_MAX,
    VERSION,
    Decoder,
    Kind,
    Run,
    encode,
    encode_numbers,
    encode_taken,
    runs_of,
    window_bytes_max,
)
from kera.core.rpc.address import reason_of
from kera.core.rpc.wire import error_from_message, parse
from kera.core.telemetry import get_logger
from kera.v1 import push_pb2

log = get_logger("kera.push")

RETURN_DELAY_S = 0.05
"""How long what was taken or let go of waits for more before the broker is told."""
LANES_PER_MESSAGE_MAX = 4096
_HELLO_BYTES_MAX = 1 << 16


class Reason(enum.Enum):
    """Why a lane has ended."""

    REACHED = push_pb2.PushEnd.REACHED
    """All up to its end has come."""
    MOVED = push_pb2.PushEnd.MOVED
    """The entry goes on at another broker."""
    FAILED = push_pb2.PushEnd.FAILED
    """See the error."""
    PULL = push_pb2.PushEnd.PULL
    """Readers hold too much of the broker's memory: read copies for a while."""
    CANCELLED = push_pb2.PushEnd.CANCELLED


class LaneEnd(NamedTuple):
    """How a lane has ended."""

    reason: Reason
    next: Position
    """Where the entry goes on after what has come."""
    error: KeraError | None = None
    """There is one if it has failed."""


class Lane:
    """A range of an entry that is being pushed."""

    __slots__ = ("_subscriber", "closed", "next", "number", "on_end", "on_run", "wanted")

    def __init__(
        self,
        subscriber: Subscriber,
        wanted: Wanted,
        on_run: Callable[[Fetched], None],
        on_end: Callable[[LaneEnd], None],
    ) -> None:
        self._subscriber = subscriber
        self.wanted = wanted
        self.on_run = on_run
        self.on_end = on_end
        self.next = wanted.start
        """After what has come."""
        self.number: int | None = None
        """At the broker; None while it is paused there."""
        self.closed = False

    @property
    def subscriber(self) -> Subscriber:
        """Who reads it."""
        return self._subscriber

    def close(self) -> None:
        """Nothing more is wanted of it."""
        if not self.closed:
            self.closed = True
            self._subscriber.dropped([self])


class Subscriber:
    """One of those who read over a connection, with its part of the window."""

    def __init__(self, connection: PushConnection, consumer_group: str, window_bytes: int) -> None:
        self.connection = connection
        self.consumer_group = consumer_group
        self.window_bytes = window_bytes
        self.lanes: set[Lane] = set()
        self.held_bytes = 0
        """Pushed, and not taken by the caller."""
        self.paused = False
        self._credited_bytes = 0
        """What the broker was told of `held_bytes` as if it was taken."""
        self.on_taken = self.taken
        """The same function each time: runs are many."""

    def open(self, wanted: Wanted, on_run: Callable[[Fetched], None], on_end: Callable[[LaneEnd], None]) -> Lane:
        """Have a range pushed: its runs are given to `on_run` as they come, and its end to `on_end`, once.

        Neither may raise. Whoever takes a run from where `on_run` has put it calls its `Fetched.taken`.
        """
        lane = Lane(self, wanted, on_run, on_end)
        if self.connection.closed:
            lane.closed = True
            asyncio.get_running_loop().call_soon(on_end, self.connection.lost_end(lane))
            return lane
        self.lanes.add(lane)
        if len(self.lanes) == 1:
            self.connection.joined(self)
        if not self.paused:
            self.connection.begin(lane)
        return lane

    def dropped(self, lanes: Iterable[Lane]) -> None:
        """Lanes have ended, or nobody wants them any more."""
        self.connection.cancel(lanes)
        self.lanes.difference_update(lanes)
        if not self.lanes:  # nothing more can come, so it needs no window
            self._credit()
            self.paused = False
            self.connection.left(self)

    def taken(self, taken_bytes: int) -> None:
        """The caller has taken so much of what was pushed."""
        self.held_bytes -= taken_bytes
        credited = min(taken_bytes, self._credited_bytes)
        self._credited_bytes -= credited
        self.connection.taken(taken_bytes - credited)
        if self.paused:
            self.resume_if(self.connection.share_bytes(self))

    def pushed(self, pushed_bytes: int) -> None:
        """So much has come."""
        self.held_bytes += pushed_bytes
        if self.paused:
            self._credit()
        elif self.connection.shared and self.held_bytes > self.connection.share_bytes(self):
            self.pause()

    def pause(self) -> None:
        """Let others use the window."""
        self.paused = True
        self._credit()
        self.connection.cancel(self.lanes)

    def resume_if(self, share_bytes: int) -> None:
        """Go on when there is room in its share again."""
        if self.held_bytes <= share_bytes // 2:
            self.paused = False
            for lane in self.lanes:
                if lane.number is None:  # of the others the end is on its way
                    self.connection.begin(lane)

    def _credit(self) -> None:
        self.connection.taken(self.held_bytes - self._credited_bytes)
        self._credited_bytes = self.held_bytes

    def close(self) -> None:
        """Nothing more is wanted."""
        lanes = list(self.lanes)
        for lane in lanes:
            lane.closed = True
        if lanes:
            self.dropped(lanes)


class _Lease:
    """Keeps a run's slot for as long as anything of it is in use: buffers of Arrow refer to it, and nothing else does.

    So it also keeps what lets go of the slot, and that the mapping.
    """

    __slots__ = ("_let_go", "_slot")

    def __init__(self, let_go: Callable[[int], None], slot: int) -> None:
        self._let_go = let_go
        self._slot = slot

    def __del__(self) -> None:
        self._let_go(self._slot)


class PushConnection(asyncio.Protocol):
    """A connection to a broker's push socket. Belongs to one event loop. Made by `connect`."""

    def __init__(self, hello: push_pb2.PushHello, memory: memoryview, decoder: Decoder, path: str) -> None:
        self.broker_id = hello.broker_id
        self.broker_epoch = hello.broker_epoch
        self._path = path
        self._memory = memory
        self._address = pa.py_buffer(memory).address
        rows_end = hello.rows_at + hello.slots * hello.row_bytes
        self._generations = memory[hello.rows_at : rows_end].cast("Q")[:: hello.row_bytes // 8]
        """Of each slot, now."""
        self._slots_at, self._slot_bytes = hello.slots_at, hello.slot_bytes
        self._window_bytes_max = window_bytes_max(hello.slots, hello.slot_bytes)
        self._window_bytes = 0
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._closed = self._loop.create_future()
        self.failure: ProtocolError | None = None
        """What the broker did that makes no sense; it has ended the connection."""
        self.silent = False
        """The broker was not heard of for so long that it counts as standing still; that has ended the connection."""
        self._alive_interval_s = hello.alive_interval_ms / 1000
        """How often it says that it is there; 0: it does not."""
        self._heard = True
        """Something has come since the last look."""
        self._intervals_silent = 0
        self._reason: object = "closed"
        self._numbers = itertools.count(1)
        self._lanes: dict[int, Lane] = {}
        """By number: those whose end has not come, closed ones as well."""
        self._new: list[Lane] = []
        """Lanes that the broker is to be told of."""
        self._subscribers: set[Subscriber] = set()
        """Those that have lanes."""
        self._taken_bytes = 0
        """Taken, and the broker has not been told."""
        self._released: deque[int] = deque()
        """Slots that were let go of, once per run, and the broker has not been told."""
        self._tell_soon = False
        """There is a timer for it. Who tells at once leaves it alone: to set one from another thread has a price."""

    @classmethod
    async def connect(cls, path: str, *, timeout_s: float) -> PushConnection:
        """Connect to the socket at `path` and map the broker's memory.

        Raises `Unavailable`, and `InvalidArgument` or `ProtocolError` when it is of no use to try again.
        """
        try:
            async with asyncio.timeout(timeout_s):
                sock, hello, fd, decoder = await _greeting(path)
        except TimeoutError as error:
            raise Unavailable(f"no greeting from {path} within {timeout_s:g} s", address=path) from error
        except PermissionError as error:
            raise InvalidArgument(f"cannot connect to {path}: {reason_of(error)}; {_WAY_OUT}", address=path) from error
        except OSError as error:
            raise Unavailable(f"cannot connect to {path}: {reason_of(error)}", address=path) from error
        try:
            memory = _map(hello, fd)
            _, connection = await asyncio.get_running_loop().create_unix_connection(
                lambda: cls(hello, memory, decoder, path), sock=sock
            )
        except BaseException:
            sock.close()
            raise
        return connection

    @property
    def closed(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._closed.done() or self._transport is None or self._transport.is_closing()

    async def close(self) -> None:
        """End it. What was read over it stays as it is only until the broker uses the memory again."""
        if self._transport is not None and not self._closed.done():
            self._transport.abort()
            await asyncio.shield(self._closed)

    def subscriber(self, consumer_group: str, window_bytes: int) -> Subscriber:
        """Somebody who reads over this connection, and holds about `window_bytes` that it has not taken."""
        return Subscriber(self, consumer_group, window_bytes)

    # -- used by subscribers -----------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether there are several subscribers."""
        return len(self._subscribers) > 1

    def share_bytes(self, subscriber: Subscriber) -> int:
        """What a subscriber may hold before others suffer."""
        if not self.shared:
            return subscriber.window_bytes
        return max(0, self._window_bytes - self._slot_bytes) // len(self._subscribers)

    def joined(self, subscriber: Subscriber) -> None:
        """A subscriber has its first lane."""
        self._subscribers.add(subscriber)
        self._reckon()
        for each in self._subscribers:
            if self.shared and not each.paused and each.held_bytes > self.share_bytes(each):
                each.pause()

    def left(self, subscriber: Subscriber) -> None:
        """A subscriber has no lanes any more."""
        self._subscribers.discard(subscriber)
        self._reckon()
        for each in self._subscribers:
            if each.paused:
                each.resume_if(self.share_bytes(each))

    def _reckon(self) -> None:
        # With a slot on top, a chunk finds room however much others hold of their shares: none is larger than that.
        wanted = sum(each.window_bytes for each in self._subscribers) + self._slot_bytes * self.shared
        self._window_bytes = min(self._window_bytes_max, wanted)

    def begin(self, lane: Lane) -> None:
        """Tell the broker of a lane, with others that begin now."""
        lane.number = next(self._numbers)
        self._lanes[lane.number] = lane
        self._new.append(lane)
        if len(self._new) == 1:
            self._loop.call_soon(self._subscribe)

    def cancel(self, lanes: Iterable[Lane]) -> None:
        """Tell the broker that nothing more is wanted of lanes, for now or for good."""
        numbers = [lane.number for lane in lanes if lane.number is not None]
        if numbers:
            self._subscribe()  # it has to have heard of them
            self._send(encode_numbers(Kind.CANCEL, numbers))

    def taken(self, taken_bytes: int) -> None:
        """So much of the window is free again."""
        self._taken_bytes += taken_bytes
        if self._subscribers and 4 * self._taken_bytes >= self._window_bytes:
            self._tell()
        elif not self._tell_soon:
            self._tell_soon = True
            self._loop.call_later(RETURN_DELAY_S, self._time_to_tell)

    # -- to the broker -----------------------------------------------------------------------------------------

    def _send(self, message: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(message)

    def _subscribe(self) -> None:
        new, self._new = self._new, []
        by_consumer_group: dict[str, list[Lane]] = {}
        for lane in new:
            by_consumer_group.setdefault(lane.subscriber.consumer_group, []).append(lane)
        for consumer_group, lanes in by_consumer_group.items():
            for first in range(0, len(lanes), LANES_PER_MESSAGE_MAX):
                message = push_pb2.PushSubscribe(consumer_group=consumer_group, window_bytes=self._window_bytes)
                for lane in lanes[first : first + LANES_PER_MESSAGE_MAX]:
                    row = message.lanes.add(lane=lane.number)
                    fill_cursor(row.start, lane.wanted.entry, lane.next)
                    if lane.wanted.end is not None:
                        fill_cursor(row.end, lane.wanted.entry, lane.wanted.end)
                self._send(encode(Kind.SUBSCRIBE, message.SerializeToString()))

    def _let_go(self, slot: int) -> None:
        """A run has no reference any more. Called from whatever thread drops it, and from the garbage collector."""
        self._released.append(slot)
        if not self._tell_soon:
            self._tell_soon = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all connections with it
                self._loop.call_soon_threadsafe(self._loop.call_later, RETURN_DELAY_S, self._time_to_tell)

    def _time_to_tell(self) -> None:
        self._tell_soon = False
        self._tell()

    def _tell(self) -> None:
        """Tell the broker what was taken and let go of."""
        if self.closed:
            self._released.clear()
            return
        message = b""
        if self._taken_bytes:
            message, self._taken_bytes = encode_taken(self._taken_bytes), 0
        while self._released:
            count = min(len(self._released), BODY_BYTES_MAX // 4)
            message += encode_numbers(Kind.RELEASE, [self._released.popleft() for _ in range(count)])
        if message:
            self._send(message)

    # -- from the broker ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = transport  # type: ignore[assignment]
        if self._alive_interval_s:
            self._watch()

    def _watch(self) -> None:
        """Count the intervals without a word of the broker, and end the connection after too many.

        Intervals and not time: when it is we who have stood still, what the broker has said meanwhile is still to come.
        """
        if self.closed or self._transport is None:
            return
        self._intervals_silent = 0 if self._heard else self._intervals_silent + 1
        self._heard = False
        if self._intervals_silent < SILENT_INTERVALS_MAX:
            self._loop.call_later(self._alive_interval_s, self._watch)
            return
        self.silent = True
        log.warning("a broker is silent; reading on elsewhere", broker_id=self.broker_id, address=self._path)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._heard = True
        try:
            for kind, body in self._decoder.feed(data):
                if kind is Kind.RUNS:
                    for run in runs_of(body):
                        self._run(run)
                elif kind is Kind.END:
                    self._end(parse(push_pb2.PushEnd, body))
                elif kind is not Kind.ALIVE:
                    raise ProtocolError(f"a broker pushed a message of kind {kind.name}")
        except ProtocolError as error:
            self.failure = error
            log.error("push connection fails", broker_id=self.broker_id, error=error.message)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._closed.set_result(None)
        self._reason = self.failure or ("the broker is silent" if self.silent else exc) or "closed"
        lanes = [lane for each in self._subscribers for lane in each.lanes]
        for each in self._subscribers:
            each.lanes.clear()
        self._subscribers.clear()
        self._lanes.clear()
        self._new.clear()
        for lane in lanes:
            lane.closed = True
            lane.on_end(self.lost_end(lane))

    def lost_end(self, lane: Lane) -> LaneEnd:
        """How lanes end with their connection."""
        error = Unavailable(
            f"push connection to {self._path} was lost: {self._reason}", broker_id=self.broker_id, address=self._path
        )
        return LaneEnd(Reason.FAILED, lane.next, error)

    def _run(self, run: Run) -> None:
        number, slot, generation, at, length, segment_id, group_id, offset, lag_records = run
        begin = self._slots_at + slot * self._slot_bytes
        if not (slot < len(self._generations) and length and begin <= at and at + length <= begin + self._slot_bytes):
            raise ProtocolError(f"a run of {length} bytes at {at} does not lie in slot {slot}", slot=slot)
        lane = self._lanes.get(number)
        if lane is None:
            raise ProtocolError(f"a run was pushed for lane {number}, which is not there", lane=number)
        if lane.closed:
            self._let_go(slot)
            self.taken(length)
            return
        start = Position(group_id, segment_id, offset)
        if start < lane.next:
            raise ProtocolError(f"a run at {tuple(start)} was pushed after {tuple(lane.next)}", lane=number)
        if self._generations[slot] != generation:
            self._let_go(slot)
            self.taken(length)
            self._fail(lane, Unavailable("what was pushed is not in the broker's memory any more", slot=slot))
            return
        buffer = pa.foreign_buffer(self._address + at, length, _Lease(self._let_go, slot))
        subscriber = lane.subscriber
        fetched = Fetched(
            lane.wanted.entry,
            start,
            Position(group_id, segment_id, offset + length),
            [buffer],
            lag_records,
            None,
            PushedSlot(self._generations, slot, generation),
            subscriber.on_taken,
        )
        lane.next = fetched.next
        subscriber.pushed(length)
        lane.on_run(fetched)

    def _fail(self, lane: Lane, error: KeraError) -> None:
        lane.close()
        lane.on_end(LaneEnd(Reason.FAILED, lane.next, error))

    def _end(self, message: push_pb2.PushEnd) -> None:
        lane = self._lanes.pop(message.lane, None)
        if lane is None:
            raise ProtocolError(f"the end of lane {message.lane} was pushed, which is not there", lane=message.lane)
        lane.number = None
        if lane.closed:
            return
        try:
            reason = Reason(message.reason)
        except ValueError:
            raise ProtocolError(f"a lane has ended for unknown reason {message.reason}; is the peer newer?") from None
        if reason is Reason.CANCELLED:  # it was paused
            if not lane.subscriber.paused:
                self.begin(lane)
            return
        error = error_from_message(message.error) if reason is Reason.FAILED else None
        position = max(lane.next, position_of(message.next))
        lane.closed = True
        lane.subscriber.dropped([lane])
        lane.on_end(LaneEnd(reason, position, error))


_WAY_OUT = "run as the broker's user, or set shared_memory to never"


async def _greeting(path: str) -> tuple[socket.socket, push_pb2.PushHello, int | None, Decoder]:
    """Connect; what the broker says first, and the descriptor that comes with it. Raises `OSError` and `KeraError`."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    decoder = Decoder()
    try:
        await loop.sock_connect(sock, path)
        while True:
            await _readable(sock)
            try:
                data, more, _, _ = socket.recv_fds(sock, _HELLO_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            fds += more
            if not data:
                raise Unavailable(f"the broker closes {path} at once; {_WAY_OUT}", address=path)
            for kind, body in decoder.feed(data):
                hello = parse(push_pb2.PushHello, body)
                if kind is not Kind.HELLO or hello.version != VERSION or len(fds) > 1:
                    raise ProtocolError(f"{path} is no push channel of version {VERSION}", version=hello.version)
                return sock, hello, fds[0] if fds else None, decoder
    except BaseException:
        for fd in fds:
            os.close(fd)
        sock.close()
        raise


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _map(hello: push_pb2.PushHello, fd: int | None) -> memoryview:
    """The broker's memory. Takes the descriptor; without one, opens the file. Raises `InvalidArgument`."""
    path = hello.arena_path
    try:
        if fd is None:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = memoryview(mmap.mmap(fd, hello.arena_bytes, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise InvalidArgument(f"cannot map the broker's memory {path}: {reason}; {_WAY_OUT}", path=path) from error
    rows_end = hello.rows_at + hello.slots * hello.row_bytes
    slots_end = hello.slots_at + hello.slots * hello.slot_bytes
    aligned = hello.row_bytes >= 8 and hello.row_bytes % 8 == 0 and hello.rows_at % 8 == 0
    if not (aligned and hello.slots and hello.slot_bytes and max(rows_end, slots_end) <= hello.arena_bytes):
        raise ProtocolError(f"the broker's memory {path} is not as it says", path=path)
    return memory
