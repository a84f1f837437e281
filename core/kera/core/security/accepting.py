"""Accepting connections over TLS: who has not shaken hands costs little, and not for long.

A connection is handed over when its handshake is over. Until then it has `handshake_s`, and is one of at most
`handshakes_max`, of which the oldest of the host that has most makes room for a new one. Who is refused is told why, by
an alert of TLS, and so is the log; who connects and goes without a word, as probes of a port do, is not worth a line.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from kera.core.base.address import join_address, reason_of
from kera.core.base.crowd import Crowd, host_of
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.security.alerts import alert_of, send_alert
from kera.core.security.refusals import Refusals
from kera.core.security.tls import Tls

log = get_logger("kera.tls")

HANDSHAKES_MAX = 64
HANDSHAKE_S = 10.0
PAUSE_S = 0.1
"""After an accept that failed, as when the process can open no more files."""


def listening(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens at the first address of `host`. Raises ``OSError``."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


class TlsListener:
    """Listens on one socket. Belongs to an event loop."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.BaseProtocol],
        tls: Tls,
        interface: str,
        *,
        handshakes_max: int = HANDSHAKES_MAX,
        handshake_s: float = HANDSHAKE_S,
        only_asks: bool = False,
    ) -> None:
        """Takes `listener`, which listens, and makes a `protocol` of each connection; `interface`: which port it is.

        `only_asks`: see `Tls.server_context`.
        """
        listener.settimeout(0)
        self.sockets = (listener,)
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._refusals = Refusals(interface)
        self._handshake_s = handshake_s
        self._only_asks = only_asks
        self._handshakes = Crowd[asyncio.Task[None]](handshakes_max)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def handshakes(self) -> int:
        """Under way."""
        return len(self._handshakes)

    def close(self) -> None:
        """Accept no more, and give up the handshakes that are under way."""
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop, failing = asyncio.get_running_loop(), Repeated(log)
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                failing.goes_on("cannot accept a connection", reason=reason_of(error))
                await asyncio.sleep(PAUSE_S)
                continue
            failing.over("connections are accepted again")
            peer = _peer(sock)
            task = loop.create_task(self._shake_hands(sock, peer))
            crowded_out = self._handshakes.add(task, host_of(peer))
            task.add_done_callback(self._handshakes.remove)
            if crowded_out is not None:
                crowded_out.cancel()
                self._refusals.tell("too many have not shaken hands yet, and one of those makes room")

    async def _shake_hands(self, sock: socket.socket, peer: str) -> None:
        loop, context = asyncio.get_running_loop(), self._tls.server_context(only_asks=self._only_asks)
        try:
            with sock.dup() as own:  # the loop closes the other one before anything can be said
                try:
                    async with asyncio.timeout(self._handshake_s):
                        await loop.connect_accepted_socket(self._protocol, sock, ssl=context)
                except ssl.SSLError as error:
                    self._refusals.tell(reason_of(error), peer)
                    if alert := alert_of(error):
                        await send_alert(own, alert)
                    raise
        except TimeoutError:
            sock.close()
            self._refusals.tell(f"it has not shaken hands within {self._handshake_s:g} s", peer)
        except OSError as error:
            sock.close()
            log.debug("no connection over TLS has come about", peer=peer, reason=reason_of(error))
        except BaseException:
            sock.close()
            raise


def _peer(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return ""  # it has gone
    return join_address(host, port)
