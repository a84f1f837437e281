"""Targets: frames, messages, errors, HTTP and the push channel, as both ends decode them."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Coroutine
from functools import cache
from random import Random
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kera.core.errors import KeraError, ProtocolError, invariant
from kera.core.rpc import Method, api, frames
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer, ServerConnection
from kera.core.rpc.frames import HEADER_BYTES, FrameKind
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.method import Call, Reply
from kera.core.rpc.wire import error_from_message, error_to_message, parse, parse_with_bulk
from kera.server.monitoring import http_server
from kera.v1 import common_pb2
from tests.fuzz.exchanges import (
    METHODS,
    Frame,
    chunk_of,
    conversation,
    filled,
    request_of,
    some_number,
    spoilt_request,
    theirs,
    with_spoilt_header,
)
from tests.fuzz.mutating import mutated, pieces
from tests.fuzz.protobuf import BYTES, spoilt, varint
from tests.fuzz.target import Target
from tests.native_twins import outcome as outcome_of
from tests.native_twins import twin_of
from tests.unit.core.rpc.fake_transport import FakeTransport, feed

T = TypeVar("T")
_NUMBER = struct.Struct("<I")
_BY_NUMBER = {method.number: method for method in METHODS}


@cache
def answer_of(method: Method[Any, Any]) -> Message:
    """A method's answer, with a value in every field."""
    answer: Message = filled(method.response)
    return answer


@cache
def _chunk() -> bytes:
    return chunk_of(theirs(), 0, 0, 9)


@cache
def _requests() -> list[Message]:
    return [request_of(method, theirs()) for method in METHODS]


def same(*outcomes: Any) -> None:
    """Several ways to do the same have the same outcome."""
    first, *others = outcomes
    invariant(all(each == first for each in others), f"they differ: {outcomes!r}"[:600])


# -- frames ------------------------------------------------------------------------------------------------------------


def _frame_header(random_: Random) -> bytes:
    frame = Frame(random_.choice((1, 2, 3)), random_.choice(METHODS).number, some_number(random_), b"head").data
    if random_.random() < 0.5:
        return with_spoilt_header(frame, random_)[: random_.choice((HEADER_BYTES, HEADER_BYTES, 31))]
    return mutated(frame, random_)[:HEADER_BYTES]


def _decode_header(data: bytes) -> str:
    """Decode a header in Python and in the native core, with the same outcome."""
    found = outcome_of(frames.decode_header, memoryview(data), 0, BULK_BYTES_MAX)
    twin = twin_of(frames.decode_header)
    if twin is not None:
        same(found, outcome_of(twin, memoryview(data), 0, BULK_BYTES_MAX))
    if found.error is None:
        return "header"
    if len(data) < HEADER_BYTES:  # callers never pass less
        return "short"
    invariant(issubclass(found.error[0], ProtocolError), f"not refused: {found.error}")
    return "protocol"


def some_requests(random_: Random) -> list[Frame]:
    """Requests of a client, some of them with a changed head or with a chunk."""
    found = []
    for number in range(random_.choice((1, 2, 4))):
        method = random_.choice(METHODS)
        head = spoilt_request(method, theirs(), random_)
        if random_.random() < 0.3:
            head = request_of(method, theirs()).SerializeToString()
        bulk = _chunk() if method is api.MULTI_WRITE_CHUNKS or random_.random() < 0.1 else b""
        found.append(Frame(FrameKind.REQUEST, method.number, number + 1, head, bulk))
    return found


def _to_server(random_: Random) -> bytes:
    return conversation(some_requests(random_), random_)


class Loop:
    """An event loop that runs only within calls: a target plays the network for its protocols."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.unhandled: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))

    def do(self, what: Callable[[], Any]) -> Any:
        """Call a function within the loop, and give the tasks that it began a few turns."""

        async def run() -> Any:
            found = what()
            for _ in range(3):
                await asyncio.sleep(0)
            return found

        found = self.loop.run_until_complete(run())
        unhandled, self.unhandled = self.unhandled, []
        invariant(not unhandled, f"unhandled: {unhandled}")
        return found


_loops: list[Loop] = []


def in_loop(what: Callable[[], Any]) -> Any:
    """Call a function within the loop of this process, see `Loop.do`."""
    if not _loops:
        _loops.append(Loop())
    return _loops[0].do(what)


def in_loop_until(awaitable: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine within the loop of this process."""
    in_loop(lambda: None)
    return _loops[0].loop.run_until_complete(awaitable)


def _echo(method: Method[Any, Any]) -> Callable[[Call[Any]], Reply[Any]]:
    def handler(call: Call[Any]) -> Reply[Any]:
        return Reply(method.response(), [call.bulk] if method.bulk and call.bulk else ())

    return handler


@cache
def _server() -> FrameServer:
    return FrameServer({method: _echo(method) for method in METHODS}, bulk_bytes_max=1 << 16)


def _serve(data: bytes) -> str:
    """A server's framed connection answers with frames, or closes, and raises nothing."""
    size, data = _NUMBER.unpack(data[:4])[0] if len(data) >= 4 else 0, data[4:]
    splits = [part for part in (size & 0xFFFF, size >> 16) if part < len(data)]

    def serve() -> tuple[bytes, bool]:
        connection: ServerConnection = _server().accept("tcp")
        transport = FakeTransport()
        connection.connection_made(transport)
        feed(connection, data, splits)
        connection.frames_taken()
        closed, transport.closed = transport.closed, True
        connection.connection_lost(None)
        return bytes(transport.written), closed

    written, closed = in_loop(serve)
    at = count = 0
    while at < len(written):
        header = frames.decode_header(memoryview(written), at, BULK_BYTES_MAX)
        invariant(header.kind != FrameKind.REQUEST, "a server sends no requests")
        if header.kind == FrameKind.ERROR:
            at_head = at + HEADER_BYTES
            error = error_from_message(parse(common_pb2.Error, written[at_head : at_head + header.head_bytes]))
            invariant(error.code != "internal", f"answered as a defect: {error.message}")
        at += HEADER_BYTES + header.head_bytes + header.bulk_bytes
        count += 1
    return f"{'closed' if closed else 'open'} {'answered' if count else 'silent'}"


def _with_splits(make: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    """Inputs of `make` with the places in front where the data is cut into pieces."""

    def made(random_: Random) -> bytes:
        data = make(random_)
        parts = pieces(data, random_)
        first = min(len(parts[0]) if parts else 0, 0xFFFF)
        second = min(first + len(parts[1]) if len(parts) > 1 else 0, 0xFFFF)
        return _NUMBER.pack(first | second << 16) + data

    return made


ASKED = 8
"""Requests of a client that wait for answers."""


def _from_server(random_: Random) -> bytes:
    """Answers to requests 1 to `ASKED`, where request n calls `METHODS[n - 1]`."""
    found = []
    for _ in range(random_.choice((1, 3, 6))):
        number = random_.randrange(1, ASKED + 1)
        method = METHODS[number - 1]
        answer = answer_of(method)
        head = spoilt(answer, random_) if random_.random() < 0.8 else answer.SerializeToString()
        bulk = _chunk() if random_.random() < 0.3 else b""
        kind = FrameKind.REPLY
        if random_.random() < 0.2:
            kind, head, bulk = FrameKind.ERROR, spoilt_error(random_), b""
            number = random_.choice((number, 0))
        found.append(Frame(kind, method.number, number, head, bulk))
    return conversation(found, random_) if random_.random() < 0.7 else b"".join(frame.data for frame in found)


def _ask(data: bytes) -> str:
    """A client's framed connection ends each request with an answer or an error of KerA's."""
    size, data = _NUMBER.unpack(data[:4])[0] if len(data) >= 4 else 0, data[4:]
    splits = [part for part in (size & 0xFFFF, size >> 16) if part < len(data)]

    def ask() -> list[Any]:
        channel = FrameChannel("tcp", "somewhere")
        transport = FakeTransport()
        channel.connection_made(transport)
        waiting = [
            channel.submit(method, request, timeout_s=60.0)
            for method, request in zip(METHODS[:ASKED], _requests(), strict=False)
        ]
        feed(channel, data, splits)
        transport.closed = True
        channel.connection_lost(None)
        return waiting

    answers = in_loop(ask)
    refused = 0
    for each in answers:
        invariant(each.done(), "a request was left without an end")
        error = each.exception()
        invariant(error is None or isinstance(error, KeraError), f"failed with {error!r}")
        refused += error is not None
    return "all refused" if refused == len(answers) else "some answered"


# -- messages ----------------------------------------------------------------------------------------------------------


def _spoilt_message(random_: Random) -> bytes:
    method = random_.choice(METHODS)
    answer = random_.random() < 0.5
    message = answer_of(method) if answer else request_of(method, theirs())
    data = spoilt(message, random_)
    if method.bulk and random_.random() < 0.7:
        bulk = _chunk()
        piece = varint(15 << 3 | BYTES, random_.choice((0, 0, 0, 3))) + varint(len(bulk)) + bulk
        at = random_.choice((len(data), len(data), 0))
        data = data[:at] + piece + data[at:]
    return _NUMBER.pack(method.number << 1 | answer) + data


def _parse(data: bytes) -> str:
    """A message and its bulk, parsed apart, are what protobuf parses from all of the bytes."""
    number, data = _NUMBER.unpack(data[:4])[0] if len(data) >= 4 else 0, data[4:]
    method = _BY_NUMBER.get(number >> 1, METHODS[0])
    kind = method.response if number & 1 else method.request
    whole: Any = None
    with contextlib.suppress(DecodeError):
        whole = kind.FromString(data)
    if not method.bulk:
        invariant((parse(kind, data) == whole) is (whole is not None), "parsed as something else")
        return "message"
    message, bulk = parse_with_bulk(kind, data)
    invariant(whole is not None, "protobuf takes it for no message")
    if not hasattr(whole, "chunks"):  # bulk goes one way only: here it is an unknown field
        return "message with bulk in vain" if bulk else "message"
    invariant(bytes(bulk) == whole.chunks, "another bulk")
    whole.ClearField("chunks")
    invariant(message == whole, "another message beside the bulk")
    return "message with bulk" if bulk else "message"


def spoilt_error(random_: Random) -> bytes:
    """An error on the wire, with some changes."""
    error = common_pb2.Error(
        code=random_.choice(("data_lost", "invalid_cursor", "not_owner", "corrupt_chunk", "kera", "some", "internal")),
        message="it is not there",
        retriable=True,
        attributes={"available_from": "[1, 2, 3]", "self": "1", "message": "2", "code": "3", "n": "1e999", "x": "{"},
    )
    return spoilt(error, random_)


def _error(data: bytes) -> str:
    """A received error can be sent on."""
    error = error_from_message(parse(common_pb2.Error, data))
    again = error_from_message(parse(common_pb2.Error, error_to_message(error).SerializeToString()))
    invariant(error.code in {again.code, "internal"}, "another error")
    return "error"


# -- HTTP --------------------------------------------------------------------------------------------------------------

_HEADS = (
    b"GET /metrics HTTP/1.1\r\nHost: localhost:1\r\nAccept: text/plain\r\n\r\n",
    b"GET /readyz?x=1 HTTP/1.0\r\nAccept: application/json\r\nContent-Length: 0\r\n\r\n",
    b"HEAD /livez HTTP/1.1\r\nHost: h\r\nUser-Agent: probe/1.0 (a; b)\r\nX-Of: \xe4\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
)


def http_head(random_: Random) -> bytes:
    """A request for metrics or health, with some changes."""
    head = mutated(random_.choice(_HEADS), random_, _HEADS)
    return head + random_.choice((b"", b"\r\n\r\n", b"\r\n"))


def _http(data: bytes) -> str:
    at = data.find(b"\r\n\r\n")
    try:
        method, request = http_server.parse(data[: at + 4] if at >= 0 else b"\r\n\r\n")
    except http_server.Refused as refused:
        http_server.encode(http_server.text(refused.status, refused.text))
        return "refused"
    invariant(request.path.startswith("/") and method.isupper(), "no request of HTTP")
    return "request"


WIRE_TARGETS = (
    Target("frame-header", _frame_header, _decode_header, ("kera.core.rpc.frames",)),
    Target(
        "frames-to-server",
        _with_splits(_to_server),
        _serve,
        ("kera.core.rpc.frames", "kera.core.rpc.frame_server", "kera.core.rpc.handling"),
    ),
    Target(
        "frames-to-client", _with_splits(_from_server), _ask, ("kera.core.rpc.frames", "kera.core.rpc.frame_client")
    ),
    Target("messages", _spoilt_message, _parse, ("kera.core.rpc.wire",)),
    Target("errors", spoilt_error, _error, ("kera.core.rpc.wire", "kera.core.errors")),
    Target("http", http_head, _http, ("kera.server.monitoring.http_server",)),
)
