"""Hooks that plug into the handling of requests. Writing and reading work without them.

The methods of `RequestHooks` do nothing: a subclass overrides the methods that it needs. They are called for requests
that reach a handler in Python, never for single chunks or records. The native core takes only requests without the
fields that hooks look at; it leaves the others to the handler (``take.c``).
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
        """Return the handler of write requests; it may wrap `write`."""
        return write

    def on_write(self, call: WriteCall) -> None:
        """Called before a write request is handled. An error that this raises becomes the answer."""

    def on_written(self, write: PendingWrite) -> None:
        """Called before a write request is answered; may add to the response.

        An exception is only logged. Also called for a punctuate request, for which `on_write` is not called.
        """

    def on_read(self, call: ReadCall) -> None:
        """Called before a read request is handled. An error that this raises becomes the answer."""

    def on_read_answered(self, call: ReadCall, response: broker_pb2.MultiReadChunksResponse) -> None:
        """Called before a read request is answered; may add to the response."""
