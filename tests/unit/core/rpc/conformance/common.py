"""One suite over gRPC, frames over TCP and frames over unix sockets: what holds for a call whatever carries it.

A caller does not know by which transport a call goes, and a handler not by which it came; so a difference between
transports that one of them could notice is a defect. The tests are in the other files of this folder; each runs over
every transport, on each kind of event loop. What a transport has of its own is tested one folder up.
"""

import asyncio
from typing import Any

import pytest

from kera.core.errors import KeraError
from kera.core.rpc import Call, Channel, Method, Reply
from tests.unit.core.rpc.transports import (
    ECHO,
    TIMEOUT_S,
    UNARY,
    EchoRequest,
    EchoResponse,
    UnaryRequest,
    numbered,
    text_of,
)

KIB = 1 << 10
MIB = 1 << 20

EchoCall = Call[EchoRequest]
EchoReply = Reply[EchoResponse]

METHODS: list[tuple[Method[Any, Any], Any]] = [(ECHO, EchoRequest), (UNARY, UnaryRequest)]
EACH_METHOD = pytest.mark.parametrize(("method", "request_type"), METHODS, ids=["bulk", "unary"])


async def echoed(channel: Channel, number: int = 1, bulk: Any = ()) -> tuple[str, bytes]:
    """What ECHO answers."""
    reply = await channel.submit(ECHO, numbered(number), bulk, timeout_s=TIMEOUT_S)
    return text_of(reply.message), b"".join(reply.bulk)


async def failure(future: "asyncio.Future[Any]") -> KeraError:
    """The error that a call ends with."""
    with pytest.raises(KeraError) as caught:
        await future
    return caught.value
