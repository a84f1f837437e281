"""Runs the application: opens the port, serves it, and ends with the task that runs it.

uvicorn serves it, within the event loop of who calls: signals are the caller's. What a connection may take, which
uvicorn bounds only once a request is there, is bounded here.
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
    """Serve until it is cancelled. `ready` is told where, once requests are answered.

    Raises `InvalidSettings`, `PortTaken`, and what keeps the cluster from answering.
    """
    settings.check()
    tls = settings.tls()
    house = House(cluster, admin=settings.admin, encrypted=settings.encrypted)
    await house.open()
    try:
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
                log_level="critical",  # what is wrong with a request is between us and who has sent it
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
    try:
        await server.begun.wait()
        started()
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving


async def _listen(settings: ConsoleSettings) -> socket.socket:
    """An open port. Raises `PortTaken`."""
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
    """Leaves signals to who runs it, and tells when it has begun."""

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
    """A connection that has to send a request in time, and of which there are so many at most.

    If there are too many, one that waits for the rest of a request makes room, so slow clients keep nobody out.
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
        """Close another connection: first those without a request before, the oldest of the host that has most."""
        others = [one for one in self.connections if isinstance(one, _Connection) and one is not self]
        waiting = sorted((one for one in others if one.is_waiting), key=lambda one: one.made_s)
        if not waiting:
            return False
        victim = most_crowded([one for one in waiting if one.cycle is None] or waiting, lambda one: one.host)
        self.connections.discard(victim)  # now: the loop tells of its end only in its next round
        victim.transport.abort()
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether no whole request is there that has to be answered."""
        request = self._request
        return request is None or request.response_complete or request.more_body

    @property
    def host(self) -> str:
        """Where it comes from."""
        return host_of(join_address(*self.client)) if self.client else ""

    def data_received(self, data: bytes) -> None:
        before = self._request
        super().data_received(data)
        if self._request is not before and self._arriving is not None:  # a request is there
            self._arriving.cancel()
            self._arriving = None
        elif self._arriving is None and (self._request is None or self._request.response_complete):
            self._expect()  # the next one has begun

    def connection_lost(self, exc: Exception | None) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
        super().connection_lost(exc)

    @property
    def _request(self) -> RequestResponseCycle | None:
        """The last one that has come; None: none has."""
        return self.cycle

    def _expect(self) -> None:
        self._arriving = self.loop.call_later(limits.REQUEST_TIMEOUT_S, self.transport.abort)
