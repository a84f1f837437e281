"""Methods, calls and replies: what the transports carry and the handlers see.

The bulk of a call is memory beside the message. Its lifetime is the point to know:

* A **handler** may read ``call.bulk`` until it returns; when it returns an awaitable, the bytes must have been consumed
  before that. So the transport can reuse one receive buffer, and the bytes are copied once, to where they stay. The
  awaitable is cancelled when the connection is gone.
* The bulk of a **reply that a caller gets** belongs to the caller, for as long as it holds it.
* Bulk that is **given to be sent** must not change until the transport has let go of it; it holds references to the
  very objects it was given, so memory that is to be reused can be tied to a `weakref.finalize` of a memoryview among
  them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message

from kera.core.access.identity import Identity
from kera.core.errors import AuthenticationFailed, QuotaExceeded
from kera.core.rpc.answer import Answer
from kera.v1 import access_pb2

REFUSALS = (AuthenticationFailed, QuotaExceeded)
"""Errors by which a connection or a stream ends of which a daemon takes nothing: it has done nothing of what was asked.
"""

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
ResponseT_co = TypeVar("ResponseT_co", bound=Message, covariant=True)


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """One remote operation. Methods with a bulk field are bidirectional streams in gRPC, the others unary."""

    service: str
    """Full protobuf name: ``kera.v1.Broker``."""
    name: str
    number: int
    """Identifies the method in a frame; never reused."""
    request: type[RequestT]
    response: type[ResponseT]
    bulk: bool = False
    """Requests or responses have a last field ``chunks`` of type bytes, which travels beside the message."""
    large: bool = False
    """Tells of all streams there are: without bulk, answers may be as large as messages with bulk. Over gRPC only."""
    large_request: bool = False
    """The same of the request: of those that only daemons send."""
    request_bytes_max: int = 1 << 19
    """Maximum of other requests, without their bulk. A message is read in one go, and a larger one would hold up all
    others, so larger requests are split."""

    @property
    def path(self) -> str:
        """GRPC's name of the method."""
        return f"/{self.service}/{self.name}"


def _nothing() -> None:
    """Stands for what a peer does with its connection, where it has none."""


@dataclass(slots=True)
class Peer:
    """The other end of a connection, as a handler sees it.

    In gRPC, where connections are none of the handlers' business, it is the other end of one stream, or of one unary
    call.
    """

    transport: str
    """``unix``, ``tcp`` or ``grpc``."""
    address: str
    on_close: list[Callable[[], None]] = field(default_factory=list)
    """Called once, when the connection is gone."""
    state: dict[str, Any] = field(default_factory=dict)
    """State that handlers keep per connection."""
    identity: Identity | None = None
    """The peer's identity; None: unknown, or, without a `Doorkeeper`, not asked for."""
    remembered: Any = None
    """The `Doorkeeper`'s memory of the peer's identity."""
    end: Callable[[], None] = _nothing
    """Ends the connection, and what is under way over it."""
    asked: bool = False
    """It has asked for more than to be known: it stays who it is."""
    dismissed: str = ""
    """Why its connection is being ended, for who is there: it is nobody's any more; empty: it is not."""
    hold: Callable[[], None] = _nothing
    """Takes nothing more from the connection, until `release` was called as often."""
    release: Callable[[], None] = _nothing
    lasts: bool = True
    """It is there for more than one call."""

    def closed(self) -> None:
        """Run the callbacks, each of them even if another fails, and let go of the connection.

        What is still under way for it may keep the peer, and the connection has it: that would be a cycle.
        """
        callbacks, self.on_close = self.on_close, []
        with contextlib.ExitStack() as stack:
            stack.callback(self._let_go)
            for callback in reversed(callbacks):
                stack.callback(callback)

    def _let_go(self) -> None:
        self.end = self.hold = self.release = _nothing

    def dismiss(self, why: str) -> None:
        """End the connection. Until that is so, and for what goes on without it, it is nobody's."""
        self.identity = self.remembered = None
        self.dismissed = why
        self.end()


class Evidence(NamedTuple):
    """The evidence that a transport has of a peer's identity."""

    certificate: bytes = b""
    """That TLS has verified, DER or PEM."""
    user_id: int | None = None
    """User id of the process at the other end of a unix socket."""
    token: str = ""
    """That a call has shown."""


class Doorkeeper(Protocol):
    """Finds out who peers are."""

    def admit(self, peer: Peer, evidence: Evidence) -> None:
        """Set `Peer.identity`, if the evidence is enough. Raises `AuthenticationFailed` for a token that is invalid."""
        ...


@dataclass(slots=True)
class Call(Generic[RequestT]):
    """A request as a handler gets it."""

    message: RequestT
    bulk: memoryview
    peer: Peer


@dataclass(slots=True)
class Reply(Generic[ResponseT_co]):
    """A response: a message, and the memory that goes with it, in pieces that follow each other."""

    message: ResponseT_co
    bulk: Sequence[memoryview] = ()


Handler = Callable[[Call[Any]], Reply[Any] | Awaitable[Reply[Any]]]
"""A plain function: it reads the bulk before it returns, and returns a reply or an awaitable for one."""
Service = Mapping[Method[Any, Any], Handler]


class Channel(Protocol):
    """A connection to one daemon."""

    @property
    def transport(self) -> str:
        """``unix``, ``tcp`` or ``grpc``."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the connection is gone; a closed channel never comes back."""
        ...

    def submit(
        self,
        method: Method[RequestT, ResponseT],
        message: RequestT,
        bulk: Sequence[Any] = (),
        *,
        timeout_s: float,
    ) -> Answer[Reply[ResponseT]]:
        """Send a request now; calls of one channel and bulk method arrive in the order of their submission.

        Nothing is raised here; the future fails with the error that the daemon answered, with `RecordTooLarge` or
        `Unavailable` if nothing was sent, or with `Uncertain` when the connection broke or `timeout_s` ran out after
        sending. The message may be used again after this call.

        Requests queue up in memory if the daemon takes them slowly: how many are in flight is the caller's to bound.
        """
        ...

    async def close(self) -> None:
        """Close the connection; what is in flight fails with `Uncertain`."""
        ...


class Introduction(Protocol):
    """Shows a daemon who we are."""

    def __call__(
        self, *, each_call: bool
    ) -> Generator[access_pb2.AuthenticateRequest, access_pb2.AuthenticateResponse, str]:
        """Requests to authenticate, each made with the answer to the one before; returns what calls are to show.

        An `AuthenticationFailed` that is the answer is raised where the request was made. `each_call`: calls show it
        (gRPC); else the connection is known by what was asked over it. Raises `AuthenticationFailed`.
        """
        ...


async def introduce(
    introduction: Introduction | None,
    ask: Callable[[access_pb2.AuthenticateRequest], Awaitable[access_pb2.AuthenticateResponse]],
    *,
    each_call: bool,
) -> str:
    """Show who we are, with `ask` for each step; returns what calls are to show.

    Answers are worked on in a thread: a server's iterations of a password's hash may take a second.
    """
    if introduction is None:
        return ""
    steps = introduction(each_call=each_call)
    try:
        request = next(steps)
        while True:
            try:
                answer = await ask(request)
            except AuthenticationFailed as error:
                request = steps.throw(error)  # there may be something else to show
            else:
                done, result = await asyncio.to_thread(_sent, steps, answer)
                if done:
                    return str(result)
                request = result
    except StopIteration as end:
        return str(end.value)


def _sent(steps: Generator[Any, Any, str], answer: access_pb2.AuthenticateResponse) -> tuple[bool, Any]:
    """Whether the steps are over, and what they return, or the next request: no future takes a `StopIteration`."""
    try:
        return False, steps.send(answer)
    except StopIteration as end:
        return True, end.value


async def call(
    channel: Channel,
    method: Method[RequestT, ResponseT],
    message: RequestT,
    *,
    timeout_s: float,
) -> ResponseT:
    """Send a request without bulk and wait for its response."""
    return (await channel.submit(method, message, timeout_s=timeout_s)).message
