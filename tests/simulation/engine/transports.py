"""One end of a simulated connection: asyncio's transport, with the kernel's buffers behind it.

Written data goes into the kernel's buffer as far as it has room (`Network.window_bytes` for data that the other process
has not taken yet), and from there over the network, in order. The rest waits in the transport, and pauses the protocol.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.engine.network import Network
    from tests.simulation.engine.process import Process

READ_BYTES_MAX = 256 << 10
"""The most bytes that a turn takes from the kernel."""
HIGH_WATER_BYTES = 64 << 10


class SimulatedSocket:
    """The used part of a socket."""

    type = socket.SOCK_STREAM

    def __init__(self, family: socket.AddressFamily, name: Any) -> None:
        self.family = family
        self._name = name
        self.silent_s: float | None = None
        """The time after which a silent peer is given up; None: never."""

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """See `socket.socket`."""
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            self.silent_s = value / 1000

    def getsockname(self) -> Any:
        """See `socket.socket`."""
        return self._name


class SimulatedTransport(asyncio.Transport):
    """See the head of this module."""

    peer: SimulatedTransport

    def __init__(self, network: Network, process: Process, address: Any, peer_address: Any) -> None:
        self.network = network
        self.process = process
        self.machine = process.machine
        self.loop = process.loop
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = SimulatedSocket(family, address)
        super().__init__({"socket": self.socket, "sockname": address, "peername": peer_address})
        self._serial = process.scheduler.serial()
        self._protocol: Any = None
        self._closing = False
        self.gone = False
        """The process has lost the connection."""
        self._lost_by: OSError | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._high, self._low = HIGH_WATER_BYTES, HIGH_WATER_BYTES // 4
        self._writing_paused = False
        self.under_way_bytes = 0
        """Sent bytes that the other process has not taken."""
        self.arrives_s = 0.0
        """The arrival time of the last sent message."""
        self.sent: deque[tuple[str, bytes]] = deque()
        """Messages in flight."""
        self.held: deque[tuple[str, bytes]] = deque()
        """Messages that wait because the way is cut."""
        self.silent_since_s: float | None = None
        """The time since which the way is cut."""
        self._inbox: deque[bytes] = deque()
        self._ended_by_peer = False
        self._reading_paused = False
        self._read_due = False
        self.machine.transports[self] = None

    def __hash__(self) -> int:
        return self._serial

    # -- asyncio's side ----------------------------------------------------------------------------------------

    def begin(self, protocol: Any) -> None:
        """The connection is made; `protocol` gets this end."""
        self._protocol = protocol
        was_lost = self.gone
        protocol.connection_made(self)
        if was_lost:  # before it had a protocol
            self.loop.call_soon(protocol.connection_lost, self._lost_by)
        self._read_soon()

    def write(self, data: Any) -> None:
        """See `asyncio.Transport`; this holds for all following methods."""
        if self._closing:
            return
        piece = bytes(data)
        self._unsent.append(piece)
        self._unsent_bytes += len(piece)
        self._send()
        if self._unsent_bytes > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._finish()

    def abort(self) -> None:
        self._break(None)

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._read_soon()

    def is_reading(self) -> bool:
        return not (self._reading_paused or self._closing)

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    # -- the kernel's side -------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Fill the room in the kernel's buffer."""
        room = self.network.window_bytes - self.under_way_bytes
        while self._unsent and room > 0:
            piece = self._unsent.popleft()
            if len(piece) > room:
                self._unsent.appendleft(piece[room:])
                piece = piece[:room]
            room -= len(piece)
            self._unsent_bytes -= len(piece)
            self.under_way_bytes += len(piece)
            self.network.carry(self, "data", piece)

    def room_again(self) -> None:
        """The other process has taken some bytes."""
        if self.gone or not self._unsent:
            return
        self._send()
        self.loop.call_soon(self._sent)

    def _sent(self) -> None:
        if self._writing_paused and self._unsent_bytes <= self._low and not self.gone:
            self._writing_paused = False
            self._protocol.resume_writing()
        if self._closing and not self._unsent and not self.gone:
            self._finish()

    def arrived(self, kind: str, data: bytes) -> None:
        """A message has arrived from the other end."""
        if self.gone or (self._closing and kind == "data"):
            if kind == "data":
                self.network.carry(self, "reset", b"")
            return
        if kind == "reset":
            self._break(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        elif kind == "end":
            self._ended_by_peer = True
            self._read_soon()
        else:
            self._inbox.append(data)
            self.process.trace.mark(self._serial, data)
            self._read_soon()

    def timed_out(self) -> None:
        """The way was cut for too long."""
        self._break(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))

    def vanish(self) -> None:
        """The process is gone: send a reset to the other end, unless the way is cut."""
        if not self.gone:
            self._forget()
            self.network.carry(self, "reset", b"")

    def _read_soon(self) -> None:
        if not (self._read_due or self._reading_paused or self._closing or self._protocol is None):
            self._read_due = True
            self.loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_due = False
        if self._closing or self._reading_paused:
            return
        if self._inbox:
            taken = self._deliver()
            self.peer.under_way_bytes -= taken
            self.network.taken(self)
        elif self._ended_by_peer:
            self._protocol.eof_received()
            self.close()
            return
        if self._inbox or self._ended_by_peer:
            self._read_soon()

    def _deliver(self) -> int:
        most = self.network.read_bytes(READ_BYTES_MAX)
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            buffer: Any = self._protocol.get_buffer(-1)
            most = min(most, len(buffer))
            taken = 0
            while self._inbox and taken < most:
                piece = self._take(most - taken)
                buffer[taken : taken + len(piece)] = piece
                taken += len(piece)
            self._protocol.buffer_updated(taken)
            return taken
        data = self._take(most)
        self._protocol.data_received(data)
        return len(data)

    def _take(self, most: int) -> bytes:
        piece = self._inbox.popleft()
        if len(piece) > most:
            self._inbox.appendleft(piece[most:])
            piece = piece[:most]
        return piece

    def _finish(self) -> None:
        """Everything was sent: end the connection."""
        self.network.carry(self, "end", b"")
        self._forget()
        self.loop.call_soon(self._protocol.connection_lost, None)

    def _break(self, error: OSError | None) -> None:
        if self.gone:
            return
        self._closing, self._lost_by = True, error
        if error is None or isinstance(error, TimeoutError):
            self.network.carry(self, "reset", b"")
        self._forget()
        if self._protocol is not None:
            self.loop.call_soon(self._protocol.connection_lost, error)

    def _forget(self) -> None:
        self.gone = self._closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._inbox.clear()
        self.machine.transports.pop(self, None)
