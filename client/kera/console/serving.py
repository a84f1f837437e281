"""Runs the application: opens the port, serves requests, and ends with the task that runs it.

uvicorn serves it, within the caller's event loop; the caller handles signals. uvicorn limits connections only after a
request has arrived, so this module limits them before.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kera.console import limits
from kera.console.application import application
from kera.console.house import Cluster, House
from kera.console.settings import ConsoleSettings, url_of
from kera.core.base.address import join_address
from kera.core.base.crowd import host_of, most_crowded
from kera.core.errors import PortTaken

BACKLOG = 128


async def serve(settings: ConsoleSettings, cluster: Cluster, *, ready: Callable[[str], None]) -> None:
    """Serve until cancelled. `ready` is called with the address once requests are answered.

    Raises `InvalidSettings`, `PortTaken`, and errors of reaching the cluster.
    """
    settings.check()
    tls = settings.tls()
    house = House(cluster, admin=settings.admin, encrypted=settings.encrypted)
    try:
        await house.open()
        settings.check_reach(secured=house.secured)
        listener = await _listen(settings)
        try:
            app = application(house, settings.known_as)
            config = uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # invalid requests are reported to their senders, and not logged
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=limits.IDLE_CONNECTION_S,
                timeout_graceful_shutdown=limits.STOP_TIMEOUT_S,
                h11_max_incomplete_event_size=limits.REQUEST_BYTES_MAX,
            )
            config.load()
            config.ssl = tls
            await _run(_Server(config), listener, lambda: ready(url_of(settings, listener.getsockname()[1])))
        finally:
            listener.close()
    finally:
        await house.close()


async def _run(server: _Server, listener: socket.socket, started: Callable[[], None]) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: server.begun.set())  # ends the wait if the server cannot start
    try:
        await server.begun.wait()
        if not serving.done():
            started()
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving


async def _listen(settings: ConsoleSettings) -> socket.socket:
    """Open a port, and return its socket. Raises `PortTaken`."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setblocking(False)  # noqa: FBT003 - the library's
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "there is no such host"
        raise PortTaken(
            f"cannot listen at {settings.host}:{settings.port}: {reason}; choose another --listen"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """A server that leaves signals to the caller, and sets `begun` when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.begun.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """A connection with a time limit for requests. The number of connections is bounded, too.

    If there are too many, a connection that waits for the rest of a request is closed, so slow clients cannot block
    others.
    """

    _arriving: asyncio.TimerHandle | None = None
    made_s = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.made_s = self.loop.time()
        if len(self.connections) > limits.CONNECTIONS_MAX and not self._make_room():
            transport.abort()
            return
        self._expect()

    def _make_room(self) -> bool:
        """Close another waiting connection, and return whether there was one.

        Connections that never had a request come first; among them, the oldest one of the host with the most.
        """
        others = [one for one in self.connections if isinstance(one, _Connection) and one is not self]
        waiting = sorted((one for one in others if one.is_waiting), key=lambda one: one.made_s)
        if not waiting:
            return False
        victim = most_crowded([one for one in waiting if one.cycle is None] or waiting, lambda one: one.host)
        self.connections.discard(victim)  # at once, because the loop reports its end only in the next round
        victim.transport.abort()
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether there is no complete request to answer."""
        request = self._request
        return request is None or request.response_complete or request.more_body

    @property
    def host(self) -> str:
        """The client's host."""
        return host_of(join_address(*self.client)) if self.client else ""

    def data_received(self, data: bytes) -> None:
        before = self._request
        super().data_received(data)
        if self._request is not before and self._arriving is not None:  # a request has arrived
            self._arriving.cancel()
            self._arriving = None
        elif self._arriving is None and (self._request is None or self._request.response_complete):
            self._expect()  # the next request has begun

    def connection_lost(self, exc: Exception | None) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
        super().connection_lost(exc)

    @property
    def _request(self) -> RequestResponseCycle | None:
        """The last request; None: there was no request yet."""
        return self.cycle

    def _expect(self) -> None:
        self._arriving = self.loop.call_later(limits.REQUEST_TIMEOUT_S, self.transport.abort)
