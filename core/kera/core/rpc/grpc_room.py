"""Closes silent connections of a gRPC server to make room for peers that use theirs.

gRPC accepts a fixed number of connections and closes further ones at once. It cannot close the idlest for a new one: a
peer that connects and sends nothing keeps its place until the time for the handshake is up, and a few thousand of them
keep out all others. So when most places are taken, connections are closed that have sent next to nothing for `QUIET_S`,
even if they send byte by byte; the one that has been seen silent for longest is the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

from kera.core.base.telemetry import get_logger
from kera.core.rpc.sockets import copies_of_sockets, open_descriptors

log = get_logger("kera.grpc")

LOOK_EVERY_S = 0.5
FULL = 0.8
"""Share of the places from which on connections are closed."""
ROOMY = 0.6
"""Share of the places down to which connections are closed."""
QUIET_S = 1.0
SPOKEN_BYTES = {True: 800, False: 128}
"""Bytes below which a peer counts as silent, with TLS (True) and without: a handshake and a first call have more."""
TOLD_EVERY_S = 10.0

_INFO = struct.Struct("=52xI72xQ")
"""Fields of ``tcp_info``: milliseconds since the last arrival, and the number of bytes altogether."""


Peer = tuple[str, int]


class Room:
    """The connections of one server. Belongs to its event loop."""

    def __init__(self, port: int, connections_max: int, *, encrypted: bool) -> None:
        self._port = port
        self._connections_max = connections_max
        self._spoken_bytes = SPOKEN_BYTES[encrypted]
        self._quiet: dict[Peer, float] = {}
        """Peers that had sent next to nothing at the last look, each with the time since when it is silent."""
        self._told_s = -TOLD_EVERY_S
        self.closed = 0
        """Number of connections closed to make room."""
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def close(self) -> None:
        """Stop looking at connections."""
        self._looking.cancel()
        await asyncio.wait([self._looking])

    async def _look(self) -> None:
        """Make room again and again. A look that fails is logged, and the next one follows."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                if open_descriptors() < FULL * self._connections_max:  # counts all kinds, but is fast
                    self._quiet = {}
                    continue
                closed = await loop.run_in_executor(None, self._make_room, loop.time())
            except Exception as error:  # noqa: BLE001 - after any error, connections must be looked at again
                self._tell("cannot look for connections that say nothing", error=repr(error))
                continue
            self.closed += closed
            if closed:
                event = "most connections are taken: those that say nothing make room"
                self._tell(event, limit=self._connections_max, closed=self.closed)

    def _tell(self, event: str, **details: Any) -> None:
        """Log a warning, at most once per `TOLD_EVERY_S`."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._told_s + TOLD_EVERY_S:
            self._told_s = now_s
            log.warning(event, **details)

    def _make_room(self, now_s: float) -> int:
        """Close silent connections if most places are taken, and return how many were closed.

        It takes some 20 µs for each connection.
        """
        taken, before, self._quiet = 0, self._quiet, {}
        for sock, peer in _connections(self._port):
            taken += 1
            try:
                told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            except OSError:
                continue  # the connection ended since it was listed
            for_ms, bytes_received = _INFO.unpack(told)
            if bytes_received < self._spoken_bytes:
                self._quiet[peer] = min(before.get(peer, now_s), now_s - for_ms / 1000)
        if taken < FULL * self._connections_max:
            return 0
        longest = sorted((since_s, peer) for peer, since_s in self._quiet.items() if now_s >= since_s + QUIET_S)
        to_close = {peer for _, peer in longest[: taken - int(ROOMY * self._connections_max)]}
        closed = 0
        for sock, peer in _connections(self._port):
            if peer in to_close:
                with contextlib.suppress(OSError):  # the peer has left meanwhile, which makes room as well
                    sock.shutdown(socket.SHUT_RDWR)
                closed += 1
        return closed


def _connections(port: int) -> Iterator[tuple[socket.socket, Peer]]:
    """Yield the connections that this process has accepted at a port; each is valid only until the next iteration."""
    for sock in copies_of_sockets():
        with contextlib.suppress(OSError):
            if sock.family in {socket.AF_INET, socket.AF_INET6} and sock.getsockname()[1] == port:
                yield sock, sock.getpeername()[:2]  # fails for the listener, which has no peer
