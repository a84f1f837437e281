"""Sends inputs to the ports of daemons, and checks the answers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kera.core.errors import KeraError, ProtocolError, error_from_wire
from kera.core.rpc import Method, api
from kera.core.rpc.frames import HEADER_BYTES, FrameKind, decode_header
from kera.core.rpc.grpc_options import AUTHORIZATION, BEARER, ERROR_METADATA
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.v1 import access_pb2, common_pb2
from tests.fuzz.exchanges import METHODS, Frame
from tests.fuzz.ports import Called, Sent, has_error

CONNECT_S = 10.0
ANSWER_S = 3.0
"""Timeout of an answer; the caller then gives up, like a client that goes away."""
CLOSED_S = 0.5
"""Timeout of an answer after the sender has closed its side."""
READ_BYTES = 1 << 16
_BY_NUMBER = {method.number: method for method in METHODS}
_BY_PATH = {method.path: method for method in METHODS}


class Port(NamedTuple):
    """An address where a daemon listens, and the kind of client that connects."""

    daemon: str
    role: str
    kind: str
    """The name of the address in the daemon's ready line."""
    address: str
    who: str = ""
    """The kind of client, where daemons ask who it is."""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.daemon, self.kind, self.who)))


class Access(NamedTuple):
    """Credentials for daemons that ask who a client is."""

    ca: Path | None = None
    """The certificate authority of a cluster with TLS."""
    token: str = ""
    """The token of a known user."""


OPEN = Access()


class Defect(Exception):
    """An answer that reports a defect of a daemon."""


class Talk:
    """Connections to a port, one after the other, and their outcomes."""

    def __init__(self, port: Port, access: Access = OPEN) -> None:
        self.port = port
        self._access = access
        self._speaks = access.ca is not None or not port.who
        """Whether answers are in the port's protocol; if not, they are TLS's."""
        self._first = b""
        """The first frame of a connection."""
        if access.token and port.kind.startswith("frames"):
            shown = access_pb2.AuthenticateRequest(token=access.token).SerializeToString()
            self._first = Frame(FrameKind.REQUEST, api.AUTHENTICATE.number, 1 << 32, shown).data
        self._context: ssl.SSLContext | None = None
        if access.ca is not None and port.kind.endswith("_address"):
            self._context = ssl.create_default_context(cafile=access.ca)
            if port.kind == "grpc_address":
                self._context.set_alpn_protocols(["h2"])
        self.outcomes: Counter[str] = Counter()
        self._channel: grpc.aio.Channel | None = None

    async def close(self) -> None:
        """Close what is open."""
        if self._channel is not None:
            await self._channel.close()

    async def say(self, what: Sent | Called) -> None:
        """Send an input, and check its answers. Raises `Defect`."""
        if isinstance(what, Called):
            await self._call(what)
            return
        try:
            reader, writer = await self.connected()
        except (OSError, TimeoutError) as error:
            if self._context is not None and isinstance(error, ConnectionResetError | ssl.SSLError):
                self.outcomes["crowded out"] += 1  # the daemon drops some unfinished handshakes to make room
                return
            raise Defect(f"cannot connect: {error!r}") from error
        try:
            answers = await self._answers(reader, writer, what)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self.outcomes[type(error).__name__] += 1
            return
        finally:
            writer.transport.abort()
        if self.port.kind.startswith("frames") and self._speaks:
            self._look_at_frames(answers, what)
        else:
            self.outcomes["answered" if answers else "closed"] += 1

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection. Raises `OSError` and `TimeoutError`."""
        async with asyncio.timeout(CONNECT_S):
            if self.port.kind.endswith("_path"):
                return await asyncio.open_unix_connection(self.port.address)
            host, _, number = self.port.address.rpartition(":")
            return await asyncio.open_connection(host, int(number), ssl=self._context)

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: Sent) -> bytes:
        if self._first:
            writer.write(self._first)
            async with asyncio.timeout(CONNECT_S):
                header = await reader.readexactly(HEADER_BYTES)
                await reader.readexactly(int.from_bytes(header[16:20], "little"))
            if header[3] == FrameKind.ERROR:
                raise Defect("whom it should know it does not know")
        writer.write(what.data)
        requests = what.requests
        if not requests and writer.can_write_eof():
            writer.write_eof()  # makes the daemon end the connection, whatever it waits for
        found = bytearray()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S if requests else CLOSED_S):
                while not (requests and _replies(found) >= requests):
                    data = await reader.read(READ_BYTES)
                    if not data:
                        break
                    found += data
                    if not what.requests and self.port.kind == "push_unix_path" and len(found) > READ_BYTES:
                        break
        return bytes(found)

    def _look_at_frames(self, answers: bytes, what: Sent) -> None:
        count = at = 0
        while at + HEADER_BYTES <= len(answers):
            try:
                header = decode_header(memoryview(answers), at, BULK_BYTES_MAX)
            except ProtocolError as error:
                raise Defect(f"answered with what is not a frame: {error}") from error
            head = answers[at + HEADER_BYTES : at + HEADER_BYTES + header.head_bytes]
            if len(head) < header.head_bytes:
                break
            if header.kind == FrameKind.ERROR:
                self._look_at_error(common_pb2.Error.FromString(head))
            else:
                self._look_at_answer(_BY_NUMBER[header.method], head)
            count += 1
            at += HEADER_BYTES + header.head_bytes + header.bulk_bytes
        if count < what.requests:
            self.outcomes["not answered"] += what.requests - count
        elif not count:
            self.outcomes["silent"] += 1

    def _look_at_error(self, error: common_pb2.Error) -> None:
        found = error_from_wire(error.code, error.message, dict(error.attributes))
        self.outcomes[error.code] += 1
        if error.code == "internal" or type(found) is KeraError:
            raise Defect(f"answered as a defect, {error.code}: {error.message}")

    def _look_at_answer(self, method: Method[Any, Any], head: bytes) -> None:
        self.outcomes["answered"] += 1
        text = has_error(method.response.FromString(head))
        if text is not None:
            raise Defect(f"{method.name} answered as a defect: {text}")

    # -- gRPC --------------------------------------------------------------------------------------------------

    async def _call(self, what: Called) -> None:
        if self._channel is None:
            options = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]
            if self._access.ca is None:
                self._channel = grpc.aio.insecure_channel(self.port.address, options=options)
            else:
                credentials = grpc.ssl_channel_credentials(self._access.ca.read_bytes())
                self._channel = grpc.aio.secure_channel(self.port.address, credentials, options=options)
        try:
            answers = await self._answers_to(self._channel, what)
        except grpc.aio.AioRpcError as error:
            self._look_at_rpc_error(what, error)
            return
        except (ValueError, TypeError, grpc.aio.UsageError):  # metadata that no client of gRPC sends
            self.outcomes["not sent"] += 1
            return
        for data in answers:
            if what.path in _BY_PATH:
                self._look_at_answer(_BY_PATH[what.path], data)
        if not answers:
            self.outcomes["no answer"] += 1

    async def _answers_to(self, channel: grpc.aio.Channel, what: Called) -> list[bytes]:
        metadata = what.metadata
        if self._access.token:
            metadata = [*metadata, (AUTHORIZATION, BEARER + self._access.token)]
        if not what.is_stream:
            unary: Any = channel.unary_unary(what.path)
            return [await unary(what.messages[0], metadata=metadata, timeout=ANSWER_S)]
        stream: Any = channel.stream_stream(what.path)
        return [data async for data in stream(iter(what.messages), metadata=metadata, timeout=ANSWER_S)]

    def _look_at_rpc_error(self, what: Called, error: grpc.aio.AioRpcError) -> None:
        for key, value in error.trailing_metadata() or ():
            if key != ERROR_METADATA or not isinstance(value, bytes):
                continue
            with contextlib.suppress(DecodeError):
                self._look_at_error(common_pb2.Error.FromString(value))
                return
        self.outcomes[error.code().name] += 1
        if error.code() is grpc.StatusCode.UNKNOWN and what.path in _BY_PATH:
            raise Defect(f"{what.path} failed without an error of KerA's: {error.details()}")


def _replies(data: bytearray) -> int:
    """The number of whole frames."""
    view, at, count = memoryview(bytes(data)), 0, 0
    while at + HEADER_BYTES <= len(view):
        head_bytes = int.from_bytes(view[at + 16 : at + 20], "little")
        bulk_bytes = int.from_bytes(view[at + 20 : at + 24], "little")
        at += HEADER_BYTES + head_bytes + bulk_bytes
        count += at <= len(view)
    return count
