"""The calling end of a framed connection."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from kera.core.base.address import CLOSED_AT_ONCE, reason_of, refuses_certificate, split_address
from kera.core.base.forks import cut_off, inherited, leave_to_parent
from kera.core.errors import KeraError, ProtocolError, Unavailable, Uncertain
from kera.core.rpc import api
from kera.core.rpc.answer import Answer
from kera.core.rpc.frames import NO_REQUEST, FrameHeader, FrameKind, FrameProtocol, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.method import REFUSALS, Introduction, Method, Reply, RequestT, ResponseT, call, introduce
from kera.core.rpc.sockets import CALLER, tune
from kera.core.rpc.wire import error_from_message, parse
from kera.core.security import Tls
from kera.v1 import common_pb2

CONNECT_ATTEMPT_S = 1.0
"""How long one attempt to connect takes before a new socket tries again: TCP alone would retry at growing intervals."""
SILENT_S_MAX = CALLER.silent_ms / 1000
"""If nothing has arrived for this long when a request times out, the connection is given up."""
JOINED_BYTES_MAX = 4096
"""The pieces of a frame of up to this size are joined, which costs less than passing them to the kernel separately."""


class FrameChannel(FrameProtocol):
    """A connection over TCP or a unix socket; see `kera.core.rpc.Channel`.

    The bulk of a reply is received into a new buffer from Arrow's pool, which is aligned, not zeroed, and freed as soon
    as nothing refers to it.
    """

    def __init__(
        self,
        transport_name: str,
        address: str,
        bulk_bytes_max: int = BULK_BYTES_MAX,
        *,
        silent_s_max: float = SILENT_S_MAX,
        encrypted: bool = False,
    ) -> None:
        super().__init__(bulk_bytes_max)
        self._transport_name = transport_name
        self._encrypted = encrypted
        self._ended_here = False
        """Whether this end has closed the connection, and not the peer."""
        self._address = address
        self._silent_s_max = silent_s_max
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._timer: asyncio.TimerHandle | None = None
        """One timer for all requests, set to the earliest deadline of those that were pending when it was set."""
        self._timer_s = 0.0
        self._closed = self._loop.create_future()
        self._failure: KeraError | None = None
        self._refusal: KeraError | None = None
        """Set if the peer refuses this connection: it has carried out none of its requests."""

    @classmethod
    async def connect_tcp(
        cls,
        address: str,
        *,
        timeout_s: float,
        bulk_bytes_max: int = BULK_BYTES_MAX,
        attempt_s: float = CONNECT_ATTEMPT_S,
        tls: Tls | None = None,
        introduction: Introduction | None = None,
    ) -> FrameChannel:
        """Connect to ``host:port``, over `tls` if it is given, and authenticate with `introduction`.

        Raises `Unavailable`, `AuthenticationFailed`, or `InvalidArgument` if the address is invalid.
        """
        host, port = split_address(address)
        context = None if tls is None else tls.client_context()

        def protocol() -> FrameChannel:
            return cls("tcp", address, bulk_bytes_max, encrypted=tls is not None)

        connecting = _connect_tcp(protocol, host, port, attempt_s, context)
        return await cls._connected(connecting, address, timeout_s, introduction)

    @classmethod
    async def connect_unix(
        cls,
        path: str,
        *,
        timeout_s: float,
        bulk_bytes_max: int = BULK_BYTES_MAX,
        introduction: Introduction | None = None,
    ) -> FrameChannel:
        """Connect to the unix socket at `path`; see `connect_tcp`."""
        loop = asyncio.get_running_loop()
        connecting = loop.create_unix_connection(lambda: cls("unix", path, bulk_bytes_max), path)
        return await cls._connected(connecting, path, timeout_s, introduction)

    @staticmethod
    async def _connected(
        connecting: Any, address: str, timeout_s: float, introduction: Introduction | None
    ) -> FrameChannel:
        try:
            async with asyncio.timeout(timeout_s):
                _, channel = await connecting
        except TimeoutError as error:
            raise Unavailable(f"cannot connect to {address} within {timeout_s:g} s", address=address) from error
        except OSError as error:
            raise Unavailable(f"cannot connect to {address}: {reason_of(error)}", address=address) from error
        try:
            await introduce(
                introduction,
                lambda request: call(channel, api.AUTHENTICATE, request, timeout_s=timeout_s),
                each_call=False,
            )
        except Uncertain as error:
            channel.abort()
            raise Unavailable(f"cannot connect to {address}: {error.message}", address=address) from error
        except BaseException:
            channel.abort()
            raise
        return channel  # type: ignore[no-any-return]

    @property
    def transport(self) -> str:
        """``unix`` or ``tcp``."""
        return self._transport_name

    @property
    def closed(self) -> bool:
        """See `Channel.closed`."""
        return self._closed.done() or (self._transport is not None and self._transport.is_closing())

    def submit(
        self,
        method: Method[RequestT, ResponseT],
        message: RequestT,
        bulk: Sequence[Any] = (),
        *,
        timeout_s: float,
    ) -> Answer[Reply[ResponseT]]:
        """See `Channel.submit`."""
        future: Answer[Reply[ResponseT]] = Answer(loop=self._loop)
        if self.closed or self._transport is None:
            future.set_exception(
                self._refusal or Unavailable(f"connection to {self._address} is closed", address=self._address)
            )
            return future
        request_id = next(self._ids)
        try:
            pieces = encode_frame(FrameKind.REQUEST, method, request_id, message, bulk, self.bulk_bytes_max)
        except KeraError as error:
            future.set_exception(error)
            return future
        deadline_s = self._loop.time() + timeout_s
        self._pending[request_id] = _Pending(future, method, deadline_s, timeout_s, self.arrivals)
        if self._timer is None or deadline_s < self._timer_s:
            self._set_timer(deadline_s)
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        elif sum(map(len, pieces)) <= JOINED_BYTES_MAX:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)
        return future

    def abort(self) -> None:
        """Close the connection at once, without waiting; unsent data are discarded."""
        if self._transport is not None and not self._closed.done():
            self._ended_here = True
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed, by either end."""
        await asyncio.shield(self._closed)

    async def close(self) -> None:
        """See `Channel.close`."""
        if self._transport is not None and not self._closed.done():
            self._ended_here = True
            self._transport.abort()
            await asyncio.shield(self._closed)

    # -- protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        tune(transport.get_extra_info("socket"), CALLER)
        leave_to_parent(self)

    def forked(self) -> None:
        """See `kera.core.base.forks`: a child process sends and receives nothing."""
        if self._transport is not None and not self._closed.done():
            self._refusal = inherited()
            cut_off(self._transport.get_extra_info("socket"))
            self._closed.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        pending, self._pending = self._pending, {}
        if self._timer is not None:
            self._timer.cancel()
        self._let_go_of_transport()
        if not self._closed.done():
            self._closed.set_result(None)  # first, as callers that get an error below may want to send again
        for each in pending.values():
            if not each.future.done():
                each.future.set_exception(self._lost(exc))

    def _lost(self, exc: Exception | None) -> KeraError:
        """Return the error of a request without an answer: the peer may have handled it, unless it refused us."""
        if self._refusal is not None:
            return self._refusal
        if isinstance(exc, ssl.SSLError) and self._failure is None:
            if refuses_certificate(exc) and not self.arrivals:  # TLS 1.3 reports it after this side's handshake
                return Unavailable(f"cannot connect to {self._address}: {reason_of(exc)}", address=self._address)
            reason: Any = reason_of(exc)
        else:
            at_once = self._transport_name == "tcp" and not (self._encrypted or self.arrivals or self._ended_here)
            reason = self._failure or exc or (CLOSED_AT_ONCE if at_once else "closed")
        return Uncertain(f"connection to {self._address} was lost: {reason}", address=self._address)

    def protocol_failed(self, error: ProtocolError) -> None:
        """See `FrameProtocol`."""
        self._failure = error

    def allocate_bulk(self, bulk_bytes: int) -> memoryview:
        """See `FrameProtocol`."""
        return memoryview(pa.allocate_buffer(bulk_bytes)).cast("B")  # Arrow's own view has signed bytes

    def frame_received(self, header: FrameHeader, head: memoryview | bytes, bulk: memoryview, *, staged: bool) -> None:
        """See `FrameProtocol`."""
        error: KeraError | None = None
        if header.kind == FrameKind.ERROR:
            error = error_from_message(parse(common_pb2.Error, head))
            if header.request_id == NO_REQUEST:
                self._refusal = error if isinstance(error, REFUSALS) else None
                raise ProtocolError(f"refused by the peer: {error}")
        elif header.kind != FrameKind.REPLY:
            raise ProtocolError(f"peer sent a frame of kind {header.kind} and no reply")
        entry = self._pending.get(header.request_id)
        if entry is None:
            return  # it has timed out
        future, method = entry.future, entry.method
        # An unreadable answer ends the connection, and that must fail this request, so it stays pending until then.
        message = parse(method.response, head) if error is None else None
        del self._pending[header.request_id]
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            return
        if staged and bulk:
            kept = self.allocate_bulk(len(bulk))
            kept[:] = bulk
            bulk = kept
        future.set_result(Reply(message, (bulk,) if bulk else ()))

    def _set_timer(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = deadline_s
        self._timer = self._loop.call_at(deadline_s, self._time_is_up)

    def _time_is_up(self) -> None:
        """Fail the requests whose deadline has passed, and set the timer for the next deadline.

        Give up the connection if nothing at all has arrived since such a request was sent: other requests in flight
        would only time out later, and new ones would queue behind the data that the network has lost.
        """
        self._timer = None
        now_s = self._loop.time()
        silent = False
        for request_id in [request_id for request_id, each in self._pending.items() if each.deadline_s <= now_s]:
            each = self._pending.pop(request_id)
            silent = silent or (each.arrivals == self.arrivals and each.timeout_s >= self._silent_s_max)
            if not each.future.done():
                each.future.set_exception(
                    Uncertain(
                        f"no answer from {self._address} to {each.method.name} within {each.timeout_s:g} s",
                        address=self._address,
                    )
                )
        if silent:
            self._give_up()
            return
        if self.unfinished:
            self._loop.call_later(self._silent_s_max, self._look_again, self.arrivals)
        if self._pending:
            self._set_timer(min(each.deadline_s for each in self._pending.values()))

    def _look_again(self, arrivals: int) -> None:
        """Give up a connection that was in the middle of an answer at a time-out, if nothing has arrived since."""
        if self.unfinished and self.arrivals == arrivals:
            self._give_up()

    def _give_up(self) -> None:
        self._failure = Unavailable("it has been silent for too long", address=self._address)
        self.abort()


class _Pending(NamedTuple):
    """A request without an answer."""

    future: Answer[Any]
    method: Method[Any, Any]
    deadline_s: float
    timeout_s: float
    arrivals: int
    """Arrivals of the connection when the request was sent."""


async def _connect_tcp(
    protocol: Callable[[], FrameChannel], host: str, port: int, attempt_s: float, context: ssl.SSLContext | None
) -> Any:
    """Connect to one of the addresses of a host, and retry as long as none of them answers. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await _addresses_of(host, port)
    named: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": host}
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    while True:
        refused: OSError | None = None
        for address in addresses:
            try:
                async with asyncio.timeout(attempt_s):
                    return await loop.create_connection(protocol, address, port, **named)
            except TimeoutError:
                continue  # its base is `OSError`, but it does not mean that the host has refused
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused


async def _addresses_of(host: str, port: int) -> list[Any]:
    """Return the result of `socket.getaddrinfo`. Raises `OSError`.

    An event loop uses a thread for it, but no thread can be started when the interpreter ends. Connections are made
    even then (`kera.client.unclosed`), so this thread makes the call.
    """
    try:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except RuntimeError:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
