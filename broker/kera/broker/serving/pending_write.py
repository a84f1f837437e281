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
    """One or several requests whose chunks are being appended: their answers may wait for backups."""

    pump: bool
    """Whether replication may have work to do."""

    def wait_for(self, batch: Batch, answers: Any, count: int) -> int:
        """Let `count` answers wait until backups have `batch`; return how many requests begin to wait for it."""
        ...


class PendingWrite:
    """A request to write chunks: decided chunk by chunk, then answered when its chunks have reached their levels.

    Fields that most requests never change are set in the class, not in each instance.
    """

    at = 0
    """Offset of the next chunk to decide."""
    decided = False
    """Whether each chunk has a status."""
    pump = False
    """Whether replication may have work to do, now that chunks were decided."""
    batches = 0
    """Number of batches in `placed` that are not on backups yet."""
    error: KeraError | None = None
    """Why batches could not be replicated."""
    refused = False
    """Whether a status has an error."""
    done = False
    future: Answer[WriteReply] | None = None
    """The future of the reply, unless the request is answered at once."""
    deadline_s = 0.0
    """When the request stops waiting for room in memory, as a time of the loop."""

    def __init__(
        self,
        request: broker_pb2.MultiWriteChunksRequest,
        bulk: memoryview,
        peer: Peer,
        go_on: Callable[[PendingWrite], None],
    ) -> None:
        """`go_on` is called when the request no longer waits for backups."""
        self.request = request
        self.level = request.durability
        """The level at which chunks are acknowledged; 0: each chunk at the level of its stream."""
        self.bulk = bulk
        self.peer = peer
        self.go_on = go_on
        self.begun_s = perf_counter()
        self.response = broker_pb2.MultiWriteChunksResponse()
        self.statuses = self.response.statuses
        self.placed: list[tuple[range, Batch]] = []
        """Ranges of statuses that wait for backups, each with its batch."""
        self.wanted: list[tuple[Segment, int]] = []
        """Segments, and the heads up to which they have to be on disk before the answer."""
        self.waiting: list[int] = []
        """The statuses that wait for the disk."""

    def wait_for(self, batch: Batch, first: int, count: int) -> int:
        """Let `count` statuses wait until backups have `batch`; the first one is `first` behind the present ones.

        Returns how many requests begin to wait for the batch.
        """
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
        """Fill in the backups of each chunk, or an error if it could not be replicated."""
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
        """Replace statuses by `error`, if there is one."""
        if error is None:
            return
        for index in indexes:
            status = self.statuses[index]
            status.Clear()
            status.error.CopyFrom(error_to_message(error))
            self.refused = True
