"""Accepts connections over TLS, with bounds on unfinished handshakes in number and time.

A connection is handed over when its handshake is complete. It has `handshake_s` for that. At most `handshakes_max` can
be in progress: for one more, the host with the most loses its oldest one. A peer that is refused gets the reason as an
alert of TLS, and the log gets it, too. A peer that connects and leaves without sending anything, as probes of a port
do, is not logged.
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
"""Pause after an accept that failed, as when the process can open no more files."""


def listening(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at the first address of `host`. Raises ``OSError``."""
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
        """Take over the listening socket `listener`, and make a `protocol` for each connection.

        `interface`: the name of the port, for the log. `only_asks`: see `Tls.server_context`.
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
        """The number of handshakes in progress."""
        return len(self._handshakes)

    def close(self) -> None:
        """Stop accepting, and give up the handshakes in progress."""
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
            with sock.dup() as own:  # the loop closes the original before an alert can be sent
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
        return ""  # the peer is gone
    return join_address(host, port)
