"""What holds for a call whatever carries it: one suite over gRPC, frames over TCP and frames over unix sockets.

A caller does not know by which transport a call goes, and a handler not by which it came; so a difference between
transports that one of them could notice is a defect.
"""

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from kera.core.errors import (
    InternalError,
    KeraError,
    OutOfSequence,
    ProtocolError,
    RecordTooLarge,
    Unavailable,
    Uncertain,
    UnknownStream,
)
from kera.core.rpc import Call, Channel, Method, Reply
from kera.core.rpc.limits import HEAD_BYTES_MAX, REQUESTS_IN_FLIGHT_MAX, SEND_BUFFER_BYTES_MAX
from kera.core.rpc.method import Peer, call
from tests.unit.core.rpc.transports import (
    ECHO,
    OTHER_ECHO,
    TIMEOUT_S,
    UNARY,
    EchoRequest,
    EchoResponse,
    UnaryRequest,
    UnaryResponse,
    Wire,
    echo,
    eventually,
    numbered,
    settled,
    unary_echo,
)

KIB = 1 << 10
MIB = 1 << 20

EchoCall = Call[EchoRequest]
EchoReply = Reply[EchoResponse]


def pattern(size: int) -> bytes:
    """Bytes in which a wrong offset or order shows."""
    return (b"".join(index.to_bytes(4, "little") for index in range(min(size // 4 + 1, 4096))) * (size // 16384 + 1))[
        :size
    ]


async def echoed(channel: Channel, number: int = 1, bulk: Any = ()) -> tuple[str, bytes]:
    reply = await channel.submit(ECHO, numbered(number), bulk, timeout_s=TIMEOUT_S)
    return reply.message.arena_path, b"".join(reply.bulk)


async def failure(future: "asyncio.Future[Any]") -> KeraError:
    with pytest.raises(KeraError) as caught:
        await future
    return caught.value


# --- calls and replies -------------------------------------------------------------------------------------


async def test_a_unary_call_is_answered(wire: Wire) -> None:
    await wire.serve({UNARY: unary_echo})
    channel = await wire.connect()

    assert (await call(channel, UNARY, UnaryRequest(name="orders"), timeout_s=TIMEOUT_S)).cluster_id == "orders"


@pytest.mark.parametrize("size", [0, 1, 63, 65_000, 65_536, 65_537, 1 * MIB, 7 * MIB + 13])
async def test_bulk_of_any_size_comes_back(wire: Wire, size: int) -> None:
    await wire.serve({ECHO: echo})
    channel = await wire.connect()
    bulk = pattern(size)

    assert await echoed(channel, 1, [bulk]) == ("1", bulk)
    assert await echoed(channel, 2, [bulk]) == ("2", bulk)  # whatever the first one has left behind


async def test_bulk_is_given_in_pieces_of_any_kind(wire: Wire) -> None:
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


async def test_the_bulk_of_a_reply_is_made_of_pieces_as_well(wire: Wire) -> None:
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
        assert pa.py_buffer(reply.bulk[0]).size == size  # which is how a batch is opened in it


async def test_a_message_may_be_used_again_as_soon_as_it_was_submitted(wire: Wire) -> None:
    await wire.serve({ECHO: echo, UNARY: unary_echo})
    channel = await wire.connect()
    message, unary = EchoRequest(), UnaryRequest()
    replies, unary_replies = [], []

    for number in range(20):
        message.chunk_count, unary.name = number, str(number)
        replies.append(channel.submit(ECHO, message, timeout_s=TIMEOUT_S))
        unary_replies.append(channel.submit(UNARY, unary, timeout_s=TIMEOUT_S))

    assert [(await reply).message.arena_path for reply in replies] == [str(number) for number in range(20)]
    assert [(await reply).message.cluster_id for reply in unary_replies] == [str(number) for number in range(20)]


async def test_a_handler_sees_who_calls_and_keeps_state_for_it(wire: Wire) -> None:
    peers: list[Peer] = []

    def count(call: EchoCall) -> EchoReply:
        call.peer.state["calls"] = call.peer.state.get("calls", 0) + 1
        peers.append(call.peer)
        return Reply(EchoResponse(arena_path=str(call.peer.state["calls"])))

    await wire.serve({ECHO: count})
    first, second = await wire.connect(), await wire.connect()

    assert [(await echoed(channel))[0] for channel in (first, first, second)] == ["1", "2", "1"]
    assert [peer.transport for peer in peers] == [wire.name] * 3
    assert first.transport == wire.name


# --- many calls --------------------------------------------------------------------------------------------


async def test_many_calls_in_flight_are_all_answered(wire: Wire) -> None:
    async def later(call: EchoCall, bulk: bytes) -> EchoReply:
        await asyncio.sleep(0)
        return Reply(EchoResponse(arena_path=str(call.message.chunk_count)), [memoryview(bulk)])

    def handle(call: EchoCall) -> Any:
        return later(call, bytes(call.bulk)) if call.message.chunk_count % 2 else echo(call)

    await wire.serve({ECHO: handle})
    channel = await wire.connect()

    replies = [
        channel.submit(ECHO, numbered(number), [b"%d" % number * (number % 500)], timeout_s=TIMEOUT_S)
        for number in range(2000)
    ]

    for number, reply in enumerate(replies):
        assert (await reply).message.arena_path == str(number)
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


async def test_a_server_takes_a_bounded_number_of_calls_that_wait(wire: Wire) -> None:
    waiting: list[asyncio.Future[EchoReply]] = []

    def wait(_call: EchoCall) -> "asyncio.Future[EchoReply]":
        waiting.append(asyncio.get_running_loop().create_future())
        return waiting[-1]

    await wire.serve({ECHO: wait, OTHER_ECHO: echo})
    channel, other = await wire.connect(), await wire.connect()
    total = REQUESTS_IN_FLIGHT_MAX + 500

    replies = [channel.submit(ECHO, numbered(number), timeout_s=TIMEOUT_S) for number in range(total)]
    assert await settled(lambda: len(waiting)) == REQUESTS_IN_FLIGHT_MAX

    await other.submit(OTHER_ECHO, numbered(0), timeout_s=TIMEOUT_S)  # others are served meanwhile

    for answered in range(total):  # each answer makes room for the next call
        while len(waiting) <= answered:
            await asyncio.sleep(0)
        waiting[answered].set_result(Reply(EchoResponse(arena_path=str(answered))))
        assert len(waiting) <= answered + REQUESTS_IN_FLIGHT_MAX
    assert [(await reply).message.arena_path for reply in replies] == [str(number) for number in range(total)]


# --- deferred replies --------------------------------------------------------------------------------------


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
        waiting[number].set_result(Reply(EchoResponse(arena_path=f"answer {number}")))
        assert (await replies[number]).message.arena_path == f"answer {number}"


async def test_a_call_that_waits_does_not_hold_up_others(wire: Wire) -> None:
    gate = asyncio.Event()

    async def wait() -> EchoReply:
        await gate.wait()
        return Reply(EchoResponse(arena_path="late"))

    await wire.serve({ECHO: lambda call: echo(call) if call.message.chunk_count else wait(), UNARY: unary_echo})
    channel = await wire.connect()

    late = channel.submit(ECHO, numbered(0), timeout_s=TIMEOUT_S)
    assert (await echoed(channel, 1))[0] == "1"
    assert (await call(channel, UNARY, UnaryRequest(name="a"), timeout_s=TIMEOUT_S)).cluster_id == "a"
    gate.set()

    assert (await late).message.arena_path == "late"


# --- errors ------------------------------------------------------------------------------------------------

METHODS: list[tuple[Method[Any, Any], Any]] = [(ECHO, EchoRequest), (UNARY, UnaryRequest)]
EACH_METHOD = pytest.mark.parametrize(("method", "request_type"), METHODS, ids=["bulk", "unary"])


def core_errors(root: type[KeraError] = KeraError) -> Iterator[type[KeraError]]:
    if root.__module__ == KeraError.__module__:
        yield root
    for subclass in root.__subclasses__():
        yield from core_errors(subclass)


@EACH_METHOD
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
async def test_errors_arrive_as_they_were_raised(
    wire: Wire, method: Method[Any, Any], request_type: Any, deferred: bool
) -> None:
    raised: list[KeraError] = []

    def fail(_call: Call[Any]) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_exception(raised[-1])
        if not deferred:
            raise raised[-1]
        return future

    await wire.serve({method: fail})
    channel = await wire.connect()

    for cls in core_errors():
        raised.append(cls("what to do, »at once«", stream="orders", limit=8, gap=[1, 2]))
        arrived = await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))
        assert type(arrived) is cls
        assert arrived.message == "what to do, »at once«"
        assert arrived.attributes == {"stream": "orders", "limit": 8, "gap": [1, 2]}
        assert arrived.retriable is cls.retriable


@EACH_METHOD
@pytest.mark.parametrize("character", ["x", "ä", "\udce9"])
async def test_an_error_with_much_to_say_arrives(
    wire: Wire, method: Method[Any, Any], request_type: Any, character: str
) -> None:
    def fail(_call: Call[Any]) -> Reply[Any]:
        raise UnknownStream(f"no stream {character * 100_000}", limit=8, name=character * 100_000)

    await wire.serve({method: fail})
    channel = await wire.connect()

    arrived = await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))

    assert type(arrived) is UnknownStream
    assert arrived.message.startswith("no stream ")
    assert arrived.attributes == {"limit": 8}


def raise_value_error(_call: Call[Any]) -> Any:
    raise ValueError("no such luck")


async def raise_value_error_later(_call: Call[Any]) -> Any:
    raise ValueError("no such luck")


def forget_the_reply(_call: Call[Any]) -> Any:
    return None


async def forget_the_reply_later(_call: Call[Any]) -> Any:
    return None


def give_up(_call: Call[Any]) -> Any:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


async def give_up_later(_call: Call[Any]) -> Any:
    raise asyncio.CancelledError


def answer_with_another_message(_call: Call[Any]) -> Any:
    return Reply(object())  # the defect that is to be answered


@EACH_METHOD
@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (raise_value_error, "ValueError: no such luck"),
        (raise_value_error_later, "ValueError: no such luck"),
        (forget_the_reply, "TypeError"),
        (forget_the_reply_later, "returned NoneType"),
        (give_up, "given up"),
        (give_up_later, "given up"),
        (answer_with_another_message, "AttributeError"),
    ],
)
async def test_a_defect_of_a_handler_is_answered_and_ends_nothing(
    wire: Wire, method: Method[Any, Any], request_type: Any, handler: Any, text: str
) -> None:
    await wire.serve({method: handler, OTHER_ECHO: echo})
    channel = await wire.connect()

    arrived = await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))

    assert type(arrived) is InternalError
    assert text in arrived.message
    assert (await channel.submit(OTHER_ECHO, numbered(3), timeout_s=TIMEOUT_S)).message.arena_path == "3"


async def test_an_error_is_only_about_its_own_call(wire: Wire) -> None:
    def some_fail(call: EchoCall) -> EchoReply:
        if call.message.chunk_count % 2:
            raise OutOfSequence("too early", number=call.message.chunk_count)
        return echo(call)

    await wire.serve({ECHO: some_fail})
    channel = await wire.connect()

    results = await asyncio.gather(
        *(channel.submit(ECHO, numbered(number), timeout_s=TIMEOUT_S) for number in range(20)), return_exceptions=True
    )

    for number, result in enumerate(results):
        if number % 2:
            assert isinstance(result, OutOfSequence)
            assert result.attributes == {"number": number}
        else:
            assert isinstance(result, Reply)
            assert result.message.arena_path == str(number)


@EACH_METHOD
async def test_an_unknown_method_is_refused(wire: Wire, method: Method[Any, Any], request_type: Any) -> None:
    await wire.serve({OTHER_ECHO: echo})
    channel = await wire.connect()

    arrived = await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))

    assert type(arrived) is ProtocolError
    assert "unknown method" in arrived.message
    assert (await channel.submit(OTHER_ECHO, numbered(3), timeout_s=TIMEOUT_S)).message.arena_path == "3"


# --- limits ------------------------------------------------------------------------------------------------


async def test_bulk_at_the_limit_passes(wire: Wire) -> None:
    await wire.serve({ECHO: echo}, bulk_bytes_max=MIB)
    channel = await wire.connect(bulk_bytes_max=MIB)

    assert await echoed(channel, 1, [bytes(MIB)]) == ("1", bytes(MIB))


async def test_a_request_over_the_limit_is_not_sent(wire: Wire) -> None:
    calls: list[int] = []

    def handle(call: EchoCall) -> EchoReply:
        calls.append(call.message.chunk_count)
        return echo(call)

    await wire.serve({ECHO: handle}, bulk_bytes_max=MIB)
    channel = await wire.connect(bulk_bytes_max=MIB)
    before = channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)

    refused = channel.submit(ECHO, numbered(2), [bytes(MIB), b"1"], timeout_s=TIMEOUT_S)

    error = await failure(refused)
    assert type(error) is RecordTooLarge
    assert error.attributes["limit"] == MIB
    assert "Echo: message of" in error.message
    assert (await before).message.arena_path == "1"
    assert (await echoed(channel, 3))[0] == "3"
    assert calls == [1, 3]


@EACH_METHOD
async def test_a_message_over_the_limit_is_not_sent_even_without_bulk(
    wire: Wire, method: Method[Any, Any], request_type: Any
) -> None:
    await wire.serve({UNARY: unary_echo, ECHO: echo})
    channel = await wire.connect()
    request = request_type()
    request.MergeFromString(b"\xfa\x01" + _length(HEAD_BYTES_MAX) + bytes(HEAD_BYTES_MAX))  # an unknown field, 31

    error = await failure(channel.submit(method, request, timeout_s=TIMEOUT_S))

    assert type(error) is RecordTooLarge
    assert error.attributes["limit"] == HEAD_BYTES_MAX


def _length(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


async def test_a_reply_over_the_limit_is_an_error_of_that_call_alone(wire: Wire) -> None:
    def inflate(call: EchoCall) -> EchoReply:
        return Reply(EchoResponse(), [memoryview(bytes(MIB + call.message.chunk_count))])

    await wire.serve({ECHO: inflate}, bulk_bytes_max=MIB)
    channel = await wire.connect(bulk_bytes_max=2 * MIB)

    before = channel.submit(ECHO, numbered(0), timeout_s=TIMEOUT_S)
    error = await failure(channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S))

    assert type(error) is RecordTooLarge
    assert error.attributes["limit"] == MIB
    assert b"".join((await before).bulk) == bytes(MIB)
    assert (await echoed(channel, 0))[1] == bytes(MIB)


async def test_a_unary_reply_over_the_limit_is_an_error(wire: Wire) -> None:
    await wire.serve({UNARY: lambda _: Reply(UnaryResponse(cluster_id="x" * HEAD_BYTES_MAX))})
    channel = await wire.connect()

    error = await failure(channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S))

    assert type(error) is RecordTooLarge


async def test_a_request_over_the_receivers_limit_alone_is_uncertain_and_says_why(wire: Wire) -> None:
    await wire.serve({ECHO: echo}, bulk_bytes_max=MIB)
    channel = await wire.connect(bulk_bytes_max=16 * MIB)

    error = await failure(channel.submit(ECHO, numbered(1), [bytes(8 * MIB)], timeout_s=TIMEOUT_S))

    assert type(error) is Uncertain
    assert "over the limits" in error.message or "larger than max" in error.message


async def test_bulk_for_a_method_that_takes_none_is_refused(wire: Wire) -> None:
    await wire.serve({UNARY: lambda _: Reply(UnaryResponse(), [memoryview(b"a")])})
    channel = await wire.connect()

    sent = await failure(channel.submit(UNARY, UnaryRequest(), [b"a"], timeout_s=TIMEOUT_S))
    answered = await failure(channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S))

    for error in (sent, answered):
        assert type(error) is InternalError
        assert "Unary has no bulk field" in error.message


# --- time and connections that end -------------------------------------------------------------------------


@EACH_METHOD
async def test_a_call_whose_time_is_up_is_uncertain(wire: Wire, method: Method[Any, Any], request_type: Any) -> None:
    waiting: list[asyncio.Future[Any]] = []

    def wait(_call: Call[Any]) -> "asyncio.Future[Any]":
        waiting.append(asyncio.get_running_loop().create_future())
        return waiting[-1]

    await wire.serve({method: wait, OTHER_ECHO: echo})
    channel = await wire.connect()

    error = await failure(channel.submit(method, request_type(), timeout_s=0.05))

    assert type(error) is Uncertain
    assert error.message == f"no answer from {wire.address} to {method.name} within 0.05 s"
    assert error.attributes == {"address": wire.address}

    # The answer that comes too late is nobody's.
    if waiting and not waiting[0].done():
        waiting[0].set_result(Reply(method.response()))
    assert (await channel.submit(OTHER_ECHO, numbered(3), timeout_s=TIMEOUT_S)).message.arena_path == "3"


@EACH_METHOD
async def test_a_caller_may_give_up(wire: Wire, method: Method[Any, Any], request_type: Any) -> None:
    await wire.serve({method: lambda _: Reply(method.response()), OTHER_ECHO: echo})
    channel = await wire.connect()

    for _ in range(3):
        channel.submit(method, request_type(), timeout_s=TIMEOUT_S).cancel()

    assert (await channel.submit(OTHER_ECHO, numbered(3), timeout_s=TIMEOUT_S)).message.arena_path == "3"


async def hold(wire: Wire) -> tuple[Any, Channel, dict[str, Any]]:
    """A server whose handlers never answer, a channel to it, and what the handlers saw."""
    seen: dict[str, Any] = {"calls": 0, "closed": 0, "futures": []}

    def wait(call: Call[Any]) -> "asyncio.Future[Any]":
        if "known" not in call.peer.state:
            call.peer.state["known"] = True
            call.peer.on_close.append(lambda: seen.update(closed=seen["closed"] + 1))
        seen["calls"] += 1
        seen["futures"].append(asyncio.get_running_loop().create_future())
        return seen["futures"][-1]  # type: ignore[no-any-return]

    server = await wire.serve({ECHO: wait, UNARY: wait})
    return server, await wire.connect(), seen


async def test_closing_a_channel_makes_what_is_in_flight_uncertain(wire: Wire) -> None:
    _, channel, seen = await hold(wire)
    in_flight: list[asyncio.Future[Any]] = [
        *(channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S) for _ in range(3)),
        channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S),
    ]
    await eventually(lambda: seen["calls"] == 4)
    was_closed = channel.closed

    await channel.close()

    for future in in_flight:
        error = await failure(future)
        assert type(error) is Uncertain
        assert error.message == f"connection to {wire.address} was lost: closed"
        assert error.attributes == {"address": wire.address}
    assert (was_closed, channel.closed) == (False, True)
    for method, request_type in METHODS:
        error = await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))
        assert type(error) is Unavailable
        assert error.message == f"connection to {wire.address} is closed"
    await channel.close()  # may be repeated


async def test_a_client_that_is_gone_is_noticed_by_the_handlers(wire: Wire) -> None:
    _, channel, seen = await hold(wire)
    in_flight = channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    await eventually(lambda: seen["calls"] == 1)

    await channel.close()

    await eventually(lambda: seen["futures"][0].cancelled() and seen["closed"] == 1)
    assert type(await failure(in_flight)) is Uncertain

    other = await wire.connect()  # and the server goes on
    submitted = other.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    await eventually(lambda: seen["calls"] == 2)
    seen["futures"][1].set_result(Reply(EchoResponse(arena_path="here")))
    assert (await submitted).message.arena_path == "here"


async def test_a_server_that_is_gone_makes_what_is_in_flight_uncertain(wire: Wire) -> None:
    server, channel, seen = await hold(wire)
    in_flight: list[asyncio.Future[Any]] = [
        channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S),
        channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S),
    ]
    await eventually(lambda: seen["calls"] == 2)

    await wire.stop(server)

    for future in in_flight:
        error = await failure(future)
        assert type(error) is Uncertain
        assert error.message.startswith(f"connection to {wire.address} was lost: ")


async def test_later_calls_to_a_server_that_is_gone_are_unavailable(wire: Wire) -> None:
    server, channel, seen = await hold(wire)
    in_flight = channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    await eventually(lambda: seen["calls"] == 1)
    await wire.stop(server)
    assert type(await failure(in_flight)) is Uncertain

    async def unavailable(method: Method[Any, Any], request: Any) -> bool:
        error = await failure(channel.submit(method, request, timeout_s=TIMEOUT_S))
        assert isinstance(error, Uncertain | Unavailable)  # uncertain, as long as the end has not been noticed
        return type(error) is Unavailable

    for method, request_type in METHODS:
        while not await unavailable(method, request_type()):
            await asyncio.sleep(0.01)


async def test_a_server_that_never_was_there_is_unavailable(wire: Wire) -> None:
    server = await wire.serve({})
    await wire.stop(server)

    async def connect_and_call(method: Method[Any, Any], request: Any) -> None:
        channel = await wire.connect()  # frames learn it here, gRPC connects only when there is something to send
        await channel.submit(method, request, timeout_s=TIMEOUT_S)

    for method, request_type in METHODS:
        with pytest.raises(Unavailable, match="cannot connect to"):
            await connect_and_call(method, request_type())


async def test_a_server_that_closes_sends_what_it_has_answered(wire: Wire) -> None:
    replies: list[asyncio.Future[Any]] = []
    answered = 0

    def count(call: EchoCall) -> EchoReply:
        nonlocal answered
        answered += 1
        return echo(call)

    server = await wire.serve({ECHO: count})
    channel = await wire.connect()
    replies += [channel.submit(ECHO, numbered(1), [bytes(64 * KIB)], timeout_s=TIMEOUT_S) for _ in range(16)]
    await eventually(lambda: answered == 16)

    await server.close()

    for reply in replies:
        assert b"".join((await reply).bulk) == bytes(64 * KIB)


async def test_closing_a_server_takes_a_bounded_time_whatever_its_clients_do(wire: Wire) -> None:
    server, channel, seen = await hold(wire)
    submitted = channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    await eventually(lambda: seen["calls"] == 1)

    async with asyncio.timeout(5):
        await server.close()

    await eventually(lambda: seen["futures"][0].cancelled() and seen["closed"] == 1)
    assert type(await failure(submitted)) is Uncertain


async def test_a_server_can_take_the_place_of_one_that_was_closed(wire: Wire) -> None:
    for _ in range(3):
        server = await wire.serve({ECHO: echo})
        channel = await wire.connect()
        assert (await echoed(channel, 5))[0] == "5"
        await wire.stop(server)


# --- memory ------------------------------------------------------------------------------------------------


async def test_memory_that_was_sent_is_let_go_of(wire: Wire) -> None:
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


async def test_however_much_is_asked_for_at_once_all_of_it_arrives(wire: Wire) -> None:
    # More than the server holds for one client: it stops reading, and goes on. See test_slow_readers.py as well.
    answered = 0
    reply_bytes = MIB // 4
    block = memoryview(bytes(reply_bytes))

    def handle(call: EchoCall) -> EchoReply:
        nonlocal answered
        answered += 1
        return Reply(EchoResponse(arena_path=str(call.message.chunk_count)), [block])

    await wire.serve({ECHO: handle})
    channel = await wire.connect()
    total = 10 * SEND_BUFFER_BYTES_MAX // reply_bytes

    for number, reply in enumerate(
        [channel.submit(ECHO, numbered(number), timeout_s=TIMEOUT_S) for number in range(total)]
    ):
        assert (await reply).message.arena_path == str(number)
        assert len((await reply).bulk[0]) == reply_bytes
    assert answered == total
