"""A small server of HTTP that bears whoever connects: GET and HEAD, one request for each connection.

It has a thread and an event loop of its own, so it answers while the daemon's loop is stuck, and the daemon's loop
hears nothing of those who connect. Promises:

* A request's head has `head_bytes_max` and `request_s` to come, an answer `answer_s` to be made and `response_s` to
  be taken.
* At most `connections_max` at once. One too many has another closed of those that have asked nothing yet, else of those
  that do not take their answer, and of these the oldest of the host that has most: probes get through though others
  hold on to their connections. Only when all are being answered the new one is closed.
* Of the time, what is served has `1 / (1 + REST)` at most, per lane: whoever asks too often waits. Lanes do not wait
  for each other, so a scrape holds up no probe.
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
"""After an answer took so long to make, for so many times as long none is made in its lane."""
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
    """By name in small letters; of one that is repeated the last."""
    is_known: bool = True
    """Whether who asks has shown a certificate, where that is required."""
    certificate: bytes = b""
    """That who asks has shown, and TLS has verified."""


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
    """Also for those who are not known: probes show no certificates."""


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
    """The request is not one that is answered here."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def parse(head: bytes) -> tuple[str, Request]:
    """The method, and the request; `head` ends with its empty line. Raises `Refused`."""
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
    """As it is sent."""
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
    """An answer of a line or a few."""
    return Response(status, f"{said}\n".encode())


class _Connection:
    """Somebody who has connected."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        peer = writer.get_extra_info("peername")
        self.host = host_of(join_address(*peer[:2])) if peer else ""
        self.being_answered = False
        self.asked = False

    def cut_off(self) -> None:
        """At once: not even the kernel keeps what it has not sent. Does nothing to one that has ended."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None:  # over TLS there is none any more once it has ended
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.writer.transport.abort()


class HttpServer:
    """Serves GET and HEAD on a thread of its own, within limits that keep room for probes.

    `listen` and `close` are for the thread that owns it.
    """

    def __init__(self, routes: Mapping[str, Route], limits: Limits = LIMITS, tls: Tls | None = None) -> None:
        """`routes`: by path. `tls`: HTTPS is spoken, and nothing else."""
        self._routes = routes
        self._limits = limits
        self._tls = tls
        self._lanes: dict[str, _Lane] = {}
        self._connections: dict[_Connection, None] = {}
        """The oldest first."""
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
        self._started.wait()  # else it could be told to stop before it runs
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Serve no more; who is connected is cut off."""
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
                serving.close()  # it has a task, which would go on for ever
            else:
                loop.remove_reader(listener.fileno())  # who is just being accepted is, and is cut off then
            for task in self._tasks:
                task.cancel()
            for connection in self._connections:
                connection.cut_off()
            while tasks := asyncio.all_tasks(loop):  # also those that are about to take up a connection
                loop.run_until_complete(asyncio.wait(tasks))
            serving.close()
            loop.run_until_complete(asyncio.sleep(0))  # what was cut off is closed in the next round
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
        victim.being_answered = True  # it has been chosen, and is gone in a moment
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
        writer.transport.set_write_buffer_limits(0)  # so that all of it has gone when `drain` returns
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
    """One answer after the other, with a rest in between."""

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
