"""Serves the push channel on a unix socket: who may connect, the arena's descriptor, bytes in and out.

What is pushed is decided in ``kera.broker.serving.push``. A reader must be of the broker's own user, or root: the file
mode of the socket says the same, but a directory may be shared, and a socket may be handed on.

Limits: `CONNECTIONS_MAX`; per connection, `WRITE_BUFFER_BYTES_MAX` of messages that its reader has not taken, and a few
more: then nothing is pushed and nothing is read any more until it has; `MESSAGE_S_MAX` for one of its messages to come.

Every `ALIVE_INTERVAL_MS` each reader is told that the broker is there. One that hears nothing knows that the broker
stands still, and looks for another one that has taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kera.broker.log.arena import HEAD_BYTES, ROW_BYTES, Arena
from kera.broker.serving.push import Push, PushConnection
from kera.core.errors import ProtocolError, invariant
from kera.core.push import ALIVE, ALIVE_INTERVAL_MS, VERSION, Decoder, Kind, encode
from kera.core.rpc.unix_socket import bind_unix, peer_user
from kera.core.telemetry import get_logger
from kera.v1 import push_pb2

log = get_logger("kera.push")

CONNECTIONS_MAX = 1024
WRITE_BUFFER_BYTES_MAX = 1 << 20
MESSAGE_S_MAX = 30.0
"""From the first byte of a reader's message to its last."""
_ABORT_S = 1.0
"""An aborted connection is gone in the loop's next round; this only bounds a wait that would be for ever."""


class PushServer:
    """See the head of this module. `bind`, then `start`; `close` before the arena is closed."""

    def __init__(
        self,
        push: Push,
        arena: Arena,
        *,
        uid_of: Callable[[socket.socket], int] = peer_user,
        connections_max: int = CONNECTIONS_MAX,
        write_buffer_bytes_max: int = WRITE_BUFFER_BYTES_MAX,
        alive_interval_ms: int = ALIVE_INTERVAL_MS,
        message_s_max: float = MESSAGE_S_MAX,
    ) -> None:
        self.push = push
        self.connections_max = min(connections_max, CONNECTIONS_MAX)
        self.uid_of = uid_of
        self.write_buffer_bytes_max = write_buffer_bytes_max
        self.message_s_max = message_s_max
        self._alive_interval_ms = alive_interval_ms
        self.connections: set[_Connection] = set()
        self.closing = False
        self.hello = b""
        self.arena_fd = os.open(arena.path, os.O_RDONLY | os.O_CLOEXEC)
        """Not the broker's own, by which readers could write."""
        self._arena = arena
        self._path: Path | None = None
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._alive_timer: asyncio.TimerHandle | None = None

    def bind(self, path: Path) -> None:
        """Take `path`, which is removed at close; see `bind_unix`. Nobody can connect before `start`."""
        self._socket, self._path = bind_unix(path), path

    async def start(self, broker_id: int, broker_epoch: int) -> None:
        """Serve, as the broker that the coordinator has registered."""
        invariant(self._socket is not None, "a push server is bound before it starts")
        arena = self._arena
        hello = push_pb2.PushHello(
            version=VERSION,
            broker_id=broker_id,
            broker_epoch=broker_epoch,
            arena_path=str(arena.path),
            arena_bytes=os.fstat(self.arena_fd).st_size,
            slots=arena.slot_count,
            slot_bytes=arena.slot_bytes,
            slots_at=arena.slot(0).arena_offset,
            rows_at=HEAD_BYTES,
            row_bytes=ROW_BYTES,
            alive_interval_ms=self._alive_interval_ms,
        )
        self.hello = encode(Kind.HELLO, hello.SerializeToString())
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=self._socket)
        self._tell_alive()

    def _tell_alive(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self.connections):
            connection.tell_alive(loop.time())
        self._alive_timer = loop.call_later(self._alive_interval_ms / 1000, self._tell_alive)

    async def close(self) -> None:
        """End all connections, and with them the leases of readers."""
        self.closing = True
        if self._alive_timer is not None:
            self._alive_timer.cancel()
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
        lost = [connection.lost for connection in self.connections]
        for connection in list(self.connections):
            connection.abort()
        if lost:
            await asyncio.wait(lost, timeout=_ABORT_S)
        os.close(self.arena_fd)


class _Connection(asyncio.Protocol):
    """One reader."""

    def __init__(self, server: PushServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._decoder = Decoder()
        self._state: PushConnection | None = None
        self.paused = False
        """The reader takes nothing."""
        self._messages = self._messages_seen = 0
        self._unfinished_s: float | None = None
        """Since when the same message has been unfinished."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        """Go now; leases end at once."""
        if self._state is not None:
            self._state.lost()
        if self._transport is not None:
            self._transport.abort()

    def tell_alive(self, now_s: float) -> None:
        """Say that we are here, to a reader that takes what it is sent; end one that does not finish a message."""
        if self._state is None or self._transport is None or self._transport.is_closing() or self.paused:
            return
        self._transport.write(ALIVE)
        if not self._decoder.unfinished or self._state.busy or self._messages != self._messages_seen:
            self._messages_seen, self._unfinished_s = self._messages, None
        elif self._unfinished_s is None:
            self._unfinished_s = now_s
        elif now_s >= self._unfinished_s + self._server.message_s_max:
            seconds = f"{self._server.message_s_max:g} s"
            log.warning("a reader was disconnected", error=f"a message has not come whole within {seconds}")
            self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = transport  # type: ignore[assignment]
        server = self._server
        server.connections.add(self)
        if server.closing or not self._greet(transport):
            self.abort()
            return
        transport.set_write_buffer_limits(high=server.write_buffer_bytes_max)  # type: ignore[attr-defined]
        self._state = PushConnection(
            server.push,
            transport.write,  # type: ignore[attr-defined]
            on_idle=self._read_on,
            on_failed=self._failed,
        )

    def _greet(self, transport: asyncio.BaseTransport) -> bool:
        """Whether the peer may read, and has been given the arena."""
        server, totals = self._server, self._server.push.totals
        # The loop's own is no real socket everywhere; and it has written nothing yet, so this cannot come between.
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
            uid = server.uid_of(sock)
            if uid not in (0, os.getuid()):
                totals.refused += 1
                log.warning("a reader of another user was refused", uid=uid)
                return False
            if len(server.connections) > server.connections_max:
                totals.refused += 1
                log.warning("a reader was refused: there are too many", limit=server.connections_max)
                return False
            try:
                return socket.send_fds(sock, [server.hello], [server.arena_fd]) == len(server.hello)
            except OSError:
                return False  # it is gone already

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        state = self._state
        if state is None:
            return
        try:
            for kind, body in self._decoder.feed(data):
                self._messages += 1
                state.received(kind, body)
        except ProtocolError as error:
            self._failed(error)
        if state.busy and self._transport is not None:
            self._transport.pause_reading()

    def _failed(self, error: ProtocolError) -> None:
        consumer_group = "" if self._state is None else self._state.consumer_group
        log.warning("a reader was disconnected", consumer_group=consumer_group, error=str(error))
        self.abort()

    def _read_on(self) -> None:
        """Read from the peer again, unless it takes nothing, or there is something to do of what it has sent."""
        if self._state is None or self._transport is None or self.paused or self._state.busy:
            return
        self._unfinished_s = None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._state is not None and self._transport is not None:
            self.paused = True
            self._state.pause()
            self._transport.pause_reading()  # what it asks for would be answered

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._state is not None and self._transport is not None:
            self.paused = False
            self._state.resume()
            self._read_on()

    def connection_lost(self, _exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._server.connections.discard(self)
        if self._state is not None:
            self._state.lost()
        if not self.lost.done():
            self.lost.set_result(None)
