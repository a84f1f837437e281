"""The place at which something can be plugged into the handling of requests. Nothing of it is needed to write or read.

`RequestHooks` do nothing: what is plugged in overrides the methods that it needs. They are called for requests that
reach a handler in Python, never for a chunk or a record. What the native core takes as a whole has no field that any of
them looks at: a request with one is left to the handler (``take.c``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kera.broker.serving.pending_write import PendingWrite, WriteReply
from kera.core.rpc import Call
from kera.v1 import broker_pb2

WriteCall = Call[broker_pb2.MultiWriteChunksRequest]
ReadCall = Call[broker_pb2.MultiReadChunksRequest]
Write = Callable[[WriteCall], "WriteReply | asyncio.Future[WriteReply]"]


class RequestHooks:
    """Called by a broker's service."""

    def around_write(self, write: Write) -> Write:
        """The handler of requests to write from now on."""
        return write

    def on_write(self, call: WriteCall) -> None:
        """A request to write is handled next. What this raises is its answer."""

    def on_written(self, write: PendingWrite) -> None:
        """A request to write is about to be answered. Something may be added to its response.

        What this raises is logged. It is also called for a request to punctuate, of which `on_write` hears nothing.
        """

    def on_read(self, call: ReadCall) -> None:
        """A request to read is handled next. What this raises is its answer."""

    def on_read_answered(self, call: ReadCall, response: broker_pb2.MultiReadChunksResponse) -> None:
        """A request to read is about to be answered. Something may be added to its response."""
