"""Telling who is refused over TLS, where that cannot be."""

from __future__ import annotations

import asyncio
import socket

from kera.core.security.alerts import send_alert


async def test_a_descriptor_that_the_loop_has_for_a_transports_is_left_alone() -> None:
    one, other = socket.socketpair()
    with other:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=one)
        await send_alert(one, b"some")
        transport.abort()
