"""Features of gRPC alone: foreign clients, reconnecting, health and reflection. See conformance/ for the rest."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kera.core.errors import PortTaken, ProtocolError, StreamExists, Unavailable, Uncertain, UnknownStream
from kera.core.rpc import Call, Method, Reply, api, grpc_options
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_options import ERROR_METADATA
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.grpc_untaken import UNTAKEN_LIMITS, UntakenLimits
from kera.core.rpc.limits import ERROR_METADATA_BYTES_MAX, SEND_BUFFER_BYTES_MAX
from kera.core.rpc.method import call
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2
from kera.v1.broker_pb2 import ChunkStatus
from tests.examples import first_quick
from tests.fuzz import http2
from tests.unit.core.rpc.transports import (
    ECHO,
    HOST,
    TIMEOUT_S,
    UNARY,
    Closing,
    EchoRequest,
    EchoResponse,
    UnaryRequest,
    UnaryResponse,
    answer,
    echo,
    eventually,
    numbered,
    settled,
    text_of,
    unary_echo,
)

KIB = 1 << 10
MIB = 1 << 20
OTHER_UNARY = Method(ECHO.service, "OtherUnary", 9004, UNARY.request, UNARY.response)
CALLS: list[tuple[Method[Any, Any], Any]] = [(UNARY, UnaryRequest()), (ECHO, numbered(1))]


class Harness:
    """A server, and a client as others would write one, with gRPC and protobuf only."""

    def __init__(self) -> None:
        self.closing = Closing()
        self.port = 0

    async def serve(self, *services: Any, port: int = 0, **options: Any) -> GrpcServer:
        server = self.closing(GrpcServer(services, **options))
        self.port = await server.listen(HOST, port)
        return server

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def foreign(self) -> grpc.aio.Channel:
        return self.closing(grpc.aio.insecure_channel(self.address))

    def channel(self) -> GrpcChannel:
        return self.closing(GrpcChannel(self.address))


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    yield harness
    await harness.closing.close()


# --- foreign clients ---------------------------------------------------------------------------------------


async def test_a_client_that_knows_only_the_proto_files_is_served(harness: Harness) -> None:
    def write(call: Call[broker_pb2.MultiWriteChunksRequest]) -> Reply[broker_pb2.MultiWriteChunksResponse]:
        return Reply(broker_pb2.MultiWriteChunksResponse(statuses=[ChunkStatus(position=len(call.bulk))]))

    def read(_call: Call[broker_pb2.MultiReadChunksRequest]) -> Reply[broker_pb2.MultiReadChunksResponse]:
        return Reply(answer("a"), [memoryview(b"bu"), memoryview(b"lk")])

    def get(call: Call[coordinator_pb2.GetStreamIdRequest]) -> Reply[coordinator_pb2.GetStreamIdResponse]:
        return Reply(coordinator_pb2.GetStreamIdResponse(stream_id=len(call.message.name)))

    await harness.serve({api.MULTI_WRITE_CHUNKS: write, api.MULTI_READ_CHUNKS: read}, {api.GET_STREAM_ID: get})
    channel = harness.foreign()

    writing: Any = channel.stream_stream(
        "/kera.v1.Broker/MultiWriteChunks",
        request_serializer=broker_pb2.MultiWriteChunksRequest.SerializeToString,
        response_deserializer=broker_pb2.MultiWriteChunksResponse.FromString,
    )()
    await writing.write(broker_pb2.MultiWriteChunksRequest(request_id=7, chunk_count=1, chunks=b"abc"))
    await writing.write(broker_pb2.MultiWriteChunksRequest(request_id=0))  # clients choose their ids freely
    await writing.done_writing()
    assert [response async for response in writing] == [
        broker_pb2.MultiWriteChunksResponse(request_id=7, statuses=[ChunkStatus(position=3)]),
        broker_pb2.MultiWriteChunksResponse(request_id=0, statuses=[ChunkStatus(position=0)]),
    ]

    reading: Any = channel.stream_stream(
        "/kera.v1.Broker/MultiReadChunks",
        request_serializer=broker_pb2.MultiReadChunksRequest.SerializeToString,
        response_deserializer=broker_pb2.MultiReadChunksResponse.FromString,
    )()
    await reading.write(broker_pb2.MultiReadChunksRequest(request_id=8))
    assert await reading.read() == broker_pb2.MultiReadChunksResponse(
        request_id=8, results=answer("a").results, chunks=b"bulk"
    )
    reading.cancel()

    asking: Any = channel.unary_unary(
        "/kera.v1.Coordinator/GetStreamId",
        request_serializer=coordinator_pb2.GetStreamIdRequest.SerializeToString,
        response_deserializer=coordinator_pb2.GetStreamIdResponse.FromString,
    )
    assert (await asking(coordinator_pb2.GetStreamIdRequest(name="orders"))).stream_id == 6


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownStream("no stream 'orders'", stream="orders"), grpc.StatusCode.NOT_FOUND),
        (StreamExists("there is one", stream="orders"), grpc.StatusCode.ALREADY_EXISTS),
        (UnknownStream("ä" * 100_000, **{f"a{n}": "x" * 100 for n in range(100)}), grpc.StatusCode.NOT_FOUND),
        (ValueError("no such luck"), grpc.StatusCode.UNKNOWN),
    ],
    ids=["not found", "exists", "much to say", "defect"],
)
async def test_an_error_is_a_status_with_the_error_in_its_metadata(
    harness: Harness, error: Exception, status: grpc.StatusCode
) -> None:
    def fail(_call: Call[UnaryRequest]) -> Reply[UnaryResponse]:
        raise error

    await harness.serve({UNARY: fail})
    asking: Any = harness.foreign().unary_unary(UNARY.path)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asking(b"")

    metadata = dict(caught.value.trailing_metadata() or ())
    message = common_pb2.Error.FromString(metadata[ERROR_METADATA])
    details = caught.value.details() or ""
    assert caught.value.code() is status
    assert message.message.startswith(details[:-1])
    assert details
    assert len(message.SerializeToString()) * 4 / 3 + 3 * len(details.encode()) < ERROR_METADATA_BYTES_MAX
    error_from_message(message)


async def test_an_invalid_request_is_an_error_of_the_caller(harness: Harness) -> None:
    await harness.serve({UNARY: unary_echo})
    asking: Any = harness.foreign().unary_unary(UNARY.path)
    for data in (b"\xff" * 9, bytes(UNARY.request_bytes_max + 1)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking(data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata() or ())[ERROR_METADATA]


async def test_an_error_of_a_bulk_call_is_in_its_response(harness: Harness) -> None:
    def fail(_call: Call[EchoRequest]) -> Reply[EchoResponse]:
        raise UnknownStream("no stream 'orders'", stream="orders")

    await harness.serve({ECHO: fail})
    stream: Any = harness.foreign().stream_stream(ECHO.path)()

    await stream.write(EchoRequest(request_id=7).SerializeToString())
    response = EchoResponse.FromString(await stream.read())

    assert response.request_id == 7
    assert type(error_from_message(response.error)) is UnknownStream


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "unary"])
async def test_a_request_with_an_invalid_message_is_refused(harness: Harness, *, bulk: bool) -> None:
    await harness.serve({ECHO: echo, UNARY: unary_echo})
    channel = harness.foreign()
    stream: Any = channel.stream_stream(ECHO.path)
    unary: Any = channel.unary_unary(UNARY.path)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (stream(iter([b"\xff"])).read() if bulk else unary(b"\xff"))

    metadata = dict(caught.value.trailing_metadata() or ())
    error = error_from_message(common_pb2.Error.FromString(metadata[ERROR_METADATA]))
    assert type(error) is ProtocolError
    assert "not a kera.v1" in error.message or "cut short" in error.message


async def test_the_server_stops_reading_from_a_client_that_takes_no_replies(harness: Harness) -> None:
    handled = 0
    reply_bytes = 256 * KIB
    block = memoryview(bytes(reply_bytes))

    def handle(_call: Call[EchoRequest]) -> Reply[EchoResponse]:
        nonlocal handled
        handled += 1
        return Reply(EchoResponse(), [block])

    await harness.serve({ECHO: handle})
    stream: Any = harness.foreign().stream_stream(ECHO.path)()
    total = 400

    async def ask() -> None:
        for number in range(total):
            await stream.write(EchoRequest(request_id=number).SerializeToString())

    asking = asyncio.ensure_future(ask())
    count = await settled(lambda: handled)

    in_grpc = 16 * MIB  # an upper bound for the bytes in the two ends of a connection
    assert count * reply_bytes <= SEND_BUFFER_BYTES_MAX + 2 * reply_bytes + in_grpc
    for number in range(total):
        assert EchoResponse.FromString(await stream.read()).request_id == number
    await asking
    assert handled == total


async def test_a_client_that_takes_no_replies_for_long_is_disconnected(
    harness: Harness,
) -> None:
    limits = UntakenLimits(stalled_s=0.2, slowest_bytes_per_s=1 << 40)
    block = memoryview(bytes(3 * MIB))
    server = await harness.serve({ECHO: lambda _: Reply(EchoResponse(), [block]), UNARY: unary_echo}, untaken=limits)
    stalled: Any = harness.foreign().stream_stream(ECHO.path)()
    for number in range(8):  # more than fits in the two ends of a connection
        await stalled.write(EchoRequest(request_id=number).SerializeToString())
    await eventually(lambda: server.untaken.closed == 1)
    assert server.untaken.held_bytes == 0

    async def all_of_it() -> None:
        while await stalled.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await all_of_it()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    other: Any = harness.foreign().stream_stream(ECHO.path)()
    await other.write(EchoRequest(request_id=2).SerializeToString())
    assert EchoResponse.FromString(await other.read()).request_id == 2
    await eventually(lambda: server.untaken.held_bytes == 0)


async def test_a_reply_without_room_is_an_error_and_the_stream_goes_on(harness: Harness) -> None:
    block = memoryview(bytes(MIB))
    server = await harness.serve({ECHO: lambda _: Reply(EchoResponse(), [block]), UNARY: unary_echo})
    server.untaken.admit("ipv4:127.0.0.1:1", UNTAKEN_LIMITS.bytes_max)
    stream: Any = harness.foreign().stream_stream(ECHO.path)()
    await stream.write(EchoRequest(request_id=5).SerializeToString())
    refused = EchoResponse.FromString(await stream.read())
    assert (refused.request_id, refused.error.code) == (5, "unavailable")
    server.untaken.end(next(iter(server.untaken._holds)))
    await stream.write(EchoRequest(request_id=6).SerializeToString())
    assert not EchoResponse.FromString(await stream.read()).HasField("error")


async def test_a_stream_refused_at_once_gives_the_reason(harness: Harness) -> None:
    await harness.serve({UNARY: unary_echo})
    for _ in range(100):
        with pytest.raises(ProtocolError, match="unknown method Echo"):
            await harness.channel().submit(ECHO, numbered(1), (b"x" * KIB,), timeout_s=TIMEOUT_S)


async def test_all_calls_of_a_large_burst_are_answered(harness: Harness) -> None:
    # gRPC alone cancels some calls if more than a thousand wait for their start.
    gate = asyncio.Event()

    async def wait() -> Reply[UnaryResponse]:
        await gate.wait()
        return Reply(UnaryResponse())

    await harness.serve({UNARY: lambda _: wait()})
    asking: Any = harness.foreign().unary_unary(UNARY.path)
    calls = [asking(b"") for _ in range(3000)]
    gate.set()

    assert set(await asyncio.gather(*calls)) == {b""}


async def test_a_client_that_ends_its_stream_gets_all_replies(harness: Harness) -> None:
    gate = asyncio.Event()

    async def wait() -> Reply[EchoResponse]:
        await gate.wait()
        return Reply(answer("late"))

    await harness.serve({ECHO: lambda call: wait() if call.message.chunk_count else echo(call)})
    stream: Any = harness.foreign().stream_stream(ECHO.path)()
    for number in (1, 0):
        await stream.write(numbered(number).SerializeToString())
    await stream.done_writing()

    assert text_of(EchoResponse.FromString(await stream.read())) == "0"
    gate.set()
    assert text_of(EchoResponse.FromString(await stream.read())) == "late"
    assert await stream.read() is grpc.aio.EOF


async def test_the_server_offers_health_and_reflection(harness: Harness) -> None:
    server = await harness.serve({UNARY: unary_echo}, {ECHO: echo})
    channel = harness.foreign()
    health: Any = health_pb2_grpc.HealthStub(channel)
    watching = health.Watch(health_pb2.HealthCheckRequest(service=ECHO.service))

    checked = await health.Check(health_pb2.HealthCheckRequest(service=ECHO.service))
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING

    reflecting: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # asyncio's works too
    asked = reflecting.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in (await asked.read()).list_services_response.service}
    assert {ECHO.service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names

    closing = asyncio.ensure_future(server.close())
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watching.cancel()
    await closing


# --- connections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/kera.test.Other/Call", "/", "/x/\xa1\xff", "\xff" * 300], ids=["other", "none", "no text", "long"]
)
async def test_a_call_of_an_unknown_path_is_refused_and_the_server_goes_on(harness: Harness, path: str) -> None:
    """Also with a path that is not text: it ended the loop that accepts calls in gRPC."""
    await harness.serve({UNARY: unary_echo})
    channel = harness.channel()
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "h", "te": "trailers"}
    fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
    sent = http2.headers([*fields, (b"content-type", b"application/grpc")])
    for _ in range(3):
        reader, writer = await asyncio.open_connection(HOST, harness.port)
        writer.write(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0))
        writer.write(http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, sent))
        async with asyncio.timeout(TIMEOUT_S):
            assert b"Method not found!" in await reader.readuntil(b"Method not found!")
        writer.close()
        await call(channel, UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    foreign: Any = harness.foreign().unary_unary("/kera.test.Other/Call")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await foreign(b"")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_error_names_a_port_in_use(harness: Harness) -> None:
    await harness.serve({UNARY: unary_echo})
    other = harness.closing(GrpcServer([{UNARY: unary_echo}]))

    with pytest.raises(PortTaken, match=f"gRPC: cannot listen on {harness.address}: the address is in use") as caught:
        await other.listen(HOST, harness.port)

    assert caught.value.attributes == {"host": HOST, "port": harness.port}


async def test_a_channel_reconnects_to_a_restarted_server(harness: Harness) -> None:
    server = await harness.serve({UNARY: unary_echo, ECHO: echo})
    channel = harness.channel()
    assert text_of((await channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)).message) == "1"
    await server.close(grace_s=0)
    for method, request in CALLS:
        with pytest.raises((Unavailable, Uncertain)):
            await channel.submit(method, request, timeout_s=TIMEOUT_S)

    await harness.serve({UNARY: unary_echo, ECHO: echo}, port=harness.port)

    async with asyncio.timeout(30):  # gRPC's own patience is two minutes
        while True:
            try:
                assert text_of((await channel.submit(ECHO, numbered(2), timeout_s=TIMEOUT_S)).message) == "2"
                break
            except (Unavailable, Uncertain):
                await asyncio.sleep(0.02)
    assert (await call(channel, UNARY, UnaryRequest(name="a"), timeout_s=TIMEOUT_S)).cluster_id == "a"


async def test_calls_over_the_limit_of_a_connection_wait_and_are_answered(closing: Closing) -> None:
    under_way = most = 0

    async def serve(call: Call[UnaryRequest]) -> Reply[UnaryResponse]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return unary_echo(call)

    server = closing(GrpcServer([{UNARY: serve}], connection_calls_max=4))
    channel = closing(GrpcChannel(f"{HOST}:{await server.listen(HOST, 0)}"))

    async def ask(count: int) -> None:
        for _ in range(count):
            await channel.submit(UNARY, UnaryRequest(name="a"), timeout_s=TIMEOUT_S)

    await asyncio.gather(*(ask(50) for _ in range(40)))
    assert most <= 4


async def test_a_host_that_does_not_exist_is_unavailable(closing: Closing) -> None:
    channel = closing(GrpcChannel("no-such-host.invalid:7400"))

    with pytest.raises(Unavailable, match=r"cannot connect to no-such-host\.invalid:7400"):
        await channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)


SERVER = """
import asyncio, sys
from kera.core.rpc.grpc_server import GrpcServer
from kera.v1.broker_pb2 import ChunkStatus
from tests.unit.core.rpc.transports import ECHO, UNARY

async def main():
    def wait(call):
        print("called", flush=True)
        return asyncio.get_running_loop().create_future()

    server = GrpcServer([{ECHO: wait, UNARY: wait}])
    print(await server.listen("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "unary"])
async def test_calls_in_flight_when_the_server_is_killed_are_uncertain(closing: Closing, *, bulk: bool) -> None:
    # The status is the same as for a call that could not be sent, and only such a call may be sent again as new.
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdout=subprocess.PIPE)
    assert process.stdout is not None
    channel = closing(GrpcChannel(f"{HOST}:{int(await process.stdout.readline())}"))
    submitted: Any = (
        channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
        if bulk
        else channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    )
    assert await process.stdout.readline() == b"called\n"

    process.send_signal(signal.SIGKILL)

    with pytest.raises(Uncertain, match="was lost"):
        await submitted
    await process.communicate()


async def test_a_call_to_a_peer_without_grpc_fails(closing: Closing) -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"KF and nothing that gRPC knows")
        await writer.drain()
        writer.close()

    server = closing(await asyncio.start_server(hang_up, HOST, 0))
    channel = closing(GrpcChannel(f"{HOST}:{server.sockets[0].getsockname()[1]}"))

    for method, request in CALLS:
        with pytest.raises((Unavailable, Uncertain)):
            await channel.submit(method, request, timeout_s=TIMEOUT_S)


async def test_a_server_that_answers_garbage_makes_the_call_uncertain(harness: Harness) -> None:
    async def serve(_request: bytes, _context: Any) -> bytes:
        return b"\xff"

    async def serve_error(_request: bytes, context: Any) -> None:
        await context.abort(grpc.StatusCode.ABORTED, "text", ((ERROR_METADATA, b"\xff"),))

    async def serve_stream(requests: AsyncIterator[bytes], context: Any) -> None:
        async for _ in requests:
            await context.write(b"\xff")

    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(serve),
        "Echo": grpc.stream_stream_rpc_method_handler(serve_stream),
        OTHER_UNARY.name: grpc.unary_unary_rpc_method_handler(serve_error),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ECHO.service, handlers),))
    harness.port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    channel = harness.channel()

    for method, request in [*CALLS, (OTHER_UNARY, UnaryRequest())]:
        with pytest.raises(Uncertain):
            await channel.submit(method, request, timeout_s=TIMEOUT_S)

    await channel.close()
    await server.stop(0)


async def test_each_channel_has_its_own_connection(harness: Harness) -> None:
    peers: set[str] = set()

    def remember(call: Call[UnaryRequest]) -> Reply[UnaryResponse]:
        peers.add(call.peer.address)
        return unary_echo(call)

    await harness.serve({UNARY: remember})
    for _ in range(3):
        await harness.channel().submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)

    assert len(peers) == 3


async def test_a_finished_call_is_forgotten(harness: Harness) -> None:
    closed: list[str] = []

    def remember(call: Call[Any]) -> Reply[Any]:
        call.peer.on_close.append(lambda: closed.append(type(call.message).__name__))
        return unary_echo(call) if isinstance(call.message, UnaryRequest) else echo(call)

    await harness.serve({UNARY: remember, ECHO: remember})
    channel = harness.channel()
    await channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    await eventually(lambda: closed == ["GetStreamIdRequest"])

    await channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    assert len(channel._tasks) == 2  # of the stream
    await channel.close()

    assert not channel._tasks
    await eventually(lambda: closed == ["GetStreamIdRequest", "MultiWriteChunksRequest"])


@pytest.mark.parametrize("bulk", [False, True])
async def test_a_call_on_a_channel_closed_at_once_is_uncertain(harness: Harness, *, bulk: bool) -> None:
    await harness.serve({UNARY: unary_echo, ECHO: echo})
    channel = harness.channel()
    answer: Any
    if bulk:
        answer = channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    else:
        answer = channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)
    await channel.close()
    with pytest.raises(Uncertain, match="lost: closed"):
        await answer


@pytest.mark.parametrize("turns", first_quick(range(12), 4))
async def test_a_channel_can_be_closed_at_any_point_of_its_stream(harness: Harness, turns: int) -> None:
    await harness.serve({UNARY: unary_echo, ECHO: echo})
    channel = GrpcChannel(harness.address)
    await channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)  # opens a connection, so the stream gets on
    future = channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(TIMEOUT_S):
        await channel.close()
    with contextlib.suppress(Unavailable, Uncertain):
        await future


@pytest.mark.parametrize("address", ["", "\x00\x1b[2J\n"])
async def test_an_invalid_address_is_unavailable(closing: Closing, address: str) -> None:
    with pytest.raises(Unavailable, match="cannot connect to"):
        await call(closing(GrpcChannel(address)), UNARY, UnaryRequest(), timeout_s=TIMEOUT_S)


async def test_ipv6_addresses_have_brackets(closing: Closing) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = closing(GrpcServer([{UNARY: unary_echo}]))
    channel = closing(GrpcChannel(f"[::1]:{await server.listen('::1', 0)}"))

    assert (await call(channel, UNARY, UnaryRequest(name="a"), timeout_s=TIMEOUT_S)).cluster_id == "a"


# --- connections ---------------------------------------------------------------------------------------------


async def test_silent_connections_make_room_at_the_limit(
    harness: Harness,
) -> None:
    await harness.serve({UNARY: unary_echo}, connections_max=2, handshake_ms=500)
    channel = harness.channel()
    await channel.submit(UNARY, UnaryRequest(name="first"), timeout_s=TIMEOUT_S)
    silent = [await asyncio.open_connection(HOST, harness.port) for _ in range(3)]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for reader, _ in silent[1:]:
                assert await reader.read() == b"", "there is no room for it"
        reply = await channel.submit(UNARY, UnaryRequest(name="second"), timeout_s=TIMEOUT_S)
        assert reply.message.cluster_id == "second"
        late = harness.channel()
        await eventually_answered(late)
    finally:
        for _, writer in silent:
            writer.transport.abort()
        await asyncio.sleep(0)


async def eventually_answered(channel: GrpcChannel) -> None:
    """Ask until an answer arrives."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with contextlib.suppress(Unavailable, Uncertain):
                await channel.submit(UNARY, UnaryRequest(name="late"), timeout_s=TIMEOUT_S)
                return
            await asyncio.sleep(0.01)


def test_the_server_allows_the_pings_of_an_idle_client() -> None:
    """A server drops a client that pings too often; KerA's clients ping each second, with calls or without."""
    server = dict(grpc_options.server_options())
    client = dict(grpc_options.client_options())
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.http2.max_pings_without_data"] == 0
    assert client["grpc.keepalive_time_ms"] + client["grpc.keepalive_timeout_ms"] < 5_000
    assert server["grpc.keepalive_time_ms"] + server["grpc.keepalive_timeout_ms"] < 60_000
