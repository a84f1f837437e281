"""The calling end of framed connections, with servers that a `FrameServer` would never be."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest

from kera.core.errors import InvalidArgument, KeraError, ProtocolError, Unavailable, Uncertain
from kera.core.format.chunk import ALIGNMENT_BYTES
from kera.core.rpc import Method
from kera.core.rpc.frame_client import SILENT_S_MAX, FrameChannel
from kera.core.rpc.frames import NO_REQUEST, FrameKind, encode_error, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.wire import error_to_message
from kera.v1 import common_pb2
from tests.unit.core.rpc.fake_transport import FakeTransport, feed
from tests.unit.core.rpc.transports import (
    ECHO,
    HOST,
    TIMEOUT_S,
    Closing,
    answer,
    eventually,
    numbered,
    silent_listener,
    text_of,
)

MIB = 1 << 20


def reply(request_id: int, text: str = "", bulk: bytes = b"", kind: FrameKind = FrameKind.REPLY) -> bytes:
    return b"".join(encode_frame(kind, ECHO, request_id, answer(text), [bulk], BULK_BYTES_MAX))


class Harness:
    """A channel over a transport that the test drives."""

    def __init__(self, silent_s_max: float = SILENT_S_MAX) -> None:
        self.channel = FrameChannel("tcp", "here:1", silent_s_max=silent_s_max)
        self.transport = FakeTransport()
        self.channel.connection_made(self.transport)

    def submit(self, timeout_s: float = TIMEOUT_S, bulk: Any = ()) -> "asyncio.Future[Any]":
        return self.channel.submit(ECHO, numbered(1), bulk, timeout_s=timeout_s)

    def lose(self, error: Exception | None = None) -> None:
        """End the connection, as the loop does some time after it was aborted."""
        self.transport.abort()
        self.channel.connection_lost(error)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    yield harness
    harness.lose()


@pytest.fixture
async def impatient() -> AsyncIterator[Harness]:
    """A harness whose connection counts as silent after 20 ms."""
    harness = Harness(silent_s_max=0.02)
    yield harness
    harness.lose()


async def failure(future: "asyncio.Future[Any]") -> KeraError:
    with pytest.raises(KeraError) as caught:
        async with asyncio.timeout(TIMEOUT_S):
            await future
    return caught.value


# --- replies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1000, MIB])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_bulk_is_received_into_its_own_aligned_memory(harness: Harness, size: int, pieces: int) -> None:
    future = harness.submit()
    data = reply(1, "text", b"a" * size)

    feed(harness.channel, data, [len(data) * piece // pieces for piece in range(1, pieces)])

    answer = await future
    (bulk,) = answer.bulk
    assert text_of(answer.message) == "text"
    assert bytes(bulk) == b"a" * size
    assert pa.py_buffer(bulk).address % ALIGNMENT_BYTES == 0


async def test_the_memory_of_a_reply_is_not_reused(harness: Harness) -> None:
    first, second = harness.submit(), harness.submit()

    feed(harness.channel, reply(1, bulk=b"a" * 100) + reply(2, bulk=b"b" * 100))

    assert bytes((await first).bulk[0]) == b"a" * 100
    assert bytes((await second).bulk[0]) == b"b" * 100


async def test_a_reply_without_a_waiting_request_is_ignored(harness: Harness) -> None:
    given_up, future = harness.submit(), harness.submit()
    given_up.cancel()

    feed(harness.channel, reply(99, bulk=bytes(MIB)) + reply(1) + reply(2, "here") + reply(2, "again"))

    assert text_of((await future).message) == "here"
    assert not harness.transport.closed


# --- servers that misbehave: no call waits forever ---------------------------------------------------------


def damaged_head(frame: bytes) -> bytes:
    return frame[:32] + b"\xff" * (len(frame) - 32)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(32), "does not speak KerA frames"),
        (reply(1, kind=FrameKind.REQUEST), "a frame of kind 1 and no reply"),
        (damaged_head(reply(1, "text")), "not a kera.v1.MultiReadChunksResponse message"),
        (damaged_head(reply(1, "text", bytes(MIB)))[:42] + bytes(MIB), "not a kera.v1.MultiReadChunksResponse message"),
        (damaged_head(encode_error(ECHO.number, 1, common_pb2.Error(code="x"))), "not a kera.v1.Error message"),
        (
            encode_error(0, NO_REQUEST, error_to_message(ProtocolError("peer speaks version 7"))),
            "refused by the peer: peer speaks version 7",
        ),
    ],
    ids=["http", "a request", "no message", "no message, with bulk", "no error", "a refusal"],
)
async def test_an_invalid_reply_ends_the_connection_and_makes_all_calls_uncertain(
    harness: Harness, answer: bytes, text: str
) -> None:
    futures = [harness.submit(), harness.submit()]

    feed(harness.channel, answer)

    assert harness.transport.closed
    assert harness.channel.closed
    harness.channel.connection_lost(None)
    for future in futures:
        error = await failure(future)
        assert type(error) is Uncertain
        assert error.message.startswith("connection to here:1 was lost: ")
        assert text in error.message


async def test_a_reply_over_the_limit_ends_the_connection_with_the_reason(harness: Harness) -> None:
    harness.channel.bulk_bytes_max = MIB
    future = harness.submit()

    feed(harness.channel, reply(1, bulk=bytes(MIB + 1)))
    harness.channel.connection_lost(None)

    assert "over the limits" in (await failure(future)).message


async def test_a_connection_lost_within_a_reply_makes_the_call_uncertain(harness: Harness) -> None:
    for cut in (0, 1, 31, 32, 40, MIB):
        harness = Harness()
        future = harness.submit()
        feed(harness.channel, reply(1, bulk=bytes(2 * MIB))[:cut])

        harness.lose(ConnectionResetError(104, "Connection reset by peer"))

        error = await failure(future)
        assert type(error) is Uncertain
        assert error.message == "connection to here:1 was lost: [Errno 104] Connection reset by peer"


async def test_nothing_is_sent_on_a_connection_that_is_being_closed(harness: Harness) -> None:
    harness.transport.close()

    assert type(await failure(harness.submit())) is Unavailable
    assert harness.transport.written == b""


async def test_a_bulk_that_arrives_after_the_timeout_is_read_to_its_end(harness: Harness) -> None:
    late, future = harness.submit(timeout_s=0.01), harness.submit()
    data = reply(1, bulk=b"a" * MIB) + reply(2, "here")
    feed(harness.channel, data[: MIB // 2])
    assert type(await failure(late)) is Uncertain

    feed(harness.channel, data[MIB // 2 :])

    assert text_of((await future).message) == "here"


# --- connecting --------------------------------------------------------------------------------------------


async def test_a_port_without_a_server_is_unavailable() -> None:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, HOST, 0)
    address = f"{HOST}:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()

    with pytest.raises(Unavailable, match=f"cannot connect to {address}: Connection refused") as caught:
        await FrameChannel.connect_tcp(address, timeout_s=TIMEOUT_S)
    assert caught.value.attributes == {"address": address}


async def test_a_path_without_a_server_is_unavailable(short_path: Any) -> None:
    with pytest.raises(Unavailable, match=r"cannot connect to .*: No such file"):
        await FrameChannel.connect_unix(str(short_path / "nobody"), timeout_s=TIMEOUT_S)


async def test_connecting_has_a_timeout() -> None:
    with silent_listener() as listener:
        address = f"{HOST}:{listener.getsockname()[1]}"
        with pytest.raises(Unavailable, match=rf"cannot connect to {address} within 0\.05 s"):
            await FrameChannel.connect_tcp(address, timeout_s=0.05)


async def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'nowhere' is not an address"):
        await FrameChannel.connect_tcp("nowhere", timeout_s=TIMEOUT_S)


async def test_closing_waits_until_the_connection_is_gone(closing: Closing) -> None:
    lost = asyncio.Event()

    class Server(asyncio.Protocol):
        def connection_lost(self, _exc: Exception | None) -> None:
            lost.set()

    server = closing(await asyncio.get_running_loop().create_server(Server, HOST, 0))
    channel = await FrameChannel.connect_tcp(f"{HOST}:{server.sockets[0].getsockname()[1]}", timeout_s=TIMEOUT_S)

    await channel.close()

    assert channel.closed
    await eventually(lost.is_set)


async def test_methods_of_one_channel_share_its_request_ids(harness: Harness) -> None:
    other: Method[Any, Any] = Method(ECHO.service, "Other", 77, ECHO.request, ECHO.response, bulk=True)
    first = harness.submit()
    second = harness.channel.submit(other, numbered(2), timeout_s=TIMEOUT_S)

    feed(harness.channel, reply(2, "second") + reply(1, "first"))

    assert text_of((await first).message) == "first"
    assert text_of((await second).message) == "second"


# --- silence -----------------------------------------------------------------------------------------------


async def test_a_silent_connection_is_closed_at_the_first_timeout(
    impatient: Harness,
) -> None:
    late, other = impatient.submit(timeout_s=0.02), impatient.submit()

    assert isinstance(await failure(late), Uncertain)
    assert impatient.transport.closed
    impatient.lose()

    error = await failure(other)
    assert isinstance(error, Uncertain)
    assert "silent" in error.message
    assert isinstance(await failure(impatient.submit()), Unavailable)


async def test_a_timeout_does_not_close_a_connection_that_answers_others(
    impatient: Harness,
) -> None:
    late, answered = impatient.submit(timeout_s=0.05), impatient.submit()
    feed(impatient.channel, reply(2, "here"))

    assert isinstance(await failure(late), Uncertain)

    assert text_of((await answered).message) == "here"
    assert not impatient.transport.closed


async def test_a_connection_that_stops_within_an_answer_is_closed(
    impatient: Harness,
) -> None:
    late, other = impatient.submit(timeout_s=0.02), impatient.submit()
    feed(impatient.channel, reply(1, bulk=bytes(MIB))[: MIB // 2])

    assert isinstance(await failure(late), Uncertain)
    assert not impatient.transport.closed, "the rest may be on its way"
    await eventually(lambda: impatient.transport.closed)
    impatient.lose()
    assert "silent" in (await failure(other)).message


async def test_a_short_timeout_does_not_close_the_connection(harness: Harness) -> None:
    assert isinstance(await failure(harness.submit(timeout_s=0.01)), Uncertain)
    assert not harness.transport.closed
