"""Alerts to refused TLS clients, where sending is impossible."""

from __future__ import annotations

import asyncio
import socket

from kera.core.security.alerts import send_alert


async def test_sending_an_alert_on_a_transports_descriptor_raises_no_error() -> None:
    one, other = socket.socketpair()
    with other:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=one)
        await send_alert(one, b"some")
        transport.abort()
