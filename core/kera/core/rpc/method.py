"""Methods, calls and replies: what the transports carry and the handlers see.

The bulk of a call is memory beside the message. Its lifetime matters:

* A **handler** may read ``call.bulk`` until it returns; if it returns an awaitable, it must have consumed the bytes
  before. So the transport can reuse one receive buffer, and the bytes are copied only once, to where they stay. The
  awaitable is cancelled when the connection is gone.
* The bulk of a **reply that a caller gets** belongs to the caller for as long as it refers to it.
* Bulk that is **given to be sent** must not change until the transport has released it. The transport refers to the
  objects themselves that it was given, so memory that is to be reused can be tied to a `weakref.finalize` of a
  memoryview among them.
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
"""Errors with which a daemon refuses a whole connection or stream: it has carried out none of its requests."""

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
    """Answers have no bulk but may be as large as messages with bulk, as they list all streams. Over gRPC only."""
    large_request: bool = False
    """Requests may be as large; only for requests that only daemons send."""
    request_bytes_max: int = 1 << 19
    """Maximum of other requests, without their bulk. A message is parsed in one go, and a larger one would delay all
    others, so callers split larger requests."""

    @property
    def path(self) -> str:
        """GRPC's name of the method."""
        return f"/{self.service}/{self.name}"


def _nothing() -> None:
    """Stands for the actions on a connection of a peer that has none."""


@dataclass(slots=True)
class Peer:
    """The other end of a connection, as a handler sees it.

    In gRPC, where handlers do not see connections, it is the other end of one stream, or of one unary call.
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
    """Ends the connection, and the calls that are in progress over it."""
    asked: bool = False
    """Whether it has made requests other than to authenticate: from then on its identity cannot change."""
    dismissed: str = ""
    """Why its connection is being ended, in words for the peer; from then on it has no identity. Empty: it is not."""
    hold: Callable[[], None] = _nothing
    """Stops taking requests from the connection until `release` was called as often."""
    release: Callable[[], None] = _nothing
    lasts: bool = True
    """Whether it lasts longer than one call."""

    def closed(self) -> None:
        """Run all callbacks, even if one fails, and drop the references to the connection.

        Calls that are still in progress may refer to the peer, and the connection refers to them: without this they
        would form a cycle.
        """
        callbacks, self.on_close = self.on_close, []
        with contextlib.ExitStack() as stack:
            stack.callback(self._let_go)
            for callback in reversed(callbacks):
                stack.callback(callback)

    def _let_go(self) -> None:
        self.end = self.hold = self.release = _nothing

    def dismiss(self, why: str) -> None:
        """End the connection, and remove the identity at once, so that calls that still go on have none."""
        self.identity = self.remembered = None
        self.dismissed = why
        self.end()


class Evidence(NamedTuple):
    """The evidence that a transport has of a peer's identity."""

    certificate: bytes = b""
    """The certificate that TLS has verified, as DER or PEM."""
    user_id: int | None = None
    """User id of the process at the other end of a unix socket."""
    token: str = ""
    """The token that a call has shown."""


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
    """A response: a message, and its bulk as consecutive pieces of memory."""

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

        It raises no errors; the future fails with the error that the daemon answered, with `RecordTooLarge` or
        `Unavailable` if nothing was sent, or with `Uncertain` if the connection broke or `timeout_s` ran out after
        sending. The message may be used again after this call.

        Requests queue up in memory if the daemon takes them slowly, so callers have to bound the number in flight.
        """
        ...

    async def close(self) -> None:
        """Close the connection; requests in flight fail with `Uncertain`."""
        ...


class Introduction(Protocol):
    """Authenticates this process with a daemon."""

    def __call__(
        self, *, each_call: bool
    ) -> Generator[access_pb2.AuthenticateRequest, access_pb2.AuthenticateResponse, str]:
        """Yield requests to authenticate and get the answer to each; return the token that calls have to show.

        If the answer is an `AuthenticationFailed`, it is raised at the ``yield``. `each_call`: each call shows the
        token (gRPC); otherwise the requests authenticate the whole connection. Raises `AuthenticationFailed`.
        """
        ...


async def introduce(
    introduction: Introduction | None,
    ask: Callable[[access_pb2.AuthenticateRequest], Awaitable[access_pb2.AuthenticateResponse]],
    *,
    each_call: bool,
) -> str:
    """Authenticate, with `ask` for each step; return the token that calls have to show.

    Answers are processed in a thread, as the number of iterations for a password's hash, which the server sets, may
    take a second.
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
    """Return (True, the steps' result) or (False, the next request), as a future cannot raise `StopIteration`."""
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
