"""The state of a request to write chunks, until it is answered; see ``kera.broker.serving.write``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Protocol

from kera.broker.log.segment import Segment
from kera.broker.replication.virtual_segment import Batch
from kera.core.errors import KeraError, NotReplicated
from kera.core.rpc import Answer, Peer, Reply
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2

WriteReply = Reply[broker_pb2.MultiWriteChunksResponse]


class Waiting(Protocol):
    """A request whose chunks are appended, or several: their answers may wait for backups."""

    pump: bool
    """Replication may have something to do."""

    def wait_for(self, batch: Batch, answers: Any, count: int) -> int:
        """So many answers wait until backups have a batch. Returns how many requests wait that did not before."""
        ...


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
    """The future of the reply, if that is not there at once."""
    deadline_s = 0.0
    """For room in memory."""

    def __init__(
        self,
        request: broker_pb2.MultiWriteChunksRequest,
        bulk: memoryview,
        peer: Peer,
        go_on: Callable[[PendingWrite], None],
    ) -> None:
        """`go_on` is called when it waits for backups no longer."""
        self.request = request
        self.level = request.durability
        """To acknowledge at; 0: each chunk at that of its stream."""
        self.bulk = bulk
        self.peer = peer
        self.go_on = go_on
        self.begun_s = perf_counter()
        self.response = broker_pb2.MultiWriteChunksResponse()
        self.statuses = self.response.statuses
        self.placed: list[tuple[range, Batch]] = []
        """Statuses that wait for backups, each few with what goes there."""
        self.wanted: list[tuple[Segment, int]] = []
        """Data that have to be on disk before the answer."""
        self.waiting: list[int] = []
        """The statuses that it concerns."""

    def wait_for(self, batch: Batch, first: int, count: int) -> int:
        """So many statuses are not answers before backups have `batch`, from the one after the next `first` on."""
        at = len(self.statuses) + first
        self.placed.append((range(at, at + count), batch))
        waiters, replicated = batch.waiters, self._replicated
        if waiters and waiters[-1] == replicated:
            return 0
        waiters.append(replicated)
        self.batches += 1
        return 1

    def _replicated(self, error: KeraError | None) -> None:
        self.batches -= 1
        self.error = self.error or error
        if not self.batches and self.decided:
            self.go_on(self)

    def fill_places(self) -> None:
        """On which backups each chunk is; or that it is not known."""
        statuses, told = self.statuses, set[int]()
        for indexes, batch in self.placed:
            place = batch.place
            if not batch.completed or place is None:
                self.set_errors(indexes, self.error or NotReplicated("the chunk could not be replicated"))
                continue
            virtual_segment_id = place.virtual_segment_id
            for index in indexes:
                statuses[index].virtual_segment_id = virtual_segment_id
            if virtual_segment_id not in told:
                told.add(virtual_segment_id)
                segment = self.response.virtual_segments.add()
                segment.virtual_segment_id = virtual_segment_id
                segment.backup_ids.extend(place.backups)

    def set_errors(self, indexes: Iterable[int], error: KeraError | None) -> None:
        """Have statuses say this, if there is an error."""
        if error is None:
            return
        for index in indexes:
            status = self.statuses[index]
            status.Clear()
            status.error.CopyFrom(error_to_message(error))
            self.refused = True
