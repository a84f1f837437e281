"""Serves the push channel on a unix socket: admits readers, passes descriptors of the arena, and moves bytes.

``kera.broker.serving.push`` decides what is pushed. Readers that run as the broker's own user or as root get memory at
once. Readers of other users are served only if the socket is open to them (`ANY_USER`) and a guard knows their rights.
Such a reader can map the memory of a domain only if it may read the whole domain, and can subscribe only to streams
that it may read.

Limits: at most `CONNECTIONS_MAX` connections. Other users than the broker's own and root have at most half of them, and
at most `STRANGERS_MAX` of these have no memory yet: a further one replaces the oldest of the user that has most. A
connection buffers about `WRITE_BUFFER_BYTES_MAX` of messages that its reader has not taken; beyond that, the broker
neither pushes to it nor reads from it until the reader takes them. A message of a reader has to arrive within
`MESSAGE_S_MAX`. Until a reader has memory, its messages are limited to `STRANGER_BYTES_MAX`, and it is disconnected
after `STRANGER_S_MAX`.

Every `ALIVE_INTERVAL_MS` the broker sends each reader a sign of life. A reader that receives nothing concludes that the
broker hangs, and looks for another broker that has taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kera.broker.log.arena import Arena
from kera.broker.log.arena_file import ArenaFile
from kera.broker.log.arena_head import HEAD_BYTES, ROW_BYTES
from kera.broker.serving.mappings import Mappings
from kera.broker.serving.push import Push, PushConnection
from kera.core.access.rights import Operation
from kera.core.base.crowd import Crowd
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, ProtocolError, Unavailable, invariant
from kera.core.push import (
    ALIVE,
    ALIVE_INTERVAL_MS,
    BODY_BYTES_MAX,
    DEFAULT_DOMAIN,
    STRANGER_BYTES_MAX,
    VERSION,
    Decoder,
    PushKind,
    encode,
)
from kera.core.rpc import api
from kera.core.rpc.handling import error_reply
from kera.core.rpc.method import Call, Evidence, Handler, Peer
from kera.core.rpc.unix_socket import ANY_USER, OWN_USER, bind_unix, peer_user
from kera.core.rpc.wire import error_to_message, parse
from kera.server.access.guard import Door, Guard
from kera.server.access.requirements import Need
from kera.v1 import access_pb2, push_pb2

log = get_logger("kera.push")

CONNECTIONS_MAX = 1024
STRANGERS_MAX = 128
WRITE_BUFFER_BYTES_MAX = 1 << 20
MESSAGE_S_MAX = 30.0
"""Maximum time from the first byte of a reader's message to its last."""
STRANGER_S_MAX = 10.0
"""Maximum time until a reader has memory."""
_ABORT_S = 1.0
"""Maximum wait for aborted connections; they are gone in the loop's next round, so this is only a safeguard."""


class PushServer:
    """Accepts readers on a unix socket within limits, and passes descriptors and messages of push.

    `bind`, then `start`; `close` before the arena is closed.
    """

    def __init__(  # noqa: PLR0913 - a limit each
        self,
        push: Push,
        arena: Arena,
        *,
        uid_of: Callable[[socket.socket], int] = peer_user,
        connections_max: int = CONNECTIONS_MAX,
        write_buffer_bytes_max: int = WRITE_BUFFER_BYTES_MAX,
        alive_interval_ms: int = ALIVE_INTERVAL_MS,
        message_s_max: float = MESSAGE_S_MAX,
        stranger_s_max: float = STRANGER_S_MAX,
        guard: Door | None = None,
        mode: int = OWN_USER,
    ) -> None:
        """`mode`: the socket's access mode; with `ANY_USER`, `guard` decides what readers of other users get."""
        self.push = push
        self.connections_max = min(connections_max, CONNECTIONS_MAX)
        self.uid_of = uid_of
        self.write_buffer_bytes_max = write_buffer_bytes_max
        self.message_s_max = message_s_max
        self._alive_interval_ms = alive_interval_ms
        self.connections: set[_Connection] = set()
        self.others: set[_Connection] = set()
        """The connections of other users."""
        self.others_max = max(1, self.connections_max // 2)
        self.strangers = Crowd[_Connection](min(STRANGERS_MAX, max(1, self.others_max // 2)))
        """The connections of other users that have no memory yet."""
        self.closing = False
        self.stranger_s_max = stranger_s_max
        self.guard = guard if isinstance(guard, Guard) else None
        """Decides what other users may read."""
        self.serves_others = mode == ANY_USER and self.guard is not None
        self._mode = mode
        self.arena = arena
        self.mappings = None if self.guard is None else Mappings(arena, push.memory, self.guard)
        if self.guard is not None:
            self.guard.known.forgotten.append(self._renew)
        self._hello = push_pb2.PushHello()
        self._path: Path | None = None
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._alive_timer: asyncio.TimerHandle | None = None

    def bind(self, path: Path) -> None:
        """Bind the socket to `path`, which `close` removes; see `bind_unix`. Readers can connect after `start`."""
        self._socket, self._path = bind_unix(path, self._mode), path

    async def start(self, broker_id: int, broker_epoch: int) -> None:
        """Serve readers under the id and epoch that the coordinator has given."""
        invariant(self._socket is not None, "a push server is bound before it starts")
        self._hello = push_pb2.PushHello(
            version=VERSION, broker_id=broker_id, broker_epoch=broker_epoch, alive_interval_ms=self._alive_interval_ms
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=self._socket)
        self._tell_alive()

    def hello(self, file: ArenaFile | None) -> bytes:
        """Return the greeting for a reader that gets `file` with it; None: it gets no memory yet."""
        hello = push_pb2.PushHello()
        hello.CopyFrom(self._hello)
        if file is not None:
            hello.memory_domain = file.domain
            hello.arena_path = str(file.path)
            hello.arena_bytes = file.geometry.file_bytes
            hello.slots, hello.slot_bytes = file.geometry.slots, file.geometry.slot_bytes
            hello.slots_at, hello.rows_at, hello.row_bytes = file.geometry.slots_at, HEAD_BYTES, ROW_BYTES
        return encode(PushKind.HELLO, hello.SerializeToString())

    def _renew(self) -> None:
        """Disconnect the readers of files that were renewed: they reconnect and get the new file."""
        renewed = [] if self.mappings is None else self.mappings.renew()
        for connection in [each for each in self.connections if each.file in renewed]:
            connection.abort()

    def _tell_alive(self) -> None:
        loop = asyncio.get_running_loop()
        if self.mappings is not None and self.mappings.is_over:
            self._renew()
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


class _Connection(asyncio.Protocol):
    """One reader."""

    def __init__(self, server: PushServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._decoder = Decoder(STRANGER_BYTES_MAX)
        self._state: PushConnection | None = None
        self._peer = Peer("push", "", end=self.abort)
        self._is_own = False
        """Whether the peer is a process of the broker's own user, or of root."""
        self.file: ArenaFile | None = None
        """The file that the reader got."""
        self._opened = False
        """Whether the reader has opened a domain, or used the memory that it got without asking."""
        self._stranger: asyncio.TimerHandle | None = None
        """Disconnects a reader that does not get memory in time."""
        self._authenticating: asyncio.Task[None] | None = None
        self.paused = False
        """Whether the reader has stopped taking messages."""
        self._messages = self._messages_seen = 0
        self._unfinished_s: float | None = None
        """When an unfinished message was first noticed, if it is still unfinished."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        """Disconnect at once, and end the reader's leases."""
        self._server.others.discard(self)
        if self._state is not None:
            self._state.lost()
        if self._transport is not None:
            self._transport.abort()

    def tell_alive(self, now_s: float) -> None:
        """Send a sign of life to a reader that takes messages; disconnect one that does not finish a message."""
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
        if server.closing or not self._admit(transport):
            self.abort()
            return
        transport.set_write_buffer_limits(high=server.write_buffer_bytes_max)  # type: ignore[attr-defined]
        if self._is_own:
            self._give_default()
            return
        crowded_out = server.strangers.add(self, self._peer.address)
        if crowded_out is not None:
            server.push.totals.refused += 1
            crowded_out.abort()
        transport.write(server.hello(None))  # type: ignore[attr-defined]
        loop = asyncio.get_running_loop()
        self._stranger = loop.call_later(server.stranger_s_max, self._took_too_long)

    def _admit(self, transport: asyncio.BaseTransport) -> bool:
        """Whether the peer may connect; logs and counts a refusal."""
        server, totals = self._server, self._server.push.totals
        with self._real_socket(transport) as sock:
            uid = server.uid_of(sock)
        self._is_own = uid in (0, os.getuid())
        if not self._is_own and not server.serves_others:
            totals.refused += 1
            log.warning("a reader of another user was refused", uid=uid)
            return False
        if not self._is_own:
            server.others.add(self)
        if len(server.connections) > server.connections_max or len(server.others) > server.others_max:
            totals.refused += 1
            limit = server.connections_max if self._is_own else server.others_max
            log.warning("a reader was refused: there are too many", uid=uid, limit=limit)
            return False
        self._peer.address = f"uid {uid}"
        try:
            if server.guard is not None:
                server.guard.admit(self._peer, Evidence(user_id=uid))
        except KeraError as error:
            self._refuse(error)
            return False
        return True

    @staticmethod
    def _real_socket(transport: asyncio.BaseTransport) -> socket.socket:
        """Return a duplicate of the transport's socket: the loop's own is not a real socket everywhere."""
        return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))

    def _took_too_long(self) -> None:
        self._server.push.totals.refused += 1
        log.warning("disconnected a reader: it did not authenticate and name its streams in time")
        self.abort()

    def _give_default(self) -> None:
        try:
            file = self._server.arena.file_for_readers(DEFAULT_DOMAIN)
        except KeraError as error:
            self._refuse(error)
            self.abort()
        else:
            if not self._give(file):
                self.abort()

    def _give(self, file: ArenaFile) -> bool:
        """Give the peer the memory of a domain; False if it is gone."""
        server, transport = self._server, self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False  # the descriptor has to follow what was written, and sending it must not wait
        hello = server.hello(file)
        if server.mappings is not None:
            server.mappings.give(file, self._peer.identity)
        try:
            fd = file.open_for_readers()  # the broker's own descriptor would let readers write
            try:
                with self._real_socket(transport) as sock:
                    if socket.send_fds(sock, [hello], [fd]) != len(hello):
                        return False
            finally:
                os.close(fd)
        except OSError:
            return False  # the peer has disconnected
        self.file = file
        server.strangers.remove(self)
        if self._stranger is not None:
            self._stranger.cancel()
        self._decoder.body_bytes_max = BODY_BYTES_MAX
        if self._state is not None:
            self._state.lost()
        self._state = PushConnection(
            server.push,
            transport.write,
            file=file,
            may_read=None if self._is_own else self._may_read,
            on_idle=self._read_on,
            on_failed=self._failed,
        )
        return True

    def _may_read(self, stream_id: int) -> None:
        if self._server.guard is not None:
            self._server.guard.check(self._peer, Need(Operation.READ, stream_id))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            for kind, body in self._decoder.feed(data):
                self._messages += 1
                self._received(kind, body)
        except ProtocolError as error:
            self._failed(error)
        if self._state is not None and self._state.busy and not self._transport.is_closing():
            self._transport.pause_reading()

    def _received(self, kind: PushKind, body: bytes) -> None:
        if kind is PushKind.OPEN:
            self._open(parse(push_pb2.PushOpen, body).memory_domain or DEFAULT_DOMAIN)
        elif kind is PushKind.AUTHENTICATE:
            self._authenticate(body)
        elif self._state is None:
            raise ProtocolError(f"a reader that has no memory yet does not send {kind.name}")
        else:
            self._opened = True
            self._state.received(kind, body)

    def _open(self, domain: str) -> None:
        if self._opened or self._authenticating is not None:
            raise ProtocolError("a reader opens one memory domain, once, before it asks for anything else")
        server = self._server
        try:
            if server.mappings is not None and not self._is_own:
                server.mappings.check(self._peer, domain)
                self._peer.asked = True
            if domain not in {stream.memory_domain for stream in server.push.streams}:
                raise Unavailable(f"there is no stream of memory domain {domain!r} at this broker", domain=domain)
            file = server.arena.file_for_readers(domain)
        except KeraError as error:
            self._refuse(error)
            return
        self._opened = True
        if not self._give(file):
            self.abort()

    def _authenticate(self, body: bytes) -> None:
        guard = self._server.guard
        handler = None if guard is None else guard.service().get(api.AUTHENTICATE)
        if handler is None or self._authenticating is not None or self._transport is None:
            raise ProtocolError("this connection needs no authentication, or has begun it already")
        request = parse(access_pb2.AuthenticateRequest, body)
        self._transport.pause_reading()
        self._authenticating = asyncio.create_task(self._ask(handler, request))

    async def _ask(self, handler: Handler, request: access_pb2.AuthenticateRequest) -> None:
        try:
            reply = handler(Call(request, memoryview(b""), self._peer))
            answer = (await reply if inspect.isawaitable(reply) else reply).message
        except Exception as error:  # noqa: BLE001 - whatever the handler raises is answered
            self._write(encode(PushKind.REFUSED, error_reply(error, api.AUTHENTICATE).SerializeToString()))
        else:
            self._write(encode(PushKind.AUTHENTICATED, answer.SerializeToString()))
        finally:
            self._authenticating = None
            self._read_on()

    def _refuse(self, error: KeraError) -> None:
        self._write(encode(PushKind.REFUSED, error_to_message(error).SerializeToString()))

    def _write(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(message)

    def _failed(self, error: ProtocolError) -> None:
        consumer_group = "" if self._state is None else self._state.consumer_group
        log.warning("a reader was disconnected", consumer_group=consumer_group, error=str(error))
        self.abort()

    def _read_on(self) -> None:
        """Read from the peer again, unless it takes no messages, or its earlier requests are not carried out yet."""
        if self._transport is None or self.paused or (self._state is not None and self._state.busy):
            return
        self._unfinished_s = None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._transport is not None:
            self.paused = True
            if self._state is not None:
                self._state.pause()
            self._transport.pause_reading()  # its requests would cause more answers

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._transport is not None:
            self.paused = False
            if self._state is not None:
                self._state.resume()
            self._read_on()

    def connection_lost(self, _exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._server.connections.discard(self)
        self._server.others.discard(self)
        self._server.strangers.remove(self)
        if self._stranger is not None:
            self._stranger.cancel()
        if self._authenticating is not None:
            self._authenticating.cancel()
        if self._state is not None:
            self._state.lost()
        self._peer.closed()
        if not self.lost.done():
            self.lost.set_result(None)
