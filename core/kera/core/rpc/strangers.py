"""Bounds on connections that have not authenticated ("strangers"), on servers that require it.

A stranger may authenticate, and nothing else. It has `stranger_s` for that, and `STRANGER_REQUESTS_MAX` requests of at
most `STRANGER_BYTES_MAX`. There may be `STRANGERS_MAX` strangers: for one more, the host with the most loses its oldest
one.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import NamedTuple, Protocol

from kera.core.base.crowd import Crowd, host_of
from kera.core.errors import ProtocolError
from kera.core.rpc.limits import HEAD_BYTES_MAX
from kera.core.rpc.method import Doorkeeper, Evidence, Peer
from kera.core.rpc.unix_socket import peer_user

STRANGER_BYTES_MAX = 64 << 10
STRANGER_REQUESTS_MAX = 8
"""Two are needed: a peer that sends more is guessing, or keeps us busy."""
STRANGERS_MAX = 256


class Stranger(Protocol):
    """A connection that may have to authenticate."""

    peer: Peer

    def abort(self) -> None:
        """End the connection."""
        ...


class Bounds(NamedTuple):
    """Limits of a connection's messages."""

    is_stranger: bool
    head_bytes_max: int
    bulk_bytes_max: int


class Strangers:
    """The strangers of one server."""

    def __init__(self, doorkeeper: Doorkeeper | None, bulk_bytes_max: int) -> None:
        """`doorkeeper`: finds out who the peers are; None: the server does not authenticate."""
        self._doorkeeper = doorkeeper
        self._known = Bounds(is_stranger=False, head_bytes_max=HEAD_BYTES_MAX, bulk_bytes_max=bulk_bytes_max)
        self._here = Crowd[Stranger](STRANGERS_MAX)

    def __len__(self) -> int:
        return len(self._here)

    def arrives(self, one: Stranger, transport: asyncio.BaseTransport) -> Bounds:
        """Admit a new connection, and return its limits. Raises the doorkeeper's errors."""
        if self._doorkeeper is None:
            return self._known
        self._doorkeeper.admit(one.peer, _evidence(one.peer, transport))
        if one.peer.identity is None:
            crowded_out = self._here.add(one, host_of(one.peer.address))
            if crowded_out is not None:
                crowded_out.abort()
        return self.look(one)

    def look(self, one: Stranger) -> Bounds:
        """Return the present limits of a connection."""
        if self._doorkeeper is None or one.peer.identity is not None:
            self._here.remove(one)
            return self._known
        return Bounds(is_stranger=True, head_bytes_max=STRANGER_BYTES_MAX, bulk_bytes_max=0)

    def goes(self, one: Stranger) -> None:
        """Note that a connection is gone."""
        self._here.remove(one)


def check_requests(requests: int) -> None:
    """Raise `ProtocolError` for a stranger that has made too many requests."""
    if requests > STRANGER_REQUESTS_MAX:
        raise ProtocolError(f"it has asked {STRANGER_REQUESTS_MAX} times, and has not authenticated")


def _evidence(peer: Peer, transport: asyncio.BaseTransport) -> Evidence:
    """Return the evidence that a transport has of the peer."""
    if peer.transport == "unix":
        # The loop's own object is not a real socket everywhere.
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
            return Evidence(user_id=peer_user(sock))
    ssl_object = transport.get_extra_info("ssl_object")
    certificate = None if ssl_object is None else ssl_object.getpeercert(binary_form=True)
    return Evidence(certificate=certificate or b"")
