"""What is known of a request to write chunks, until it is answered; see ``kera.broker.serving.write``."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from kera.broker.log.segment import Segment
from kera.broker.replication.virtual_segment import Batch
from kera.core.errors import KeraError
from kera.core.rpc import Answer, Reply
from kera.v1 import broker_pb2

WriteReply = Reply[broker_pb2.MultiWriteChunksResponse]


class PendingWrite:
    """A request to write chunks: decided chunk by chunk, then answered when what it promises holds.

    What most requests leave as it is, is not set in each of them but in the class.
    """

    at = 0
    """Where the next chunk to decide starts."""
    decided = False
    """Each chunk has a status."""
    pump = False
    """Replication may have something to do, now that chunks were decided."""
    batches = 0
    """How many of those in `placed` are not on backups yet."""
    error: KeraError | None = None
    """Why they are not."""
    refused = False
    """A status has an error."""
    done = False
    future: Answer[WriteReply] | None = None
    """Of the reply, if that is not there at once."""
    deadline_s = 0.0
    """For room in memory."""

    def __init__(
        self, request: broker_pb2.MultiWriteChunksRequest, bulk: memoryview, go_on: Callable[[PendingWrite], None]
    ) -> None:
        """`go_on` is called when it waits for backups no longer."""
        self.request = request
        self.level = request.durability
        """To acknowledge at; 0: each chunk at that of its stream."""
        self.bulk = bulk
        self.go_on = go_on
        self.begun_s = perf_counter()
        self.response = broker_pb2.MultiWriteChunksResponse()
        self.statuses = self.response.statuses
        self.placed: list[tuple[range, Batch]] = []
        """Statuses that wait for backups, each few with what goes there."""
        self.wanted: list[tuple[Segment, int]] = []
        """What has to be on disk before the answer."""
        self.waiting: list[int] = []
        """The statuses that it concerns."""

    def wait_for(self, indexes: range, batch: Batch) -> None:
        """The statuses with these indexes are no answers before backups have `batch`."""
        self.placed.append((indexes, batch))
        waiters, replicated = batch.waiters, self._replicated
        if not waiters or waiters[-1] != replicated:
            waiters.append(replicated)
            self.batches += 1

    def _replicated(self, error: KeraError | None) -> None:
        self.batches -= 1
        self.error = self.error or error
        if not self.batches and self.decided:
            self.go_on(self)
