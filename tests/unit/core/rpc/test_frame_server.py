"""The serving end of framed connections, with peers that a channel would never be."""

import asyncio
import contextlib
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.core.errors import ProtocolError, UnknownStream
from kera.core.rpc import Call, Reply, Service
from kera.core.rpc.frame_server import FrameServer, ServerConnection, Timing
from kera.core.rpc.frames import (
    HEADER_BYTES,
    NO_REQUEST,
    FrameHeader,
    FrameKind,
    decode_header,
    encode_error,
    encode_frame,
    with_header,
)
from kera.core.rpc.limits import BULK_BYTES_MAX, REQUESTS_IN_FLIGHT_MAX, SEND_BUFFER_BYTES_MAX
from kera.core.rpc.outbox import GATHERED_BYTES_MAX
from kera.core.rpc.wire import error_from_message
from kera.v1 import common_pb2
from tests.unit.core.rpc.fake_transport import FakeTransport, feed
from tests.unit.core.rpc.transports import (
    ECHO,
    HOST,
    TIMEOUT_S,
    UNARY,
    Closing,
    EchoRequest,
    EchoResponse,
    UnaryResponse,
    answer,
    echo,
    eventually,
    numbered,
    settled,
    text_of,
)

KIB = 1 << 10
MIB = 1 << 20


def request(number: int, bulk: bytes = b"") -> bytes:
    return b"".join(encode_frame(FrameKind.REQUEST, ECHO, number, numbered(number), [bulk], BULK_BYTES_MAX))


class RawClient:
    """A socket; the test decides each byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> tuple[FrameHeader, bytes, bytes]:
        async with asyncio.timeout(TIMEOUT_S):
            header = decode_header(memoryview(await self.reader.readexactly(HEADER_BYTES)), 0, BULK_BYTES_MAX)
            head = await self.reader.readexactly(header.head_bytes)
            return header, head, await self.reader.readexactly(header.bulk_bytes)

    async def ended(self) -> bool:
        async with asyncio.timeout(TIMEOUT_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True

    async def close(self) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


UNHURRIED = Timing(slice_s=60.0)
"""So long that a busy machine does not make a frame a slow one."""


class Harness:
    """A server on a real socket, and raw clients."""

    def __init__(self) -> None:
        self.server = FrameServer({})
        self.port = 0
        self._closing = Closing()

    async def serve(self, service: Service, timing: Timing = UNHURRIED, **options: Any) -> None:
        self.server = self._closing(FrameServer(service, timing=timing, **options))
        self.port = await self.server.listen_tcp(HOST, 0)

    async def connect(self, receive_bytes: int = 0) -> RawClient:
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (HOST, self.port))
        return self._closing(RawClient(*await asyncio.open_connection(sock=sock, limit=KIB)))

    async def close(self) -> None:
        await self._closing.close()


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    yield harness
    await harness.close()


# --- replies that go together ------------------------------------------------------------------------------


class CountingTransport(FakeTransport):
    """Counts writes: each would be a system call."""

    def __init__(self, lost: Callable[[Exception | None], None]) -> None:
        super().__init__()
        self._lost = lost
        self.writes: list[list[int]] = []
        """The answered requests of each write."""

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Any) -> None:
        data, at, ids = b"".join(list_of_data), 0, []
        while at < len(data):
            header = decode_header(memoryview(data), at, BULK_BYTES_MAX)
            ids.append(header.request_id)
            at += HEADER_BYTES + header.head_bytes + header.bulk_bytes
        self.writes.append(ids)

    def close(self) -> None:
        if not self.closed:
            asyncio.get_running_loop().call_soon(self._lost, None)
        super().close()


async def connected(
    harness: Harness, service: Service, timing: Timing = UNHURRIED
) -> tuple[ServerConnection, CountingTransport]:
    await harness.serve(service, timing)
    connection = harness.server.accept("tcp")
    transport = CountingTransport(connection.connection_lost)
    connection.connection_made(transport)
    return connection, transport


async def test_replies_to_requests_that_arrived_together_leave_together(harness: Harness) -> None:
    connection, transport = await connected(harness, {ECHO: lambda _: Reply(EchoResponse())})

    feed(connection, request(1) + request(2) + request(3) + request(4)[:-1])
    assert transport.writes == [[1, 2, 3]]
    feed(connection, request(4)[-1:])

    assert transport.writes == [[1, 2, 3], [4]]


async def test_gathered_replies_have_a_size_limit(harness: Harness) -> None:
    text = "x" * (GATHERED_BYTES_MAX // 2)
    connection, transport = await connected(harness, {ECHO: lambda _: Reply(answer(text))})

    feed(connection, b"".join(request(number) for number in range(1, 6)))

    assert transport.writes == [[1, 2], [3, 4], [5]]


async def test_a_reply_with_bulk_keeps_its_order(harness: Harness) -> None:
    def handler(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        return Reply(EchoResponse(), [memoryview(bytes(call.bulk))] if call.bulk else [])

    connection, transport = await connected(harness, {ECHO: handler})

    feed(connection, request(1) + request(2, b"bulk") + request(3))

    assert [number for ids in transport.writes for number in ids] == [1, 2, 3]
    assert transport.writes[-1] == [3]


async def test_deferred_replies_ready_together_leave_together_and_at_once(harness: Harness) -> None:
    waiting: list[asyncio.Future[Any]] = []

    def defer(_: Call[EchoRequest]) -> asyncio.Future[Any]:
        waiting.append(asyncio.get_running_loop().create_future())
        return waiting[-1]

    connection, transport = await connected(harness, {ECHO: defer})
    feed(connection, b"".join(request(number) for number in range(1, 6)))

    for future in waiting[:3]:
        future.set_result(Reply(EchoResponse()))
    await eventually(lambda: bool(transport.writes))
    assert transport.writes == [[1, 2, 3]]
    for future in waiting[3:]:
        future.set_result(Reply(EchoResponse()))
    await asyncio.sleep(0)  # one turn: no other reply is left to wait for

    assert transport.writes == [[1, 2, 3], [4, 5]]


async def test_gathered_replies_leave_before_the_error_of_an_invalid_frame(harness: Harness) -> None:
    connection, transport = await connected(harness, {ECHO: lambda _: Reply(EchoResponse())})

    feed(connection, request(1) + b"x" * HEADER_BYTES)

    assert transport.writes == [[1, NO_REQUEST]]
    assert transport.closed


# --- back-pressure -----------------------------------------------------------------------------------------


IN_KERNEL_BYTES = 8 * MIB
"""An upper bound for the bytes in the two ends of a socket."""


async def test_the_server_stops_reading_from_a_client_that_takes_no_replies(harness: Harness) -> None:
    handled = 0
    reply_bytes = 256 * KIB
    block = memoryview(bytes(reply_bytes))

    def handle(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        nonlocal handled
        handled += 1
        return Reply(answer(str(call.message.chunk_count)), [block])

    await harness.serve({ECHO: handle})
    client = await harness.connect(receive_bytes=64 * KIB)
    total = 500  # requests so small that all of them arrive with one read
    await client.send(b"".join(request(number) for number in range(total)))

    await settled(lambda: handled)

    unsent = harness.server.unsent_bytes
    assert SEND_BUFFER_BYTES_MAX < unsent <= SEND_BUFFER_BYTES_MAX + 2 * reply_bytes
    assert handled * reply_bytes <= unsent + IN_KERNEL_BYTES
    assert handled < total / 2

    for number in range(total):  # the server goes on when the client does
        header, head, bulk = await client.receive()
        assert (header.kind, header.request_id, len(bulk)) == (FrameKind.REPLY, number, reply_bytes)
        assert text_of(EchoResponse.FromString(head)) == str(number)
    assert handled == total


async def test_untaken_deferred_replies_are_limited_by_the_requests_in_flight(harness: Harness) -> None:
    handled = 0
    reply_bytes = 64 * KIB
    block = memoryview(bytes(reply_bytes))

    async def later() -> Reply[EchoResponse]:
        return Reply(EchoResponse(), [block])

    def handle(_call: Call[EchoRequest]) -> Any:
        nonlocal handled
        handled += 1
        return later()

    await harness.serve({ECHO: handle})
    client = await harness.connect(receive_bytes=64 * KIB)
    total = 3 * REQUESTS_IN_FLIGHT_MAX
    sending = asyncio.ensure_future(client.send(b"".join(request(number) for number in range(total))))

    # Some were answered while there was room; after that, only the requests that had been taken already.
    assert await settled(lambda: handled) * reply_bytes <= (
        IN_KERNEL_BYTES + SEND_BUFFER_BYTES_MAX + REQUESTS_IN_FLIGHT_MAX * reply_bytes
    )
    for _ in range(total):
        await client.receive()
    assert handled == total
    await sending


async def test_the_memory_of_a_reply_is_released_only_after_sending(harness: Harness) -> None:
    # The owner then reuses the memory, and the client would get the new content.
    let_go: list[bool] = []
    memory = bytearray(b"a" * 16 * MIB)

    def use_again() -> None:
        let_go.append(True)
        memory[:] = b"b" * len(memory)

    def handle(_call: Call[EchoRequest]) -> Reply[EchoResponse]:
        view = memoryview(memory)[MIB:]
        weakref.finalize(view, use_again)
        return Reply(EchoResponse(), [view])

    await harness.serve({ECHO: handle})
    client = await harness.connect(receive_bytes=64 * KIB)
    await client.send(request(1))

    await eventually(lambda: harness.server.unsent_bytes > 0)
    header = decode_header(memoryview(await client.reader.readexactly(HEADER_BYTES)), 0, BULK_BYTES_MAX)
    if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
        assert not let_go  # asyncio's own transport joins the pieces, and so may let go at once
    assert await client.reader.readexactly(header.bulk_bytes) == b"a" * 15 * MIB
    await eventually(lambda: let_go)


async def test_waiting_requests_stop_the_reading_exactly_at_the_limit(harness: Harness) -> None:
    waiting: list[asyncio.Future[Any]] = []

    def wait(_call: Call[EchoRequest]) -> Any:
        waiting.append(asyncio.get_running_loop().create_future())
        return waiting[-1]

    await harness.serve({ECHO: wait})
    client = await harness.connect()
    total = REQUESTS_IN_FLIGHT_MAX + 100
    await client.send(b"".join(request(number) for number in range(total)))

    assert await settled(lambda: len(waiting)) == REQUESTS_IN_FLIGHT_MAX
    waiting[5].set_result(Reply(EchoResponse()))
    assert (await client.receive())[0].request_id == 5
    assert await settled(lambda: len(waiting)) == REQUESTS_IN_FLIGHT_MAX + 1


# --- peers that misbehave ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "does not speak KerA frames"),
        (request(1, bytes(MIB + 1)), "over the limits"),
        (encode_error(ECHO.number, 7, common_pb2.Error()), "a frame of kind 3 and no request"),
    ],
    ids=["http", "oversize", "no request"],
)
async def test_an_invalid_frame_ends_the_connection_and_both_ends_learn_why(
    harness: Harness, data: bytes, text: str
) -> None:
    await harness.serve({ECHO: echo}, bulk_bytes_max=MIB)
    client, other = await harness.connect(), await harness.connect()

    with capture_logs() as logs:
        await client.send(request(1) + data)
        answer, _, _ = await client.receive()
        refusal, head, _ = await client.receive()
        assert await client.ended()

    assert (answer.kind, answer.request_id) == (FrameKind.REPLY, 1)
    assert (refusal.kind, refusal.request_id) == (FrameKind.ERROR, NO_REQUEST)
    error = error_from_message(common_pb2.Error.FromString(head))
    assert type(error) is ProtocolError
    assert text in error.message
    (line,) = logs
    assert (line["event"], line["log_level"], line["interface"]) == ("connection refused", "warning", "frames")
    assert text in line["reason"]
    assert line["peer"].startswith(f"{HOST}:")

    await other.send(request(2))  # the server still serves others
    assert (await other.receive())[0].request_id == 2


async def test_a_request_with_an_invalid_message_gets_an_error_and_the_connection_stays(harness: Harness) -> None:
    await harness.serve({ECHO: echo})
    client = await harness.connect()
    bad = bytearray(request(1))
    bad[HEADER_BYTES:] = b"\xff" * (len(bad) - HEADER_BYTES)

    await client.send(bytes(bad) + request(2))

    header, head, _ = await client.receive()
    assert (header.kind, header.request_id) == (FrameKind.ERROR, 1)
    assert type(error_from_message(common_pb2.Error.FromString(head))) is ProtocolError
    assert (await client.receive())[0].request_id == 2


async def test_chunks_for_a_method_without_chunks_are_a_protocol_error(harness: Harness) -> None:
    await harness.serve({UNARY: lambda _: Reply(UnaryResponse())})
    client = await harness.connect()
    with capture_logs() as logs:
        await client.send(with_header(b"", FrameKind.REQUEST, UNARY.number, 1, MIB) + bytes(MIB))
        header, head, _ = await client.receive()
    error = error_from_message(common_pb2.Error.FromString(head))
    assert (header.kind, header.request_id, type(error)) == (FrameKind.ERROR, 1, ProtocolError)
    assert "Unary takes no chunks" in error.message
    assert not logs, "or whoever likes would fill the log"

    await client.send(with_header(b"", FrameKind.REQUEST, UNARY.number, 2, 0))
    assert (await client.receive())[0].kind == FrameKind.REPLY, "the connection goes on"


@pytest.mark.parametrize("bulk_bytes", [0, 10, MIB])
async def test_a_partial_request_is_not_handled(harness: Harness, bulk_bytes: int) -> None:
    handled: list[int] = []

    def handle(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        handled.append(call.message.chunk_count)
        return echo(call)

    await harness.serve({ECHO: handle})
    data = request(1, bytes(bulk_bytes))
    for length in (1, HEADER_BYTES, HEADER_BYTES + 1, len(data) - 1):
        client = await harness.connect()
        await client.send(data[:length])
        await client.close()
    await eventually(lambda: not harness.server.connections)

    client = await harness.connect()
    await client.send(request(2))
    assert (await client.receive())[0].request_id == 2
    assert handled == [2]


async def test_a_handler_sees_its_bytes_in_one_reused_buffer(harness: Harness) -> None:
    # The server reuses the buffer for the next request, so bytes that a handler keeps without a copy would change.
    kept: list[memoryview] = []

    def keep(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        assert bytes(call.bulk) == bytes([call.message.chunk_count]) * MIB
        kept.append(call.bulk)
        return Reply(EchoResponse())

    await harness.serve({ECHO: keep})
    client = await harness.connect()
    for number in (1, 2):
        await client.send(request(number, bytes([number]) * MIB))
        assert (await client.receive())[0].kind == FrameKind.REPLY

    assert kept[0].obj is kept[1].obj  # one buffer for all requests


async def test_replies_to_a_client_that_has_gone_are_dropped(harness: Harness) -> None:
    waiting: list[asyncio.Future[Any]] = []

    def wait(_call: Call[EchoRequest]) -> Any:
        # Not cancelled with the connection, because of the shield.
        waiting.append(asyncio.get_running_loop().create_future())
        return asyncio.shield(waiting[-1])

    await harness.serve({ECHO: wait})
    client = await harness.connect()
    await client.send(request(1) + request(2))
    await eventually(lambda: len(waiting) == 2)
    await client.close()
    await eventually(lambda: not harness.server.connections)

    with capture_logs() as logs:
        waiting[0].set_result(Reply(EchoResponse()))
        waiting[1].set_exception(UnknownStream("gone"))
        await asyncio.sleep(0)

    assert logs == []
    waiting[1].exception()


async def test_a_handler_is_awaited_also_if_the_connection_ends_at_once(harness: Harness) -> None:
    # A connection may end in the very turn of the loop that handled the request: pytest reports a
    # coroutine that was never awaited.
    async def wait() -> Reply[EchoResponse]:
        await asyncio.Event().wait()
        return Reply(EchoResponse())

    await harness.serve({ECHO: lambda _: wait()})
    connection = harness.server.accept("tcp")
    transport = FakeTransport()
    connection.connection_made(transport)

    feed(connection, request(1))
    assert connection.requests_in_flight == 1
    transport.close()
    connection.connection_lost(None)

    await eventually(lambda: not connection.requests_in_flight)


async def test_a_closing_server_sends_its_remaining_replies(harness: Harness) -> None:
    reply_bytes = 16 * MIB  # more than fits into the sockets
    await harness.serve({ECHO: lambda _: Reply(EchoResponse(), [memoryview(bytes(reply_bytes))])})
    client = await harness.connect(receive_bytes=64 * KIB)
    await client.send(request(1))
    await eventually(lambda: harness.server.unsent_bytes > 0)

    closing = asyncio.ensure_future(harness.server.close(grace_s=TIMEOUT_S))

    assert len((await client.receive())[2]) == reply_bytes
    assert await client.ended()
    await closing


async def test_a_client_that_takes_no_replies_does_not_delay_the_end_of_the_server(harness: Harness) -> None:
    await harness.serve({ECHO: lambda _: Reply(EchoResponse(), [memoryview(bytes(16 * MIB))])})
    client = await harness.connect(receive_bytes=64 * KIB)
    await client.send(request(1))
    await eventually(lambda: harness.server.unsent_bytes > 0)

    async with asyncio.timeout(30):
        await harness.server.close(grace_s=0.1)

    assert not harness.server.connections


async def test_a_connection_that_was_being_accepted_does_not_outlive_the_server(harness: Harness) -> None:
    await harness.serve({ECHO: echo})
    client = await harness.connect()
    await client.send(request(1))
    await client.receive()
    late = harness.server.accept("tcp")

    await harness.server.close()
    transport = FakeTransport()
    late.connection_made(transport)

    assert transport.closed
    late.connection_lost(None)
    assert not harness.server.connections


async def test_repeated_refusals_are_logged_once(harness: Harness) -> None:
    await harness.serve({ECHO: echo})
    with capture_logs() as logs:
        for _ in range(5):
            client = await harness.connect()
            await client.send(bytes(64))
            await client.receive()
            assert await client.ended()
    assert [line["event"] for line in logs] == ["connection refused"]


# --- peers that do not go on -------------------------------------------------------------------------------


async def test_an_incomplete_frame_ends_only_its_own_connection(harness: Harness) -> None:
    await harness.serve({ECHO: echo}, Timing(slice_s=60.0, sweep_s=0.01, frame_s_max=0.05))
    for part in (request(1)[:-1], request(1, bytes(MIB))[: 200 * KIB], request(1)[:5]):
        stalled, idle, busy = await harness.connect(), await harness.connect(), await harness.connect()
        await stalled.send(part)
        header, head, _ = await stalled.receive()
        assert (header.kind, header.request_id) == (FrameKind.ERROR, NO_REQUEST)
        assert "has not come whole" in error_from_message(common_pb2.Error.FromString(head)).message
        assert await stalled.ended()
        for other in (idle, busy):
            await other.send(request(2))
            assert (await other.receive())[0].request_id == 2


async def test_a_slow_peer_that_makes_progress_is_served(harness: Harness) -> None:
    connection, transport = await connected(harness, {ECHO: echo})
    for number in range(1, 6):  # each in two parts, and all of them take longer than one may
        feed(connection, request(number)[:-1])
        connection.sweep(20.0 * number)
        connection.sweep(20.0 * number + 15)
        feed(connection, request(number)[-1:])
    assert transport.writes == [[1], [2], [3], [4], [5]]


async def test_the_time_limit_of_a_frame_stops_while_the_server_reads_nothing(harness: Harness) -> None:
    futures: list[asyncio.Future[Reply[Any]]] = []

    def wait(_: Call[EchoRequest]) -> asyncio.Future[Reply[Any]]:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    connection, transport = await connected(harness, {ECHO: wait})
    feed(connection, b"".join(map(request, range(1, REQUESTS_IN_FLIGHT_MAX + 1))) + request(9_999)[:-1])
    connection.hold_frames()
    for now_s in (0.0, 100.0, 200.0):
        connection.sweep(now_s)
    assert not transport.closed
    for future in futures:
        future.set_result(Reply(EchoResponse()))


async def test_the_memory_of_a_large_request_is_released_when_the_connection_is_idle(harness: Harness) -> None:
    connection, _ = await connected(harness, {ECHO: echo})
    feed(connection, request(1, bytes(MIB)))
    connection.sweep(0.0)
    assert connection.receive_bytes == MIB, "it has just been used"
    connection.sweep(5.0)
    assert connection.receive_bytes == 0
    feed(connection, request(2, bytes(MIB)))
    assert connection.receive_bytes == MIB


async def test_other_connections_get_their_turn_after_a_slow_frame(harness: Harness) -> None:
    served: list[int] = []

    def note(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        served.append(call.message.chunk_count)
        return echo(call)

    await harness.serve({ECHO: note}, Timing(slice_s=-1.0))  # each frame takes longer
    greedy, other = await harness.connect(), await harness.connect()
    await greedy.send(b"".join(map(request, range(1, 201))))
    await other.send(request(1000))
    assert (await other.receive())[0].request_id == 1000
    assert served.index(1000) < 200, "it did not wait for all that had come before"
    assert [(await greedy.receive())[0].request_id for _ in range(200)] == list(range(1, 201))
    assert [number for number in served if number < 1000] == list(range(1, 201)), "in their order"


@pytest.mark.parametrize(("pause_s", "rests"), [(0.0, True), (0.009, True), (0.011, False)])
async def test_single_frames_count_together_unless_others_had_as_long(
    harness: Harness, pause_s: float, rests: bool
) -> None:
    """A loop may read many frames from one connection before it looks at another one."""
    now_s = 0.0

    def work(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        nonlocal now_s
        now_s += 0.010
        return echo(call)

    connection, transport = await connected(harness, {ECHO: work}, Timing(slice_s=0.015, now_s=lambda: now_s))
    feed(connection, request(1))
    assert transport.reading
    now_s += pause_s
    feed(connection, request(2))
    assert transport.reading is not rests
    await eventually(lambda: transport.reading)


async def test_a_connection_over_the_limit_closes_the_idlest_one(harness: Harness) -> None:
    await harness.serve({ECHO: echo}, connections_max=3)
    used, silent, half = await harness.connect(), await harness.connect(), await harness.connect()
    await used.send(request(1))
    assert (await used.receive())[0].request_id == 1
    await half.send(request(1)[:-1])
    await eventually(lambda: harness.server.connections == 3)
    for gone in (silent, half):  # neither ever sent a whole request, and the older one goes first
        new = await harness.connect()
        await new.send(request(7))
        assert (await new.receive())[0].request_id == 7
        assert await gone.ended()
    await used.send(request(2))
    assert (await used.receive())[0].request_id == 2
    assert harness.server.connections == 3


async def test_a_new_connection_is_refused_when_all_have_requests_in_flight(harness: Harness) -> None:
    release = asyncio.Event()

    async def wait(call: Call[EchoRequest]) -> Reply[EchoResponse]:
        await release.wait()
        return echo(call)

    await harness.serve({ECHO: wait}, connections_max=2)
    busy = [await harness.connect() for _ in range(2)]
    for each in busy:
        await each.send(request(1))
    await eventually(lambda: harness.server.requests_in_flight == 2)
    header, head, _ = await (new := await harness.connect()).receive()
    assert (header.kind, header.request_id) == (FrameKind.ERROR, NO_REQUEST)
    assert "connections_max" in error_from_message(common_pb2.Error.FromString(head)).message
    assert await new.ended()
    release.set()
    for each in busy:
        assert (await each.receive())[0].request_id == 1


async def test_a_client_that_takes_no_replies_for_long_is_disconnected(harness: Harness) -> None:
    block = memoryview(bytes(256 * KIB))
    await harness.serve({ECHO: lambda _call: Reply(EchoResponse(), [block])}, Timing(slice_s=60.0, stalled_s=0.05))
    client = await harness.connect(receive_bytes=64 * KIB)
    await client.send(b"".join(request(number) for number in range(500)))

    await eventually(lambda: not harness.server.connections)
