"""Memory for requests that are arriving, shared by all connections of a server. Pure.

A connection reserves the size of a large request before it reads it. If there is no room, the request stays on the
network until the connection's turn comes, in the order of asking, so that no connection starves. A connection keeps its
reservation for its next request, until others wait for memory. One request is always admitted, however large it is, and
also while all connections with a reservation wait for more, as for the chunks behind a large message: otherwise they
would wait for each other for ever. So all reservations together exceed the maximum by one request at most.

The server prevents a connection from keeping a reservation by sending slowly, see ``frame_server``.
"""

from __future__ import annotations

from typing import Protocol

ARRIVING_BYTES_MAX = 512 << 20


class Receiver(Protocol):
    """A connection that receives large requests."""

    def room_given(self) -> None:
        """Called when the room that it waits for is reserved."""

    def give_back(self) -> None:
        """Called when others wait: it has to call `Arriving.release`, unless a request is arriving."""


class Arriving:
    """Reserves memory for large requests before they are read, in the order in which connections ask."""

    def __init__(self, bytes_max: int = ARRIVING_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        """Bytes reserved by all connections."""
        self._reserved: dict[Receiver, int] = {}
        self._waiting: dict[Receiver, int] = {}
        """Connections that wait, in the order of asking, with the bytes that each needs."""

    @property
    def has_waiting(self) -> bool:
        """Whether a connection waits for room."""
        return bool(self._waiting)

    def reserve(self, receiver: Receiver, length_bytes: int) -> bool:
        """Reserve memory for a request. False: there is no room; `Receiver.room_given` is called later."""
        if length_bytes <= self._reserved.get(receiver, 0):
            return True
        if not self._waiting and self._fits(receiver, length_bytes):
            self._give(receiver, length_bytes)
            return True
        for other in [other for other in self._reserved if other is not receiver]:
            other.give_back()
            if not self._waiting and self._fits(receiver, length_bytes):
                self._give(receiver, length_bytes)
                return True
        self._waiting[receiver] = length_bytes
        self._admit()  # the first one in the queue, if this was the last one with a reservation that did not wait
        return receiver not in self._waiting

    def release(self, receiver: Receiver) -> None:
        """Give up the reservation of a connection, or its place in the queue."""
        self._waiting.pop(receiver, None)
        self.bytes -= self._reserved.pop(receiver, 0)
        self._admit()

    def _admit(self) -> None:
        """Give room to connections that wait, in their order, as far as there is room."""
        for other, length_bytes in list(self._waiting.items()):
            if not self._fits(other, length_bytes):
                return
            del self._waiting[other]
            self._give(other, length_bytes)
            other.room_given()

    def _fits(self, receiver: Receiver, length_bytes: int) -> bool:
        others_bytes = self.bytes - self._reserved.get(receiver, 0)
        return others_bytes + length_bytes <= self.bytes_max or all(
            other is receiver or other in self._waiting for other in self._reserved
        )

    def _give(self, receiver: Receiver, length_bytes: int) -> None:
        self.bytes += length_bytes - self._reserved.get(receiver, 0)
        self._reserved[receiver] = length_bytes
