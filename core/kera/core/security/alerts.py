"""Telling a peer why a handshake has failed.

TLS has alerts for that. Event loops close the connection and leave the alert in the buffer, so the peer would learn
only that the connection was closed; and when something that it has sent is still unread then, the kernel takes back
what it was sent before. Here the alert is kept with the error, and sent by whoever has the socket.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

LINGER_S = 1.0
"""For the peer to take the alert, after which it closes the connection."""
LINGER_BYTES_MAX = 1 << 20
"""Maximum of the bytes that the peer sends meanwhile; they are not read."""
_READ_BYTES = 64 << 10


class AlertingContext(ssl.SSLContext):
    """One whose errors of a handshake have the alert, see `alert_of`; for handshakes in memory, as of event loops."""

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
    """The alert for the peer; empty: none."""
    alert: bytes = getattr(error, "alert", b"")
    return alert


async def send_alert(sock: socket.socket, alert: bytes) -> None:
    """Have the peer take `alert`, and end; the caller closes `sock`, which is not a transport's."""
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
    except OSError:  # it has gone, or its time is up
        return
    except RuntimeError:  # for the loop, its descriptor is still that of a transport whose socket was closed before
        return
