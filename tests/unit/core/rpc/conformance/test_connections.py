"""Timeouts, and connections that end. ``common.py`` describes this suite."""

import asyncio
from typing import Any

import pytest

from kera.core.errors import Unavailable, Uncertain
from kera.core.rpc import Call, Channel, Method, Reply
from tests.unit.core.rpc.conformance.common import EACH_METHOD, KIB, METHODS, EchoCall, EchoReply, echoed, failure
from tests.unit.core.rpc.transports import (
    ECHO,
    OTHER_ECHO,
    TIMEOUT_S,
    UNARY,
    UnaryRequest,
    Wire,
    echo,
    eventually,
    numbered,
    text_of,
)


@EACH_METHOD
async def test_a_call_that_times_out_is_uncertain(wire: Wire, method: Method[Any, Any], request_type: Any) -> None:
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

    # The late answer is dropped.
    if waiting and not waiting[0].done():
        waiting[0].set_result(Reply(method.response()))
    assert text_of((await channel.submit(OTHER_ECHO, numbered(3), timeout_s=TIMEOUT_S)).message) == "3"


@EACH_METHOD
async def test_a_caller_may_cancel_a_call(wire: Wire, method: Method[Any, Any], request_type: Any) -> None:
    await wire.serve({method: lambda _: Reply(method.response()), OTHER_ECHO: echo})
    channel = await wire.connect()

    for _ in range(3):
        channel.submit(method, request_type(), timeout_s=TIMEOUT_S).cancel()

    assert text_of((await channel.submit(OTHER_ECHO, numbered(3), timeout_s=TIMEOUT_S)).message) == "3"


async def hold(wire: Wire) -> tuple[Any, Channel, dict[str, Any]]:
    """A server whose handlers never answer, a channel to it, and a record of the handlers."""
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


async def test_closing_a_channel_makes_calls_in_flight_uncertain(wire: Wire) -> None:
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


@EACH_METHOD
async def test_a_client_that_leaves_cancels_its_handlers(
    wire: Wire, method: Method[Any, Any], request_type: Any
) -> None:
    _, channel, seen = await hold(wire)
    in_flight = channel.submit(method, request_type(), timeout_s=TIMEOUT_S)
    await eventually(lambda: seen["calls"] == 1)

    await channel.close()

    await eventually(lambda: seen["futures"][0].cancelled() and seen["closed"] == 1)
    assert type(await failure(in_flight)) is Uncertain

    other = await wire.connect()  # and the server goes on
    submitted = other.submit(method, request_type(), timeout_s=TIMEOUT_S)
    await eventually(lambda: seen["calls"] == 2)
    seen["futures"][1].set_result(Reply(method.response()))
    await submitted


async def test_a_stopped_server_makes_calls_in_flight_uncertain(wire: Wire) -> None:
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
        assert error.message.count("connection to") == 1


async def test_later_calls_to_a_stopped_server_are_unavailable(wire: Wire) -> None:
    server, channel, seen = await hold(wire)
    in_flight = channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    await eventually(lambda: seen["calls"] == 1)
    await wire.stop(server)
    assert type(await failure(in_flight)) is Uncertain

    async def unavailable(method: Method[Any, Any], request: Any) -> bool:
        error = await failure(channel.submit(method, request, timeout_s=TIMEOUT_S))
        assert isinstance(error, Uncertain | Unavailable)  # uncertain until the channel notices the end
        return type(error) is Unavailable

    for method, request_type in METHODS:
        while not await unavailable(method, request_type()):
            await asyncio.sleep(0.01)


async def test_an_address_without_a_server_is_unavailable(wire: Wire) -> None:
    server = await wire.serve({})
    await wire.stop(server)

    async def connect_and_call(method: Method[Any, Any], request: Any) -> None:
        channel = await wire.connect()  # frames fail here, gRPC connects only with the first call
        await channel.submit(method, request, timeout_s=TIMEOUT_S)

    for method, request_type in METHODS:
        with pytest.raises(Unavailable, match="cannot connect to"):
            await connect_and_call(method, request_type())


async def test_a_closing_server_sends_its_finished_replies(wire: Wire) -> None:
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


async def test_closing_a_server_with_calls_in_flight_takes_a_limited_time(wire: Wire) -> None:
    server, channel, seen = await hold(wire)
    submitted = channel.submit(ECHO, numbered(1), timeout_s=TIMEOUT_S)
    await eventually(lambda: seen["calls"] == 1)

    async with asyncio.timeout(30):
        await server.close()

    await eventually(lambda: seen["futures"][0].cancelled() and seen["closed"] == 1)
    assert type(await failure(submitted)) is Uncertain


async def test_a_new_server_serves_after_one_was_stopped(wire: Wire) -> None:
    for _ in range(3):
        server = await wire.serve({ECHO: echo})
        channel = await wire.connect()
        assert (await echoed(channel, 5))[0] == "5"
        await wire.stop(server)
