"""One suite over gRPC, frames over TCP and frames over unix sockets: promises for calls over any transport.

Neither the caller nor the handler knows the transport of a call; so any difference between transports that one of
them could notice is a defect. The tests are in the other files of this folder; each runs over every transport, on
each kind of event loop. Tests of a single transport are one folder up.
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
    """Call ECHO, and return the text and the bulk of its reply."""
    reply = await channel.submit(ECHO, numbered(number), bulk, timeout_s=TIMEOUT_S)
    return text_of(reply.message), b"".join(reply.bulk)


async def failure(future: "asyncio.Future[Any]") -> KeraError:
    """Await the error of a call."""
    with pytest.raises(KeraError) as caught:
        await future
    return caught.value
