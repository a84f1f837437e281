"""The places at which something can be plugged into the sending of chunks. Nothing of it is needed to send.

    Plugins        of one producer: says what to plug into the sender of each broker
    Plugged        of one sender: how long chunks fill, how large requests may be, and hooks
    SenderHooks    called when something happens to a sender, see the methods

`SenderHooks` do nothing: what is plugged in overrides the methods that it needs. Hooks are called for chunks and
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
    """Called by one sender. Times are on the loop's clock."""

    def on_round(self) -> None:
        """A round begins: open chunks may be looked at in it, and requests sent."""

    def on_round_end(self) -> None:
        """All that may be sent now is sent."""

    def on_chunk_opened(self) -> None:
        """A chunk was opened that may wait for a time."""

    def on_looked(self, due: Due, now_s: float) -> None:
        """Open chunks were looked at, and those that are due are closed."""

    def on_connected(self, now_s: float) -> None:
        """There is a connection."""

    def on_request(self, request: Request) -> None:
        """A request is about to be sent. Something may be added to its message."""

    def on_failure(self, request: Request, error: BaseException) -> None:
        """A request was not sent, or not answered."""

    def on_answer(self, request: Request, answer: broker_pb2.MultiWriteChunksResponse, now_s: float) -> None:
        """A request was answered. Whether its chunks are stored is looked at next."""


class Listeners:
    """The methods of some hooks that do something, by what they are called for: the others cost nothing."""

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
    """The size of requests to one broker, and how many of them are in flight."""

    @property
    def bytes_max(self) -> int:
        """Bytes of one request, unless it is a single chunk."""
        ...

    @property
    def in_flight_max(self) -> int:
        """Requests that are not answered."""
        ...


class FixedBounds(NamedTuple):
    """Those of the settings."""

    bytes_max: int
    in_flight_max: int


class SenderPort(NamedTuple):
    """A sender as plug-ins see it."""

    broker_id: int
    bounds: FixedBounds
    """The largest ones."""
    stream_ids: Callable[[], set[int]]
    """The streams that it writes to."""
    channel: Callable[[], Channel | None]
    """Its connection."""
    wake_at: Callable[[float], None]
    """Have it begin a round then, or earlier."""


class Plugged(NamedTuple):
    """The plug-ins of one sender."""

    fill_time: FillTime
    bounds: RequestBounds
    hooks: Sequence[SenderHooks] = ()


class Plugins(NamedTuple):
    """The plug-ins of one producer's senders."""

    at_sender: Callable[[SenderPort], Plugged]
    """Makes those for the sender of one broker."""
    created_us: Callable[[int, StreamDescription, float], int | None]
    """Called with a broker, a stream, and when a chunk was made, on the loop's clock. Returns its time of day; None:
    the one of the producer's clock counts."""


def without_plugins(settings: ProducerSettings) -> Plugins:
    """None: chunks linger as settings say, and have the time by the producer's clock."""
    return Plugins(lambda port: Plugged(Linger(settings.linger_ms), port.bounds), lambda *_: None)
