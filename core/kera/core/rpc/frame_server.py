"""Serves methods over frames on TCP and unix sockets.

Back-pressure: the server leaves a connection's requests on the network and in the staging buffer while the peer does
not read its replies (`SEND_BUFFER_BYTES_MAX`), while `REQUESTS_IN_FLIGHT_MAX` of its requests wait for an answer, or
while a handler holds it (`Peer.hold`). So the memory of a connection is bounded by these limits and by the replies to
requests that were taken before. A peer that reads no byte of its replies for `Timing.stalled_s` is disconnected, since
other connections need the memory that the replies hold.

The large requests of all connections share bounded memory (``arriving``): a request that finds no room stays on the
network until its turn. A connection that has room, but sends nothing of its request from one sweep to the next while
others wait, is closed.

With a `Doorkeeper`, a connection that has not authenticated may do only that: see ``strangers``.

The number of connections is bounded (``connections``): for one too many, the idlest is closed, or the new one is
refused. Every `Timing.sweep_s` the server looks at all connections: it closes one whose frame has not arrived
completely within `Timing.frame_s_max`, and frees the memory of an earlier large request if nothing has arrived since
the last sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kera.core.base.address import join_address, reason_of
from kera.core.base.telemetry import get_logger
from kera.core.base.turns import SLICE_S, Share
from kera.core.errors import KeraError, PathNotWritable, PortTaken, ProtocolError
from kera.core.rpc.answer import Answer
from kera.core.rpc.arriving import ARRIVING_BYTES_MAX, Arriving
from kera.core.rpc.connections import BACKLOG, CONNECTIONS_MAX_DEFAULT
from kera.core.rpc.frame_sharing import Shared
from kera.core.rpc.frames import (
    NO_REQUEST,
    FrameHeader,
    FrameKind,
    FrameProtocol,
    encode_error,
    encode_frame,
    lazy_memory,
    method_at,
)
from kera.core.rpc.handling import deferred_reply, error_reply, run_handler
from kera.core.rpc.holds import Holds
from kera.core.rpc.limits import (
    BULK_BYTES_MAX,
    REQUESTS_IN_FLIGHT_MAX,
    TAKEN_BYTES_MAX,
    TAKEN_REQUESTS_MAX,
    check_request,
)
from kera.core.rpc.method import Call, Doorkeeper, Method, Peer, Reply, Service
from kera.core.rpc.outbox import Outbox
from kera.core.rpc.sockets import SERVER, tune
from kera.core.rpc.strangers import Bounds, Strangers, check_requests
from kera.core.rpc.taking import Taker
from kera.core.rpc.unix_socket import OWN_USER, bind_unix
from kera.core.rpc.wire import error_to_message, parse
from kera.core.security import Tls
from kera.core.security.accepting import TlsListener, listening

log = get_logger("kera.frames")

_REQUEST = FrameKind.REQUEST
"""Looking up a member of an enumeration takes longer than comparing it, and would be done for each frame."""
_ACCEPTED_TURNS = 3
"""Turns of the loop until a connection that the kernel has accepted before the close is in the list."""
_REFUSED_S = 1.0
"""Time for a peer to read why it is refused: closing a connection with unread requests would discard the reason."""
_ABORT_S = 1.0
"""An aborted connection is gone in the loop's next round; this only bounds a wait that might never end."""


_REPLY = FrameKind.REPLY
"""See `_REQUEST`."""


def encode_answer(header: FrameHeader, method: Method[Any, Any], reply: Reply[Any], bulk_bytes_max: int) -> list[Any]:
    """Return a reply in pieces, see `encode_frame`; a reply that cannot be sent becomes an error."""
    try:
        return encode_frame(_REPLY, method, header.request_id, reply.message, reply.bulk, bulk_bytes_max)
    except Exception as error:  # noqa: BLE001 - it is too large, or the handler's result cannot be sent
        return [encode_refusal(header, method, error)]


def encode_refusal(header: FrameHeader, method: Method[Any, Any] | None, error: BaseException) -> bytes:
    """Return the error frame that answers a request."""
    return encode_error(header.method, header.request_id, error_reply(error, method))


@dataclass(frozen=True, slots=True)
class Timing:
    """The time limits of a server."""

    frame_s_max: float = 30.0
    """Maximum from a frame's first byte to its last one, while the server reads."""
    sweep_s: float = 5.0
    """Time between two looks at all connections."""
    stalled_s: float = 30.0
    """How long a peer may read nothing of the replies that wait for it; on the loop's clock."""
    slice_s: float = SLICE_S
    """How long the requests of one connection are handled while others wait."""
    stranger_s: float = 10.0
    """Time in which a connection has to authenticate."""
    now_s: Callable[[], float] | None = None
    """The clock of slices; by default the loop's."""


class FrameServer:
    """Listens on any number of addresses for one service."""

    def __init__(
        self,
        service: Service,
        *,
        bulk_bytes_max: int = BULK_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX_DEFAULT,
        arriving_bytes_max: int = ARRIVING_BYTES_MAX,
        timing: Timing = Timing(),
        takers: Mapping[Method[Any, Any], Taker] | None = None,
        tls: Tls | None = None,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        """`tls`: encrypts connections over TCP; `doorkeeper`: finds out who the peers are."""
        methods = {method.number: (method, handler) for method, handler in service.items()}
        by_number = {method.number: taker for method, taker in (takers or {}).items()}
        strangers = Strangers(doorkeeper, bulk_bytes_max)
        arriving = Arriving(arriving_bytes_max)
        self._shared = Shared(methods, by_number, bulk_bytes_max, connections_max, timing, strangers, arriving)
        self._sweeping: asyncio.TimerHandle | None = None
        self._servers: list[asyncio.Server | TlsListener] = []
        self._tls = tls
        self._unix_paths: list[Path] = []

    async def listen_tcp(self, host: str, port: int) -> int:
        """Serve on `host`:`port` (0: any free one); returns the port. Raises `PortTaken`."""
        accept = partial(self.accept, "tcp")
        try:
            if self._tls is not None:
                listener = listening(host, port, BACKLOG)
                server: asyncio.Server | TlsListener = TlsListener(listener, accept, self._tls, "frames")
            else:
                server = await asyncio.get_running_loop().create_server(accept, host, port, backlog=BACKLOG)
        except OSError as error:
            raise PortTaken(
                f"frames: cannot listen on {join_address(host, port)}: {reason_of(error)}; choose another port",
                host=host,
                port=port,
            ) from error
        self._listens(server)
        return int(server.sockets[0].getsockname()[1])

    async def listen_unix(self, path: Path, mode: int = OWN_USER) -> None:
        """Serve on a unix socket at `path`, which is removed at close; `mode` says who may connect.

        A socket that no process serves any more is replaced. Raises `PortTaken` if a process does, and
        `PathNotWritable`.
        """
        loop = asyncio.get_running_loop()
        try:
            sock = bind_unix(path, mode)
            server = await loop.create_unix_server(partial(self.accept, "unix"), sock=sock, backlog=BACKLOG)
        except OSError as error:
            raise PathNotWritable(f"cannot listen on unix socket {path}: {reason_of(error)}", path=str(path)) from error
        self._listens(server)
        self._unix_paths.append(path)

    def accept(self, transport: str) -> ServerConnection:
        """Return the serving end of a connection that is about to be made over `transport`."""
        return ServerConnection(self._shared, transport)

    @property
    def connections(self) -> int:
        """The number of connections now."""
        return len(self._shared.connections)

    @property
    def requests_in_flight(self) -> int:
        """The number of requests that wait for their answers, on all connections."""
        return sum(connection.requests_in_flight for connection in self._shared.connections)

    @property
    def arriving_bytes(self) -> int:
        """Memory reserved for large requests."""
        return self._shared.arriving.bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes of replies that peers have not read yet."""
        return sum(connection.outbox.unsent_bytes for connection in self._shared.connections)

    def _listens(self, server: asyncio.Server | TlsListener) -> None:
        self._servers.append(server)
        if self._sweeping is None:
            self._sweep()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self._shared.connections):
            connection.sweep(loop.time())
        self._sweeping = loop.call_later(self._shared.timing.sweep_s, self._sweep)

    async def close(self, grace_s: float = 0.5) -> None:
        """Stop listening and close all connections; replies that are being sent get `grace_s` to leave."""
        self._shared.closing = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for server in self._servers:
            server.close()
        for path in self._unix_paths:
            with contextlib.suppress(OSError):
                path.unlink()
        for _ in range(_ACCEPTED_TURNS):
            await asyncio.sleep(0)
        connections = list(self._shared.connections)
        if not connections:
            return
        lost = [connection.lost for connection in connections]
        for connection in connections:
            connection.close()
        await asyncio.wait(lost, timeout=grace_s)
        for connection in connections:
            connection.abort()
        await asyncio.wait(lost, timeout=_ABORT_S)


class ServerConnection(FrameProtocol):
    """One client. Handlers run inline, in the order of their requests; replies may be deferred."""

    def __init__(self, shared: Shared, transport: str) -> None:
        super().__init__(shared.bulk_bytes_max)
        self._shared = shared
        self._holds = Holds(self.hold_frames, self._go_on)
        self.peer = self._peer = Peer(transport, "", end=self.abort, hold=self._holds.hold, release=self._holds.release)
        self._is_stranger = False
        """Whether the peer still has to authenticate."""
        self._made_s = self._loop.time()
        self._waiting: set[asyncio.Future[Reply[Any]]] = set()
        self._takers = shared.takers
        self._held_requests = 0
        """Number of requests that a taker will answer later."""
        self._waits_for_room = False
        """Whether it waits for memory for a large request, see ``arriving``."""
        self._receive = memoryview(b"")  # reused for every large bulk; its bytes are consumed inside the handler
        self.outbox = Outbox(
            self._loop, shared.timing.stalled_s, self._peer_stalled, pause=self.hold_frames, resume=self._go_on
        )
        """Replies to send; gathered ones leave when all requests that have arrived are handled."""
        now_s = shared.timing.now_s or self._loop.time
        self._share = Share(shared.turns, self, shared.timing.slice_s, self._go_on, now_s=now_s)
        self.active_s = self._loop.time()
        """Time of the last sweep that saw new data; at first, when the connection was made."""
        self._arrivals_swept = 0
        self._frames = 0
        """Number of requests received."""
        self._frames_swept = -1
        self._unfinished_s: float | None = None
        """Since when the sweeps have seen the same unfinished frame."""
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def close(self) -> None:
        """Take no further request, and close the connection when the replies have left."""
        self.outbox.close()

    def abort(self) -> None:
        """Close the connection now, if it is still open."""
        if self._transport is not None and not self.lost.done():
            self._transport.abort()

    @property
    def asked(self) -> bool:
        """See `Quiet`."""
        return self._frames > 0

    @property
    def evictable(self) -> bool:
        """See `Quiet`. A connection that has never sent a whole request cannot keep its place by beginning one."""
        return not self.requests_in_flight and self.outbox.empty and not (self.asked and self.unfinished)

    @property
    def requests_in_flight(self) -> int:
        """The number of requests that wait for their answers."""
        return len(self._waiting) + self._held_requests

    @property
    def receive_bytes(self) -> int:
        """The size of the buffer that is kept for large requests."""
        return len(self._receive)

    def sweep(self, now_s: float) -> None:
        """Close the connection if the peer has stopped in the middle of a frame; free memory that it does not use."""
        patience_s = self._shared.timing.stranger_s
        if self._is_stranger and self._open and now_s >= self._made_s + patience_s:
            self.protocol_failed(ProtocolError(f"it has not authenticated within {patience_s:g} s"))
            self.abort()
            return
        if self.arrivals != self._arrivals_swept:
            self._arrivals_swept, self.active_s = self.arrivals, now_s
        elif not self.unfinished:
            self.give_back()
        elif self.large_unfinished and not self.held and self._shared.arriving.has_waiting:
            limit_s = self._shared.timing.sweep_s
            self.protocol_failed(ProtocolError(f"nothing of a request came for {limit_s:g} s while others waited"))
            self.abort()
            return
        if self.held or not self.unfinished or self._frames != self._frames_swept:
            self._frames_swept, self._unfinished_s = self._frames, None
        if self.held or not self.unfinished:
            return
        if self._unfinished_s is None:
            self._unfinished_s = now_s
        elif now_s >= self._unfinished_s + self._shared.timing.frame_s_max and self._open:
            limit_s = self._shared.timing.frame_s_max
            self.protocol_failed(ProtocolError(f"a frame has not come whole within {limit_s:g} s"))
            self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if self._transport is not None:
            self.outbox.open(self._transport)
        self._peer.address = _address(transport.get_extra_info("peername"))
        if self._shared.closing:
            self._shared.connections[self] = None
            transport.abort()  # type: ignore[attr-defined]  # every transport of a connection has it
            return
        after_s = 0.0
        try:
            self._shared.admit(self, self._loop.time())
            after_s = _REFUSED_S
            tune(transport.get_extra_info("socket"), SERVER)
            self._may_send(self._shared.strangers.arrives(self, transport))
        except KeraError as error:
            self.outbox.write([encode_error(0, NO_REQUEST, error_to_message(error))])
            self.outbox.flush()
            self.hold_frames()
            self._loop.call_later(after_s, self.close)

    def _may_send(self, bounds: Bounds) -> None:
        self._is_stranger, self.head_bytes_max, self.bulk_bytes_max = bounds

    def connection_lost(self, _exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._let_go_of_memory()  # a pending answer may keep this object for a while
        self._receive = memoryview(b"")
        self._shared.arriving.release(self)
        self._shared.connections.pop(self, None)
        self._shared.strangers.goes(self)
        self.outbox.end()
        self.lost.set_result(None)
        for future in self._waiting:
            future.cancel()
        self._peer.closed()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.outbox.is_full()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.outbox.has_room()

    def _peer_stalled(self, unsent_bytes: int) -> None:
        log.warning("connection closed: the peer takes no replies", peer=self._peer.address, unsent_bytes=unsent_bytes)
        self.abort()

    def _go_on(self) -> None:
        held = self._holds or self._share.resting or self.outbox.paused or self._waits_for_room
        if not (held or self.requests_in_flight >= REQUESTS_IN_FLIGHT_MAX):
            self.release_frames()

    def allocate_bulk(self, bulk_bytes: int) -> memoryview:
        """See `FrameProtocol`."""
        if len(self._receive) < bulk_bytes:
            self._receive = lazy_memory(bulk_bytes)
        return self._receive[:bulk_bytes]

    def large_begins(self, length_bytes: int) -> None:
        """See `FrameProtocol`."""
        if not self._shared.arriving.reserve(self, length_bytes):
            self._waits_for_room = True
            self.hold_frames()

    def room_given(self) -> None:
        """See `Receiver`."""
        self._waits_for_room = False
        self._go_on()

    def give_back(self) -> None:
        """See `Receiver`."""
        if not self.large_unfinished:
            self._receive = memoryview(b"")
            self.shrink()
            self._shared.arriving.release(self)

    def protocol_failed(self, error: ProtocolError) -> None:
        """See `FrameProtocol`."""
        self._shared.refusals.tell(str(error), self._peer.address or self._peer.transport)
        self.outbox.write([encode_error(0, NO_REQUEST, error_to_message(error))])
        self.outbox.flush()

    def frames_taken(self) -> None:
        """See `FrameProtocol`."""
        self.outbox.flush()
        if self._shared.arriving.has_waiting:
            self.give_back()

    def frame_received(self, header: FrameHeader, head: memoryview | bytes, bulk: memoryview, *, staged: bool) -> None:
        """See `FrameProtocol`."""
        del staged  # either way the memory belongs to this connection, which reuses it after the handler returns
        if header.kind != _REQUEST:
            raise ProtocolError(f"peer sent a frame of kind {header.kind} and no request")
        self._frames += 1
        if self._is_stranger:
            check_requests(self._frames)
        begun_s = self._share.begin()
        self._handle(header, head, bulk)
        if self._share.end(begun_s):
            self.hold_frames()

    def take_staged(self, staging: memoryview, at: int, filled: int) -> int:
        """See `FrameProtocol`."""
        taker = self._takers.get(method_at(staging, at))
        if taker is None:
            return at
        begun_s = self._share.begin()
        upto = min(filled, at + TAKEN_BYTES_MAX)
        requests_max = min(TAKEN_REQUESTS_MAX, REQUESTS_IN_FLIGHT_MAX - self.requests_in_flight)
        taken = taker(self, staging[at:upto], requests_max)
        if not taken.requests:
            if self._share.end(begun_s):
                self.hold_frames()
            return at
        self._frames += taken.requests
        self._held_requests += taken.held
        if taken.answers:
            self.outbox.write([taken.answers])
        if self._share.end(begun_s) or self.requests_in_flight >= REQUESTS_IN_FLIGHT_MAX:
            self.hold_frames()
        return at + taken.end

    def answer(self, answers: bytes, requests: int) -> None:
        """See `Asker`."""
        self._held_requests -= requests
        self.outbox.write([answers])
        self._answered()

    def _handle(self, header: FrameHeader, head: memoryview | bytes, bulk: memoryview) -> None:
        known = self._shared.methods.get(header.method)
        if known is None:
            error = ProtocolError(f"unknown method {header.method}; is the peer newer?", method=header.method)
            self.outbox.write([encode_refusal(header, None, error)])
            return
        method, handler = known
        try:
            if bulk and not method.bulk:
                raise ProtocolError(f"{method.name} takes no chunks, and {len(bulk)} bytes of them came")
            check_request(method, len(head), len(bulk), self.bulk_bytes_max)  # before it is parsed
            result = run_handler(handler, Call(parse(method.request, head), bulk, self._peer))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is answered
            self.outbox.write([encode_refusal(header, method, error)])
            return
        if isinstance(result, Reply):
            self.outbox.write(encode_answer(header, method, result, self.bulk_bytes_max))
            return
        self._waiting.add(result)
        finished = partial(self._finished, header, method)
        if isinstance(result, Answer):
            result.when_done(finished)
        else:
            result.add_done_callback(finished)
        if self.requests_in_flight >= REQUESTS_IN_FLIGHT_MAX:
            self.hold_frames()

    def _finished(self, header: FrameHeader, method: Method[Any, Any], future: asyncio.Future[Reply[Any]]) -> None:
        self._waiting.discard(future)
        if self._is_stranger:
            self._may_send(self._shared.strangers.look(self))
        try:
            reply = deferred_reply(future)
        except Exception as error:  # noqa: BLE001 - as above
            if self._open:
                self.outbox.write([encode_refusal(header, method, error)])
        else:
            self.outbox.write(encode_answer(header, method, reply, self.bulk_bytes_max))
        self._answered()

    def _answered(self) -> None:
        """Send an answer that was deferred, and go on reading if there is room."""
        if not self.requests_in_flight:
            self.outbox.flush()
        else:  # the same event may answer more of them
            self.outbox.flush_soon()
        self._go_on()

    @property
    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()


def _address(peername: Any) -> str:
    return join_address(peername[0], peername[1]) if isinstance(peername, tuple) else str(peername or "")
