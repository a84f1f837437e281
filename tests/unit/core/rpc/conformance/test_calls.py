"""Calls and replies: any size, any number, in order, deferred. ``common.py`` describes this suite."""

import asyncio
import weakref
from typing import Any

import pyarrow as pa
import pytest

from kera.core.rpc import Call, Method, Reply
from kera.core.rpc.grpc_options import CONNECTION_CALLS_MAX_DEFAULT
from kera.core.rpc.limits import REQUESTS_IN_FLIGHT_MAX, SEND_BUFFER_BYTES_MAX
from kera.core.rpc.method import Peer, call
from tests.unit.core.rpc.conformance.common import EACH_METHOD, MIB, EchoCall, EchoReply, echoed
from tests.unit.core.rpc.transports import (
    ECHO,
    OTHER_ECHO,
    TIMEOUT_S,
    UNARY,
    EchoRequest,
    EchoResponse,
    UnaryRequest,
    Wire,
    answer,
    echo,
    eventually,
    numbered,
    settled,
    text_of,
    unary_echo,
)


def pattern(size: int) -> bytes:
    """Bytes that reveal a wrong offset or order."""
    counted = b"".join(index.to_bytes(4, "little") for index in range(4096))
    return (counted * (size // len(counted) + 1))[:size]


async def test_a_unary_call_is_answered(wire: Wire) -> None:
    await wire.serve({UNARY: unary_echo})
    channel = await wire.connect()

    assert (await call(channel, UNARY, UnaryRequest(name="orders"), timeout_s=TIMEOUT_S)).cluster_id == "orders"


async def test_bulk_of_any_size_comes_back(wire: Wire) -> None:
    await wire.serve({ECHO: echo})
    for size in (0, 1, 63, 65_000, 65_536, 65_537, 1 * MIB, 7 * MIB + 13):
        channel = await wire.connect()
        bulk = pattern(size)

        assert await echoed(channel, 1, [bulk]) == ("1", bulk), size
        assert await echoed(channel, 2, [bulk]) == ("2", bulk), size  # despite anything that the first one left behind


async def test_bulk_may_be_given_in_pieces_of_any_kind(wire: Wire) -> None:
    await wire.serve({ECHO: echo})
    channel = await wire.connect()
    pieces = [
        b"",
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"memoryview"),
        memoryview(b""),
        memoryview(bytearray(8)).cast("Q"),  # its length is 1, its bytes are 8
        pa.py_buffer(b"Arrow"),
        memoryview(pa.py_buffer(b"signed")),
    ]

    assert await echoed(channel, 1, pieces) == ("1", b"bytesbytearraymemoryview" + bytes(8) + b"Arrowsigned")


async def test_the_bulk_of_a_reply_may_be_given_in_pieces(wire: Wire) -> None:
    def in_pieces(_call: EchoCall) -> EchoReply:
        return Reply(EchoResponse(), [memoryview(b"a" * 10), memoryview(b""), memoryview(b"b" * MIB)])

    await wire.serve({ECHO: in_pieces})
    channel = await wire.connect()

    assert (await echoed(channel))[1] == b"a" * 10 + b"b" * MIB


async def test_a_reply_without_bulk_has_no_pieces(wire: Wire) -> None:
    await wire.serve({ECHO: echo})
    channel = await wire.connect()

    assert not (await channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)).bulk


@pytest.mark.parametrize("size", [100, 1 * MIB])
async def test_the_bulk_of_a_reply_belongs_to_the_caller(wire: Wire, size: int) -> None:
    await wire.serve({ECHO: echo})
    channel = await wire.connect()

    replies = [
        await channel.submit(ECHO, numbered(index), [bytes([index]) * size], timeout_s=TIMEOUT_S) for index in range(8)
    ]

    for index, reply in enumerate(replies):
        assert b"".join(reply.bulk) == bytes([index]) * size
        assert pa.py_buffer(reply.bulk[0]).size == size  # as for opening a batch in it


async def test_a_message_may_be_reused_right_after_submit(wire: Wire) -> None:
    await wire.serve({ECHO: echo, UNARY: unary_echo})
    channel = await wire.connect()
    message, unary = EchoRequest(), UnaryRequest()
    replies, unary_replies = [], []

    for number in range(20):
        message.chunk_count, unary.name = number, str(number)
        replies.append(channel.submit(ECHO, message, timeout_s=TIMEOUT_S))
        unary_replies.append(channel.submit(UNARY, unary, timeout_s=TIMEOUT_S))

    assert [text_of((await reply).message) for reply in replies] == [str(number) for number in range(20)]
    assert [(await reply).message.cluster_id for reply in unary_replies] == [str(number) for number in range(20)]


async def test_a_handler_sees_its_peer_and_can_keep_state_for_it(wire: Wire) -> None:
    peers: list[Peer] = []

    def count(call: EchoCall) -> EchoReply:
        call.peer.state["calls"] = call.peer.state.get("calls", 0) + 1
        peers.append(call.peer)
        return Reply(answer(str(call.peer.state["calls"])))

    await wire.serve({ECHO: count})
    first, second = await wire.connect(), await wire.connect()

    assert [(await echoed(channel))[0] for channel in (first, first, second)] == ["1", "2", "1"]
    assert [peer.transport for peer in peers] == [wire.name] * 3
    assert first.transport == wire.name


async def test_many_calls_in_flight_are_all_answered(wire: Wire) -> None:
    async def later(call: EchoCall, bulk: bytes) -> EchoReply:
        await asyncio.sleep(0)
        return Reply(answer(str(call.message.chunk_count)), [memoryview(bulk)])

    def handle(call: EchoCall) -> Any:
        return later(call, bytes(call.bulk)) if call.message.chunk_count % 2 else echo(call)

    await wire.serve({ECHO: handle})
    channel = await wire.connect()

    replies = [
        channel.submit(ECHO, numbered(number), [b"%d" % number * (number % 500)], timeout_s=TIMEOUT_S)
        for number in range(2000)
    ]

    for number, reply in enumerate(replies):
        assert text_of((await reply).message) == str(number)
        assert b"".join((await reply).bulk) == b"%d" % number * (number % 500)


async def test_many_large_calls_both_ways_do_not_block_each_other(wire: Wire) -> None:
    await wire.serve({ECHO: echo})
    channel = await wire.connect()

    replies = [channel.submit(ECHO, numbered(1), [bytes([n]) * MIB], timeout_s=TIMEOUT_S) for n in range(64)]

    for n, reply in enumerate(replies):
        assert b"".join((await reply).bulk) == bytes([n]) * MIB


async def test_calls_of_a_method_arrive_in_the_order_of_their_submission(wire: Wire) -> None:
    arrived: dict[str, list[int]] = {"echo": [], "other": []}

    def handler(name: str) -> Any:
        def handle(call: EchoCall) -> EchoReply:
            arrived[name].append(call.message.chunk_count)
            return Reply(EchoResponse())

        return handle

    await wire.serve({ECHO: handler("echo"), OTHER_ECHO: handler("other")})
    channel = await wire.connect()

    # Sizes on both sides of the staging buffer's, so that calls take different ways.
    replies: list[asyncio.Future[Any]] = []
    for number in range(300):
        size = (0, 1000, 70_000)[number % 3]
        replies += [
            channel.submit(method, numbered(number), [bytes(size)], timeout_s=TIMEOUT_S)
            for method in (ECHO, OTHER_ECHO)
        ]
    await asyncio.gather(*replies)

    assert arrived == {"echo": list(range(300)), "other": list(range(300))}


@EACH_METHOD
async def test_a_server_takes_a_limited_number_of_waiting_calls(
    wire: Wire, method: Method[Any, Any], request_type: Any
) -> None:
    waiting: list[asyncio.Future[Any]] = []

    def wait(_call: Call[Any]) -> "asyncio.Future[Any]":
        waiting.append(asyncio.get_running_loop().create_future())
        return waiting[-1]

    await wire.serve({method: wait, OTHER_ECHO: echo})
    channel, other = await wire.connect(), await wire.connect()
    bound = REQUESTS_IN_FLIGHT_MAX if method.bulk or wire.name != "grpc" else CONNECTION_CALLS_MAX_DEFAULT
    total = bound + 500

    replies = [channel.submit(method, request_type(), timeout_s=TIMEOUT_S) for _ in range(total)]
    assert await settled(lambda: len(waiting)) == bound

    await other.submit(OTHER_ECHO, numbered(0), timeout_s=TIMEOUT_S)  # meanwhile the server serves others

    for answered in range(total):  # each answer makes room for the next call
        while len(waiting) <= answered:
            await asyncio.sleep(0)
        waiting[answered].set_result(Reply(method.response()))
        assert len(waiting) <= answered + bound
    assert len(await asyncio.gather(*replies)) == total


async def test_deferred_replies_overtake_each_other(wire: Wire) -> None:
    waiting: dict[int, asyncio.Future[EchoReply]] = {}

    def wait(call: EchoCall) -> "asyncio.Future[EchoReply]":
        return waiting.setdefault(call.message.chunk_count, asyncio.get_running_loop().create_future())

    await wire.serve({ECHO: wait, UNARY: unary_echo})
    channel = await wire.connect()
    replies = [channel.submit(ECHO, numbered(number), timeout_s=TIMEOUT_S) for number in range(3)]
    await eventually(lambda: len(waiting) == 3)

    for number in (1, 2, 0):
        assert not replies[number].done()
        waiting[number].set_result(Reply(answer(f"answer {number}")))
        assert text_of((await replies[number]).message) == f"answer {number}"


async def test_a_waiting_call_does_not_delay_others(wire: Wire) -> None:
    gate = asyncio.Event()

    async def wait() -> EchoReply:
        await gate.wait()
        return Reply(answer("late"))

    await wire.serve({ECHO: lambda call: echo(call) if call.message.chunk_count else wait(), UNARY: unary_echo})
    channel = await wire.connect()

    late = channel.submit(ECHO, numbered(0), timeout_s=TIMEOUT_S)
    assert (await echoed(channel, 1))[0] == "1"
    assert (await call(channel, UNARY, UnaryRequest(name="a"), timeout_s=TIMEOUT_S)).cluster_id == "a"
    gate.set()

    assert text_of((await late).message) == "late"


async def test_sent_memory_is_released(wire: Wire) -> None:
    let_go: list[str] = []

    def handle(_call: EchoCall) -> EchoReply:
        view = memoryview(bytearray(MIB))
        weakref.finalize(view, let_go.append, "reply")
        return Reply(EchoResponse(), [view])

    await wire.serve({ECHO: handle})
    channel = await wire.connect()
    view = memoryview(bytearray(MIB))
    weakref.finalize(view, let_go.append, "request")
    bulk = [view]
    del view

    submitted = channel.submit(ECHO, numbered(1), bulk, timeout_s=TIMEOUT_S)
    del bulk
    await submitted

    await eventually(lambda: sorted(let_go) == ["reply", "request"])


async def test_all_replies_of_a_large_burst_arrive(wire: Wire) -> None:
    # More than the server holds for one client: it stops reading, and goes on. See also test_slow_readers.py.
    answered = 0
    reply_bytes = MIB // 4
    block = memoryview(bytes(reply_bytes))

    def handle(call: EchoCall) -> EchoReply:
        nonlocal answered
        answered += 1
        return Reply(answer(str(call.message.chunk_count)), [block])

    await wire.serve({ECHO: handle})
    channel = await wire.connect()
    total = 10 * SEND_BUFFER_BYTES_MAX // reply_bytes

    for number, reply in enumerate(
        [channel.submit(ECHO, numbered(number), timeout_s=TIMEOUT_S) for number in range(total)]
    ):
        assert text_of((await reply).message) == str(number)
        assert len((await reply).bulk[0]) == reply_bytes
    assert answered == total


async def test_requests_on_a_held_connection_wait_for_its_release(wire: Wire) -> None:
    peers: list[Peer] = []

    def hold(call: EchoCall) -> EchoReply:
        peers.append(call.peer)
        if len(peers) == 1:
            call.peer.hold()
            call.peer.hold()
        return echo(call)

    await wire.serve({ECHO: hold})
    channel, other = await wire.connect(), await wire.connect()
    assert await echoed(channel, 1, [b"first"]) == ("1", b"first")
    later = [channel.submit(ECHO, numbered(2), [pattern(size)], timeout_s=TIMEOUT_S) for size in (10, MIB)]
    assert await echoed(other, 3, [b"other"]) == ("3", b"other")
    peers[0].release()
    for _ in range(3):
        assert await echoed(other, 4, [b"other"]) == ("4", b"other")
    assert len(peers) == 5
    assert not any(each.done() for each in later)
    peers[0].release()
    assert [text_of((await each).message) for each in later] == ["2", "2"]
