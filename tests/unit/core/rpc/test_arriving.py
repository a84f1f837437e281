"""Memory of large requests that arrive: one limit for all connections, which take turns."""

import asyncio

from kera.core.base.settings import MIB
from kera.core.rpc.arriving import Arriving
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer, Timing
from kera.core.rpc.frames import HEADER_BYTES, FrameKind, decode_header, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from tests.unit.core.rpc.transports import (
    ECHO,
    HOST,
    TIMEOUT_S,
    UNARY,
    Closing,
    UnaryRequest,
    echo,
    eventually,
    numbered,
    unary_echo,
)


class Connection:
    """Receives requests, one after the other."""

    def __init__(self, arriving: Arriving) -> None:
        self._arriving = arriving
        self.is_receiving = False
        self.was_given = 0

    def begin(self, length_bytes: int) -> bool:
        self.is_receiving = True
        return self._arriving.reserve(self, length_bytes)

    def end(self) -> None:
        self.is_receiving = False
        if self._arriving.has_waiting:
            self.give_back()

    def room_given(self) -> None:
        self.was_given += 1

    def give_back(self) -> None:
        if not self.is_receiving:
            self._arriving.release(self)


def test_requests_wait_in_order_for_free_memory() -> None:
    arriving = Arriving(100)
    first, second, third, fourth = (Connection(arriving) for _ in range(4))
    assert first.begin(60)
    assert second.begin(40)
    assert not third.begin(50)
    assert not fourth.begin(10), "who asks later is not let in before"
    second.end()
    assert (third.was_given, fourth.was_given) == (0, 0)
    first.end()
    assert (third.was_given, fourth.was_given, arriving.bytes) == (1, 1, 60)


def test_a_connection_keeps_its_memory_until_others_need_it() -> None:
    arriving = Arriving(100)
    first, second = Connection(arriving), Connection(arriving)
    assert first.begin(80)
    first.end()
    assert arriving.bytes == 80
    assert first.begin(70)
    first.end()
    assert second.begin(50)
    assert arriving.bytes == 50


def test_a_single_request_over_the_limit_is_admitted() -> None:
    arriving = Arriving(10)
    first, second = Connection(arriving), Connection(arriving)
    assert first.begin(1000)
    assert not second.begin(1)
    arriving.release(first)  # its connection is lost
    assert second.was_given
    assert arriving.bytes == 1
    arriving.release(second)
    assert arriving.bytes == 0


def test_connections_that_need_more_memory_do_not_deadlock() -> None:
    """As after a large message, before the chunks behind it arrive."""
    arriving = Arriving(100)
    first, second, third = (Connection(arriving) for _ in range(3))
    assert first.begin(50)
    assert second.begin(50)
    assert not first.begin(80)
    assert not third.begin(10)
    assert first.was_given == 0, "the second one may still end"
    assert not second.begin(80)
    assert (first.was_given, third.was_given, second.was_given, arriving.bytes) == (1, 0, 0, 130)
    first.end()
    assert (first.was_given, third.was_given, second.was_given, arriving.bytes) == (1, 1, 1, 90)


def request(number: int, bulk: bytes) -> bytes:
    return b"".join(encode_frame(FrameKind.REQUEST, ECHO, number, numbered(number), [bulk], BULK_BYTES_MAX))


BULK = b"x" * (4 * MIB)
CONNECTIONS = 24


async def test_partial_requests_of_many_connections_have_one_limit(closing: Closing) -> None:
    """Requests over the limit stay on the network; small requests and other connections go on, and all complete."""
    server = closing(FrameServer({ECHO: echo, UNARY: unary_echo}, arriving_bytes_max=3 * len(BULK)))
    port = await server.listen_tcp(HOST, 0)
    writers = []
    for number in range(CONNECTIONS):
        reader, writer = await asyncio.open_connection(HOST, port)
        data = request(number, BULK)
        writer.write(data[: len(data) // 2])  # not drained: the server does not read all of it
        writers.append((reader, writer, data))
    await eventually(lambda: server.connections == CONNECTIONS and server.arriving_bytes == 3 * len(BULK))

    channel = closing(await FrameChannel.connect_tcp(f"{HOST}:{port}", timeout_s=TIMEOUT_S))
    reply = await channel.submit(UNARY, UnaryRequest(name="small"), timeout_s=TIMEOUT_S)
    assert reply.message.cluster_id == "small"
    assert server.arriving_bytes == 3 * len(BULK)

    async def finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> int:
        writer.write(data[len(data) // 2 :])
        header = decode_header(memoryview(await reader.readexactly(HEADER_BYTES)), 0, BULK_BYTES_MAX)
        await reader.readexactly(header.head_bytes + header.bulk_bytes)
        writer.close()
        assert server.arriving_bytes <= 3 * len(BULK)
        return header.bulk_bytes

    async with asyncio.timeout(TIMEOUT_S):
        assert await asyncio.gather(*(finish(*each) for each in writers)) == [len(BULK)] * CONNECTIONS
    await eventually(lambda: server.connections == 1 and server.arriving_bytes == 0)


async def test_a_connection_stalled_within_a_request_is_closed_when_others_wait(closing: Closing) -> None:
    timing = Timing(sweep_s=0.05, slice_s=60.0)
    server = closing(FrameServer({ECHO: echo}, arriving_bytes_max=len(BULK), timing=timing))
    port = await server.listen_tcp(HOST, 0)
    slow_reader, slow_writer = await asyncio.open_connection(HOST, port)
    slow_writer.write(request(1, BULK)[: 1 * MIB])
    await eventually(lambda: server.arriving_bytes == len(BULK))

    channel = closing(await FrameChannel.connect_tcp(f"{HOST}:{port}", timeout_s=TIMEOUT_S))
    reply = await channel.submit(ECHO, numbered(2), [memoryview(BULK)], timeout_s=TIMEOUT_S)
    assert len(reply.bulk[0]) == len(BULK)
    assert b"nothing of a request came for" in await slow_reader.read()
    slow_writer.close()
