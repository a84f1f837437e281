"""Alerts to refused TLS clients, where the loop refuses to wait for the client."""

from __future__ import annotations

import asyncio
import socket

from kera.core.security.alerts import send_alert


async def test_an_alert_is_sent_on_a_transports_descriptor_without_an_error() -> None:
    one, other = socket.socketpair()
    with other:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=one)
        await send_alert(one, b"some")
        transport.abort()
        other.setblocking(False)
        assert other.recv(64) == b"some"
