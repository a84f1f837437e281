"""Plug-ins and hooks for the sending of chunks; a producer can send without any.

    Plugins        of one producer: makes the plug-ins for the sender of each broker
    Plugged        of one sender: how long chunks fill, how large requests may be, and hooks
    SenderHooks    called on events of a sender, see the methods

The methods of `SenderHooks` do nothing: a plug-in overrides the methods that it needs. Hooks are called for chunks and
requests, never for a record, and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kera.client.producing.sending.fill_time import Due, FillTime, Linger
from kera.client.producing.sending.request import Request
from kera.client.settings import ProducerSettings
from kera.client.types import StreamDescription
from kera.core.rpc import Channel
from kera.v1 import broker_pb2


class SenderHooks:
    """Hooks that one sender calls. Times are on the loop's clock."""

    def on_round(self) -> None:
        """A round begins: the sender may close open chunks in it, and send requests."""

    def on_round_end(self) -> None:
        """A round ends: the sender has sent all that it may send now."""

    def on_chunk_opened(self) -> None:
        """A chunk was opened that may wait for a time."""

    def on_looked(self, due: Due, now_s: float) -> None:
        """The sender has looked at open chunks, and closed due ones."""

    def on_connected(self, now_s: float) -> None:
        """The sender has connected to the broker."""

    def on_request(self, request: Request) -> None:
        """A request is about to be sent. The hook may add to its message."""

    def on_failure(self, request: Request, error: BaseException) -> None:
        """A request was not sent, or not answered."""

    def on_answer(self, request: Request, answer: broker_pb2.MultiWriteChunksResponse, now_s: float) -> None:
        """A request was answered. Next, the sender looks whether its chunks are stored."""


class Listeners:
    """The overridden methods of hooks, by event: methods that are not overridden cost nothing."""

    def __init__(self, hooks: Sequence[SenderHooks]) -> None:
        def those(method: str) -> list[Any]:
            nothing = getattr(SenderHooks, method)
            return [getattr(each, method) for each in hooks if getattr(type(each), method) is not nothing]

        self.on_round: list[Callable[[], None]] = those("on_round")
        self.on_round_end: list[Callable[[], None]] = those("on_round_end")
        self.on_chunk_opened: list[Callable[[], None]] = those("on_chunk_opened")
        self.on_looked: list[Callable[[Due, float], None]] = those("on_looked")
        self.on_connected: list[Callable[[float], None]] = those("on_connected")
        self.on_request: list[Callable[[Request], None]] = those("on_request")
        self.on_failure: list[Callable[[Request, BaseException], None]] = those("on_failure")
        self.on_answer: list[Callable[[Request, broker_pb2.MultiWriteChunksResponse, float], None]] = those("on_answer")


class RequestBounds(Protocol):
    """Bounds on the size of requests to one broker, and on their number in flight."""

    @property
    def bytes_max(self) -> int:
        """Maximum bytes of one request, unless it is a single chunk."""
        ...

    @property
    def in_flight_max(self) -> int:
        """Maximum number of unanswered requests."""
        ...


class FixedBounds(NamedTuple):
    """The bounds that the settings give."""

    bytes_max: int
    in_flight_max: int


class SenderPort(NamedTuple):
    """The view of a sender that plug-ins get."""

    broker_id: int
    bounds: FixedBounds
    """The upper limits of its bounds."""
    stream_ids: Callable[[], set[int]]
    """Returns the streams that it writes to."""
    channel: Callable[[], Channel | None]
    """Returns its connection."""
    wake_at: Callable[[float], None]
    """Makes the sender begin a round at this time, or earlier."""


class Plugged(NamedTuple):
    """The plug-ins of one sender."""

    fill_time: FillTime
    bounds: RequestBounds
    hooks: Sequence[SenderHooks] = ()


class Plugins(NamedTuple):
    """The plug-ins of one producer's senders."""

    at_sender: Callable[[SenderPort], Plugged]
    """Makes the plug-ins for the sender of one broker."""
    created_us: Callable[[int, StreamDescription, float], int | None]
    """Takes a broker, a stream, and the time on the loop's clock when a chunk was made. Returns the time of day for the
    chunk; None: the time on the producer's clock counts."""


def without_plugins(settings: ProducerSettings) -> Plugins:
    """Return plug-ins that add nothing: chunks fill for ``linger_ms``, and have the time on the producer's clock."""
    return Plugins(lambda port: Plugged(Linger(settings.linger_ms), port.bounds), lambda *_: None)
