"""The sender refuses messages that are too large. ``common.py`` describes this suite."""

from typing import Any

from kera.core.errors import InternalError, RecordTooLarge, Uncertain
from kera.core.rpc import Method, Reply
from kera.core.rpc.limits import HEAD_BYTES_MAX
from tests.unit.core.rpc.conformance.common import EACH_METHOD, MIB, EchoCall, EchoReply, echoed, failure
from tests.unit.core.rpc.transports import (
    ECHO,
    TIMEOUT_S,
    UNARY,
    EchoResponse,
    UnaryRequest,
    UnaryResponse,
    Wire,
    echo,
    numbered,
    text_of,
    unary_echo,
)


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
    assert text_of((await before).message) == "1"
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
    assert error.attributes["limit"] == method.request_bytes_max < HEAD_BYTES_MAX


def _length(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


async def test_a_reply_over_the_limit_fails_only_its_own_call(wire: Wire) -> None:
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


async def test_a_request_over_the_receivers_limit_only_is_uncertain_with_the_reason(wire: Wire) -> None:
    await wire.serve({ECHO: echo}, bulk_bytes_max=MIB)
    channel = await wire.connect(bulk_bytes_max=16 * MIB)

    error = await failure(channel.submit(ECHO, numbered(1), [bytes(8 * MIB)], timeout_s=TIMEOUT_S))

    assert type(error) is Uncertain
    assert "over the limits" in error.message or "larger than max" in error.message


async def test_bulk_for_a_method_without_bulk_is_refused(wire: Wire) -> None:
    await wire.serve({UNARY: lambda _: Reply(UnaryResponse(), [memoryview(b"a")])})
    channel = await wire.connect()

    sent = await failure(channel.submit(UNARY, UnaryRequest(), [b"a"], timeout_s=TIMEOUT_S))
    answered = await failure(channel.submit(UNARY, UnaryRequest(), timeout_s=TIMEOUT_S))

    for error in (sent, answered):
        assert type(error) is InternalError
        assert "Unary has no bulk field" in error.message
