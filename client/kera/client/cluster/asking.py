"""Asking a broker, and what its answer means: the one place where stale routes and recreated streams are noticed.

A broker knows the streams of which it has something. So one that it does not know is with others, or has not come to it
yet: whether there still is such a stream, only the coordinator says. Whoever finds that another broker may have to be
asked calls the metadata that led there stale, and the next look asks the coordinator again.
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
    """The same with connections to brokers."""

    @property
    def request_timeout_s(self) -> float:
        """Time for one answer."""
        ...

    async def channel(self, stream: StreamDescription, broker_id: int) -> Channel:
        """A live connection to a broker that `stream` names."""
        ...


async def ask_broker(
    brokers: Brokers, stream: StreamDescription, broker_id: int, method: Method[RequestT, ResponseT], request: RequestT
) -> ResponseT:
    """One attempt to ask a broker about a stream. Raises its error in the words of `broker_failed`."""
    return (await submit_to_broker(brokers, stream, broker_id, method, request, ())).message


async def submit_to_broker(
    brokers: Brokers,
    stream: StreamDescription,
    broker_id: int,
    method: Method[RequestT, ResponseT],
    request: RequestT,
    bulk: Sequence[Any],
) -> Reply[ResponseT]:
    """The same with bytes besides the request and the answer."""
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
    """The meaning of a broker's `failure` for a client that has the stream from the coordinator; forgets a stale
    route.
    """
    error = of_broker(failure)
    if is_route_error(error):
        metadata.forget(name)
    return error


def is_route_error(error: BaseException) -> bool:
    """Whether somebody else may have to be asked: the metadata that led there may be stale."""
    return isinstance(error, (NotOwner, Unavailable, Uncertain))


def of_broker(error: KeraError) -> KeraError:
    """The meaning of a broker's `error` for a client that has the stream from the coordinator."""
    if isinstance(error, UnknownStream):
        return NotOwner(f"the broker does not have it: {error.message}", **error.attributes)
    return error


def same_stream(now: StreamDescription, stream_id: int) -> StreamDescription:
    """`now`, what its name stands for now, if that is the stream `stream_id` still. Raises `UnknownStream`."""
    if now.stream_id != stream_id:
        raise UnknownStream(
            f"stream {now.name!r} was deleted and created again; open or prepare it again",
            stream=now.name,
            stream_id=stream_id,
        )
    return now
