"""Calls over gRPC of which nobody knows whose they are, where somebody has to: little is taken of them.

gRPC receives a message as a whole, of whatever size its limit allows, and a server can tell it neither that one method
takes less than another nor that one caller does. So a call is looked at before its message is: of a stranger's nothing
is received, unless it is to authenticate. Those messages are few at a time and have to be there soon: of more the
oldest of the host that sends most makes room, which is seldom one that came with its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kera.core.access.identity import not_authenticated
from kera.core.errors import ProtocolError, RecordTooLarge, Unavailable
from kera.core.rpc import api
from kera.core.rpc.crowd import Crowd, host_of
from kera.core.rpc.method import Method, Peer
from kera.core.rpc.strangers import STRANGER_BYTES_MAX

RECEIVING_MAX = 8
"""Messages of strangers that are being received."""
RECEIVE_S = 5.0
"""Within which one has to be there."""


class GrpcStrangers:
    """Those of one server."""

    def __init__(self, *, receiving_max: int = RECEIVING_MAX, receive_s: float = RECEIVE_S) -> None:
        self._receive_s = receive_s
        self._receiving = Crowd[asyncio.Future[bytes]](receiving_max)

    async def message(self, peer: Peer, method: Method[Any, Any], requests: AsyncIterator[bytes]) -> bytes:
        """The request of a unary call. Raises `AuthenticationFailed` if nothing is received of it."""
        if peer.identity is not None:
            return await anext(requests, b"")
        check_known(peer, method)
        return await self.receive(requests, peer.address)

    async def receive(self, requests: AsyncIterator[bytes], address: str) -> bytes:
        """The first message of a stranger. Raises `Unavailable`, `ProtocolError` and `RecordTooLarge`."""
        receiving = asyncio.ensure_future(anext(requests, b""))
        crowded_out = self._receiving.add(receiving, host_of(address))
        if crowded_out is not None:
            crowded_out.cancel()
        try:
            done, _ = await asyncio.wait([receiving], timeout=self._receive_s)
        finally:
            self._receiving.remove(receiving)
            if not receiving.done():
                receiving.cancel()
        if not done:
            raise ProtocolError(f"a request to authenticate has not come whole within {self._receive_s:g} s")
        if receiving.cancelled():
            raise Unavailable("too many are about to authenticate, and this request has not come whole; try again")
        data = receiving.result()
        if len(data) > STRANGER_BYTES_MAX:
            raise RecordTooLarge(
                f"a request of {len(data)} bytes of who has not authenticated", limit=STRANGER_BYTES_MAX
            )
        return data


def check_known(peer: Peer, method: Method[Any, Any]) -> None:
    """Raises `AuthenticationFailed` for a call of somebody unknown that is not to become known."""
    if peer.identity is None and method is not api.AUTHENTICATE:
        raise not_authenticated()
