"""Connections of which nobody knows whose they are, where somebody has to: few, small, and not for long.

Such a connection may authenticate, and nothing else. It has `stranger_s` for that, requests of at most
`STRANGER_BYTES_MAX`, and a place among `STRANGERS_MAX`, of which the oldest makes room.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import NamedTuple, Protocol

from kera.core.rpc.limits import HEAD_BYTES_MAX
from kera.core.rpc.method import Doorkeeper, Evidence, Peer
from kera.core.rpc.unix_socket import peer_user

STRANGER_BYTES_MAX = 64 << 10
STRANGERS_MAX = 256


class Stranger(Protocol):
    """A connection."""

    peer: Peer

    def abort(self) -> None:
        """End it."""
        ...


class Bounds(NamedTuple):
    """What a connection may send."""

    is_stranger: bool
    head_bytes_max: int
    bulk_bytes_max: int


class Strangers:
    """Those of one server."""

    def __init__(self, doorkeeper: Doorkeeper | None, bulk_bytes_max: int) -> None:
        """`doorkeeper`: finds out whose connections are; None: nobody asks."""
        self._doorkeeper = doorkeeper
        self._known = Bounds(is_stranger=False, head_bytes_max=HEAD_BYTES_MAX, bulk_bytes_max=bulk_bytes_max)
        self._here: dict[Stranger, None] = {}
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._here)

    def arrives(self, one: Stranger, transport: asyncio.BaseTransport) -> Bounds:
        """What a connection may send that was made just now."""
        if self._doorkeeper is None:
            return self._known
        self._doorkeeper.admit(one.peer, _evidence(one.peer, transport))
        return self.look(one)

    def look(self, one: Stranger) -> Bounds:
        """What it may send now."""
        if self._doorkeeper is None or one.peer.identity is not None:
            self._here.pop(one, None)
            return self._known
        self._here[one] = None
        if len(self._here) > STRANGERS_MAX:
            oldest = next(iter(self._here))
            del self._here[oldest]
            oldest.abort()
        return Bounds(is_stranger=True, head_bytes_max=STRANGER_BYTES_MAX, bulk_bytes_max=0)

    def goes(self, one: Stranger) -> None:
        """It is gone."""
        self._here.pop(one, None)


def _evidence(peer: Peer, transport: asyncio.BaseTransport) -> Evidence:
    """What a transport knows of the peer."""
    if peer.transport == "unix":
        # The loop's own is no real socket everywhere.
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
            return Evidence(user_id=peer_user(sock))
    ssl_object = transport.get_extra_info("ssl_object")
    certificate = None if ssl_object is None else ssl_object.getpeercert(binary_form=True)
    return Evidence(certificate=certificate or b"")
