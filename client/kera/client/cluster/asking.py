"""Asks a broker, and interprets its answer: the only place that notices stale routes and recreated streams.

A broker only knows a stream if it has streamlets of it. A stream that it does not know may be at other brokers, or not
have reached it yet: only the coordinator knows whether the stream exists. When another broker may have to be asked, the
metadata that led to this one counts as stale, and the next look-up asks the coordinator again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kera.client.types import StreamDescription
from kera.core.errors import KeraError, NotOwner, Unavailable, Uncertain, UnknownStream
from kera.core.rpc import Channel, Method, Reply
from kera.core.rpc.method import RequestT, ResponseT


class Metadata(Protocol):
    """The known metadata of streams, see `kera.client.cluster.cluster.Cluster`."""

    def forget(self, name: str) -> None:
        """Ask the coordinator again about a stream, next time."""
        ...


class Brokers(Metadata, Protocol):
    """Metadata, and connections to brokers."""

    @property
    def request_timeout_s(self) -> float:
        """Maximum time to wait for one answer."""
        ...

    async def channel(self, stream: StreamDescription, broker_id: int) -> Channel:
        """Return a live connection to a broker that `stream` names."""
        ...


async def ask_broker(
    brokers: Brokers, stream: StreamDescription, broker_id: int, method: Method[RequestT, ResponseT], request: RequestT
) -> ResponseT:
    """Make one attempt to ask a broker about a stream. Raises its error, translated by `broker_failed`."""
    return (await submit_to_broker(brokers, stream, broker_id, method, request, ())).message


async def submit_to_broker(
    brokers: Brokers,
    stream: StreamDescription,
    broker_id: int,
    method: Method[RequestT, ResponseT],
    request: RequestT,
    bulk: Sequence[Any],
) -> Reply[ResponseT]:
    """Like `ask_broker`, with bulk bytes in addition to the request and the answer."""
    try:
        channel = await brokers.channel(stream, broker_id)
        return await channel.submit(
            method, request, [part for part in bulk if len(part)], timeout_s=brokers.request_timeout_s
        )
    except KeraError as failure:
        error = broker_failed(brokers, stream.name, failure)
        if error is failure:
            raise
        raise error from failure


def broker_failed(metadata: Metadata, name: str, failure: KeraError) -> KeraError:
    """Translate a broker's error with `of_broker`, and forget the route if it may be stale."""
    error = of_broker(failure)
    if is_route_error(error):
        metadata.forget(name)
    return error


def is_route_error(error: BaseException) -> bool:
    """Return whether another broker may have to be asked, because the metadata that led to this one may be stale."""
    return isinstance(error, (NotOwner, Unavailable, Uncertain))


def of_broker(error: KeraError) -> KeraError:
    """Return the meaning of a broker's `error` for a client that knows the stream from the coordinator."""
    if isinstance(error, UnknownStream):
        return NotOwner(f"the broker does not have it: {error.message}", **error.attributes)
    return error


def same_stream(now: StreamDescription, stream_id: int) -> StreamDescription:
    """Return `now`, the present stream of the name, if its id is `stream_id`. Raises `UnknownStream`."""
    if now.stream_id != stream_id:
        raise UnknownStream(
            f"stream {now.name!r} was deleted and created again; open or prepare it again",
            stream=now.name,
            stream_id=stream_id,
        )
    return now
