"""Sends a peer the reason why a handshake has failed.

TLS has alerts for that. But event loops close the connection and leave the alert in the buffer, so the peer would see
only that the connection was closed. And if data from the peer are still unread then, the kernel discards data that were
sent before. So here the alert is kept with the error, and the owner of the socket sends it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

LINGER_S = 1.0
"""Time for the peer to read the alert, after which it closes the connection."""
LINGER_BYTES_MAX = 1 << 20
"""Maximum of the bytes that the peer may send meanwhile; they are ignored."""
_READ_BYTES = 64 << 10


class AlertingContext(ssl.SSLContext):
    """A context whose handshake errors have the alert (see `alert_of`); for handshakes in memory, as in event loops."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`."""
        made: _AlertingObject = super().wrap_bio(incoming, outgoing, *args, **kwargs)  # type: ignore[assignment]
        made.outgoing = outgoing
        return made


class _AlertingObject(ssl.SSLObject):
    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            error.alert = self.outgoing.read()  # type: ignore[attr-defined]
            raise


AlertingContext.sslobject_class = _AlertingObject


def alert_of(error: BaseException) -> bytes:
    """Return the alert for the peer; empty: none."""
    alert: bytes = getattr(error, "alert", b"")
    return alert


async def send_alert(sock: socket.socket, alert: bytes) -> None:
    """Send `alert`, and wait until the peer closes; the caller then closes `sock`, which is not a transport's."""
    loop = asyncio.get_running_loop()
    taken_bytes = 0
    try:
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(sock, alert)
            sock.shutdown(socket.SHUT_WR)
            while taken_bytes < LINGER_BYTES_MAX:
                data = await loop.sock_recv(sock, _READ_BYTES)
                if not data:
                    return
                taken_bytes += len(data)
    except OSError:  # the peer is gone, or its time is up
        return
    except RuntimeError:  # the loop believes that the descriptor still belongs to a transport that was closed before
        return
