"""A small HTTP server that withstands hostile clients: GET and HEAD, one request for each connection.

It has a separate thread and event loop, so it answers while the daemon's loop is stuck, and its connections do not
disturb the daemon's loop. Promises:

* A request's head may have `head_bytes_max` and take `request_s` to arrive; an answer may take `answer_s` to be made
  and `response_s` to be read.
* There are at most `connections_max`. For one more, another connection is closed: one that has sent no request yet, or
  else one that does not read its answer; among these, the oldest of the host with the most. So probes get through even
  if other clients keep their connections open. Only if all connections are being answered is the new one closed.
* Making answers takes at most `1 / (1 + REST)` of the time, per lane: a client that asks too often waits. Lanes do not
  wait for each other, so a scrape does not delay a probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from kera.core.base.address import join_address
from kera.core.base.crowd import host_of, most_crowded
from kera.core.base.telemetry import get_logger
from kera.core.errors import PortTaken
from kera.core.security import Tls
from kera.core.security.accepting import TlsListener, listening

log = get_logger("kera.monitoring")

REST = 3
"""After making an answer, its lane rests for this many times as long."""
REST_S_MIN = 0.005
REST_S_MAX = 2.0

_REQUEST = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.[01]")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
_METHODS = ("GET", "HEAD")
_NO_LINGER = struct.pack("ii", 1, 0)


class Request(NamedTuple):
    """A request."""

    path: str
    query: str
    fields: Mapping[str, str]
    """The header fields, by name in lower case; of a repeated field, the last one."""
    is_known: bool = True
    """Whether the client has shown a certificate, if one is required."""
    certificate: bytes = b""
    """The client's certificate, which TLS has verified."""


class Response(NamedTuple):
    """The answer to a request."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class Route(NamedTuple):
    """The handler of a path."""

    answer: Callable[[Request], Awaitable[Response]]
    """Called on the server's thread."""
    lane: str = ""
    """Answers of one lane are made one after the other."""
    is_open: bool = False
    """Whether it is also open to clients without a required certificate: probes show none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one HTTP server on sizes, times and connections."""

    head_bytes_max: int = 8 << 10
    request_s: float = 5.0
    answer_s: float = 10.0
    response_s: float = 15.0
    connections_max: int = 16


LIMITS = Limits()


class Refused(Exception):
    """A request that this server does not answer."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def parse(head: bytes) -> tuple[str, Request]:
    """Return the method and the request; `head` ends with its empty line. Raises `Refused`."""
    first, *lines = head.split(b"\r\n")[:-2]
    found = _REQUEST.fullmatch(first)
    if found is None:
        raise Refused(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")
    fields = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "invalid header")
        fields[field[1].decode("ascii").lower()] = field[2].decode("latin-1").strip()
    path, _, query = found[2].decode("ascii").partition("?")
    if fields.get("content-length", "0") != "0" or "transfer-encoding" in fields:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no body is taken")
    return found[1].decode("ascii"), Request(path, query, fields)


def encode(response: Response, *, head_only: bool = False) -> bytes:
    """Return the bytes of a response."""
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"{'Allow: GET, HEAD' + chr(13) + chr(10) if response.status == HTTPStatus.METHOD_NOT_ALLOWED else ''}"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    ).encode("ascii")
    return head if head_only else head + response.body


def text(status: HTTPStatus, said: str) -> Response:
    """Return an answer of one or a few lines."""
    return Response(status, f"{said}\n".encode())


class _Connection:
    """A connection of a client."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        peer = writer.get_extra_info("peername")
        self.host = host_of(join_address(*peer[:2])) if peer else ""
        self.being_answered = False
        self.asked = False

    def cut_off(self) -> None:
        """Close it at once; the kernel discards unsent data, too. Does nothing to a connection that has ended."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None:  # a TLS connection that has ended has no socket
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.writer.transport.abort()


class HttpServer:
    """Serves GET and HEAD on a separate thread, within limits that keep room for probes.

    `listen` and `close` are called by the thread that owns it.
    """

    def __init__(self, routes: Mapping[str, Route], limits: Limits = LIMITS, tls: Tls | None = None) -> None:
        """`routes`: by path. `tls`: if given, the server speaks only HTTPS."""
        self._routes = routes
        self._limits = limits
        self._tls = tls
        self._lanes: dict[str, _Lane] = {}
        self._connections: dict[_Connection, None] = {}
        """The connections, the oldest first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._started = threading.Event()

    def listen(self, host: str, port: int) -> int:
        """Serve on `host`:`port` (0: any free one) from now on; returns the port. Raises `PortTaken`."""
        try:
            listener = listening(host, port, self._limits.connections_max)
        except OSError as error:
            raise PortTaken(
                f"metrics: cannot listen on {join_address(host, port)}: {error.strerror}", host=host, port=port
            ) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop, listener), name="kera-http", daemon=True)
        self._thread.start()
        self._started.wait()  # otherwise `close` could stop the loop before it runs
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Stop serving, and cut off all connections."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = None

    # -- on its own thread ---------------------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        asyncio.set_event_loop(loop)
        serving = loop.run_until_complete(self._serving(listener))
        loop.call_soon(self._started.set)
        try:
            loop.run_forever()
        finally:
            self._closing = True
            if isinstance(serving, TlsListener):
                serving.close()  # it has a task that would go on for ever
            else:
                loop.remove_reader(listener.fileno())  # connections that are just being accepted are cut off below
            for task in self._tasks:
                task.cancel()
            for connection in self._connections:
                connection.cut_off()
            while tasks := asyncio.all_tasks(loop):  # including tasks for connections that are just beginning
                loop.run_until_complete(asyncio.wait(tasks))
            serving.close()
            loop.run_until_complete(asyncio.sleep(0))  # connections that were cut off are closed in the next round
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    async def _serving(self, listener: socket.socket) -> asyncio.Server | TlsListener:
        if self._tls is None:
            return await asyncio.start_server(self._connected, sock=listener, limit=self._limits.head_bytes_max)

        def protocol() -> asyncio.BaseProtocol:
            return asyncio.StreamReaderProtocol(
                asyncio.StreamReader(limit=self._limits.head_bytes_max), self._connected
            )

        return TlsListener(
            listener,
            protocol,
            self._tls,
            "metrics",
            handshakes_max=self._limits.connections_max,
            handshake_s=self._limits.request_s,
            only_asks=True,
        )

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        connection = _Connection(writer)
        if task is None or self._closing or not self._make_room():
            connection.cut_off()
            return
        self._connections[connection] = None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(connection, reader)
        except Exception:
            log.exception("a request for metrics or health failed")
        finally:
            self._tasks.discard(task)
            del self._connections[connection]
            connection.cut_off()

    def _make_room(self) -> bool:
        if len(self._connections) < self._limits.connections_max:
            return True
        idle = [each for each in self._connections if not each.being_answered]
        some = [each for each in idle if not each.asked] or idle
        if not some:
            return False
        victim = most_crowded(some, lambda each: each.host)
        victim.being_answered = True  # so that it is not chosen again before it is gone
        victim.cut_off()
        return True

    async def _serve(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        limits, writer = self._limits, connection.writer
        method = ""
        try:
            async with asyncio.timeout(limits.request_s):
                head = await reader.readuntil(b"\r\n\r\n")
            connection.asked = True
            method, request = parse(head)
            connection.being_answered = True
            shown = _certificate(writer)
            request = request._replace(is_known=self._knows(shown), certificate=shown)
            response = await self._answer(method, request)
        except asyncio.LimitOverrunError:
            response = text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too large")
        except Refused as refused:
            response = text(refused.status, refused.text)
        connection.being_answered, connection.asked = False, True
        writer.transport.set_write_buffer_limits(0)  # so that `drain` returns only when everything is sent
        writer.write(encode(response, head_only=method == "HEAD"))
        async with asyncio.timeout(limits.response_s):
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    def _knows(self, certificate: bytes) -> bool:
        required = self._tls is not None and self._tls.files.client_auth == "required"
        return not required or bool(certificate)

    async def _answer(self, method: str, request: Request) -> Response:
        route = self._routes.get(request.path)
        if route is None:
            return text(HTTPStatus.NOT_FOUND, f"there is no such path; there are {', '.join(self._routes)}")
        if not (request.is_known or route.is_open):
            return text(HTTPStatus.FORBIDDEN, "show a certificate of an authority that is known here")
        if method not in _METHODS:
            return text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        lane = self._lanes.setdefault(route.lane, _Lane())
        try:
            async with asyncio.timeout(self._limits.answer_s):
                return await lane.run(route.answer, request)
        except TimeoutError:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, f"no answer within {self._limits.answer_s:g} s; ask less often")


def _certificate(writer: asyncio.StreamWriter) -> bytes:
    ssl_object = writer.get_extra_info("ssl_object")
    return (ssl_object.getpeercert(binary_form=True) or b"") if ssl_object is not None else b""


class _Lane:
    """Makes one answer after the other, with a rest in between."""

    def __init__(self) -> None:
        self._busy = asyncio.Lock()
        self._until_s = 0.0

    async def run(self, answer: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        loop = asyncio.get_running_loop()
        async with self._busy:
            await asyncio.sleep(max(0.0, self._until_s - loop.time()))
            begun_s = loop.time()
            try:
                return await answer(request)
            finally:
                now_s = loop.time()
                self._until_s = now_s + min(max(REST_S_MIN, REST * (now_s - begun_s)), REST_S_MAX)
