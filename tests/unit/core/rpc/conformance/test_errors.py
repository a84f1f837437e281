"""Errors arrive as they were raised, and defects get an answer too. ``common.py`` describes this suite."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from kera.core.errors import InternalError, KeraError, OutOfSequence, ProtocolError, UnknownStream
from kera.core.rpc import Call, Method, Reply
from tests.unit.core.rpc.conformance.common import EACH_METHOD, EchoCall, EchoReply, failure
from tests.unit.core.rpc.transports import ECHO, OTHER_ECHO, TIMEOUT_S, Wire, echo, eventually, numbered, text_of


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
        if not deferred:
            raise raised[-1]
        future = asyncio.get_running_loop().create_future()
        future.set_exception(raised[-1])
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


class Held:
    """An object that a handler holds when it fails."""


@EACH_METHOD
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
async def test_objects_of_a_refused_request_are_freed_at_once(
    wire: Wire, method: Method[Any, Any], request_type: Any, deferred: bool
) -> None:
    """Not only at the next garbage collection: a message of half a megabyte may take thirty in memory."""
    held: list[weakref.ref[Held]] = []

    def refuse(_call: Call[Any]) -> Reply[Any]:
        mine = Held()
        held.append(weakref.ref(mine))
        try:
            raise KeyError("something within")
        except KeyError as error:
            raise UnknownStream("no such stream") from error

    async def refuse_later(call: Call[Any]) -> Reply[Any]:
        await asyncio.sleep(0)
        return refuse(call)

    await wire.serve({method: refuse_later if deferred else refuse})
    channel = await wire.connect()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))
        await eventually(lambda: not any(each() for each in held))
    finally:
        gc.enable()
    assert len(held) == 5


@EACH_METHOD
async def test_an_error_with_a_long_message_arrives_shortened(
    wire: Wire, method: Method[Any, Any], request_type: Any
) -> None:
    character = ""

    def fail(_call: Call[Any]) -> Reply[Any]:
        raise UnknownStream(f"no stream {character * 100_000}", limit=8, name=character * 100_000)

    await wire.serve({method: fail})
    channel = await wire.connect()

    for character in ("x", "ä", "\udce9"):
        arrived = await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))

        assert type(arrived) is UnknownStream, ascii(character)
        assert arrived.message.startswith("no stream "), ascii(character)
        assert arrived.attributes == {"limit": 8}, ascii(character)


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
    return Reply(object())  # the defect


DEFECTS: list[tuple[Any, str]] = [
    (raise_value_error, "ValueError: no such luck"),
    (raise_value_error_later, "ValueError: no such luck"),
    (forget_the_reply, "TypeError"),
    (forget_the_reply_later, "returned NoneType"),
    (give_up, "given up"),
    (give_up_later, "given up"),
    (answer_with_another_message, "AttributeError"),
]


@EACH_METHOD
async def test_a_defect_of_a_handler_is_an_internal_error_and_the_channel_stays(
    wire: Wire, method: Method[Any, Any], request_type: Any
) -> None:
    handler, _ = DEFECTS[0]

    def handle(call: Call[Any]) -> Any:
        return handler(call)

    await wire.serve({method: handle, OTHER_ECHO: echo})
    channel = await wire.connect()

    for handler, text in DEFECTS:
        arrived = await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))

        assert type(arrived) is InternalError, handler
        assert text in arrived.message, handler
        assert text_of((await channel.submit(OTHER_ECHO, numbered(3), timeout_s=TIMEOUT_S)).message) == "3", handler


async def test_an_error_affects_only_its_own_call(wire: Wire) -> None:
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
            assert text_of(result.message) == str(number)


@EACH_METHOD
async def test_an_unknown_method_is_refused(wire: Wire, method: Method[Any, Any], request_type: Any) -> None:
    await wire.serve({OTHER_ECHO: echo})
    channel = await wire.connect()

    arrived = await failure(channel.submit(method, request_type(), timeout_s=TIMEOUT_S))

    assert type(arrived) is ProtocolError
    assert "unknown method" in arrived.message
    assert text_of((await channel.submit(OTHER_ECHO, numbered(3), timeout_s=TIMEOUT_S)).message) == "3"
