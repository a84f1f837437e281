"""The pending chunks of one producer for one streamlet: a state machine without I/O.

    add → waiting ──take──► in flight ──acknowledged──► gone
              ▲                 │
              └── all returned ─┴── refused, retriable: kept until nothing is in flight, then again from the oldest

Chunks go out in the order of their sequences, several requests at a time. When one of them comes back, those behind it
will come back as well (`OutOfSequence`), or have been stored by an attempt whose answer was lost; so the lane waits
until nothing is in flight, and sends again from the oldest chunk on. The broker's deduplication makes that exact. At
most `UNANSWERED_CHUNKS_MAX` chunks are in flight: a broker recognises that many of a producer's last ones.

A chunk that is given up leaves a hole: the broker takes nothing behind it. The lane first finishes the chunks before
the hole. Then it begins a new epoch of the producer, where the remaining chunks count from 0. Producer id, entry and
order stay. The broker cannot recognise a repeat across epochs. So if the chunk of the hole may be stored, the lane also
gives up the chunks behind it that may be stored: sent in the new epoch, they might be stored twice.

Epochs are scarce: a named producer has a range of them, and the next instance of the name has the range above. So the
lane reuses an epoch, from sequence 0, if no chunk can have been stored in it. When it has used the last epoch of the
range, the lane is exhausted, and sends nothing more.

Invariants: sequences of waiting and in-flight chunks ascend; no chunk is taken while a returned one is kept, and none
behind a hole.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from kera.client.producing.encoding.payloads import Payload
from kera.client.producing.lanes.lane_columns import LaneColumns
from kera.client.producing.outcomes.outcome import Outcome
from kera.core.errors import KeraError, NotAccepted, OutOfSequence, Uncertain, invariant
from kera.core.format.chunk import HEADER_BYTES, Codec, encode_header, flags_of, padded
from kera.core.rpc.limits import UNANSWERED_CHUNKS_MAX

LAST_EPOCH = (1 << 32) - 1
"""The field of the chunk's header has 32 bits."""


class PendingChunk:
    """A chunk that is not acknowledged yet.

    Attributes that most chunks never change are set in the class instead of in each chunk.
    """

    sequence = 0
    header = b""
    """The header with the sequence that the chunk got last."""
    in_flight = False
    """Whether it is sent and not answered yet."""
    uncertain = False
    """Whether an attempt was sent whose outcome is not known."""
    cause: KeraError | None = None
    """The last error of an attempt that names a cause, see `_says_why`."""

    def __init__(
        self,
        lane: Lane,
        payload: Payload,
        created_us: int,
        deadline_s: float,
        delivered: Outcome,
        closed_s: float | None = None,
    ) -> None:
        """`deadline_s`: on the loop's clock; after it the chunk is given up.

        `closed_s`: when its open chunk was closed, on the same clock; None: that is not known, or too long ago.
        """
        self.lane = lane
        self.payload = payload
        self.created_us = created_us
        self.deadline_s = deadline_s
        self.delivered = delivered
        self.closed_s = closed_s
        self.payload_bytes = payload_bytes = len(payload.payload)
        self.chunk_bytes = HEADER_BYTES + padded(payload_bytes)

    def was_bundled(self, sequence: int, header: bytes, *, sent: bool) -> None:
        """Take over the chunk's state from its bundle, which was taken apart."""
        self.sequence, self.header, self.in_flight = sequence, header, sent


@dataclass(frozen=True, slots=True)
class LaneIdentity:
    """The identity that all chunks of a lane share."""

    stream: str
    stream_id: int
    streamlet_id: int
    producer_id: int
    codec: Codec
    typed: bool


class Failure(NamedTuple):
    """A chunk that was given up, and why."""

    chunk: PendingChunk
    error: KeraError


class Lane:
    """The pending chunks of one streamlet: each is stored once and in order, or fails with those behind it."""

    def __init__(
        self, identity: LaneIdentity, columns: LaneColumns, at: int = 0, *, last_epoch: int = LAST_EPOCH
    ) -> None:
        """`columns`, at index `at`, has the numbers of the lane; `last_epoch`: the last one the producer may use."""
        self.identity = identity
        self._columns = columns
        self._at = at
        self._flags = flags_of(identity.codec, typed=identity.typed)
        self.exhausted = False
        """Whether the lane needs another epoch and the producer has none left."""
        self._last_epoch = last_epoch
        self.waiting: deque[PendingChunk] = deque()
        self._returned: list[tuple[PendingChunk, KeraError]] = []
        self._hole_in_sequence: Failure | None = None
        """The first chunk that was given up in this epoch."""

    @property
    def in_flight(self) -> int:
        """Number of chunks that are sent and not answered, or in a bundle."""
        return self._columns.in_flight[self._at]

    @property
    def producer_epoch(self) -> int:
        """The epoch of the next chunks."""
        return self._columns.producer_epoch[self._at]

    @property
    def idle(self) -> bool:
        """Whether no chunk waits and none is in flight."""
        return not (self.waiting or self.in_flight or self._returned)

    @property
    def next(self) -> PendingChunk | None:
        """The chunk that `take` would return; None: nothing may be sent."""
        if not self.waiting or self._returned or self.exhausted or self.in_flight >= UNANSWERED_CHUNKS_MAX:
            return None
        chunk = self.waiting[0]
        return chunk if self._hole_in_sequence is None or self._before_hole(chunk) else None

    @property
    def deadline_s(self) -> float | None:
        """The first deadline among the chunks that are not in flight."""
        chunks = [chunk for chunk, _ in self._returned] + list(self.waiting)
        return min((chunk.deadline_s for chunk in chunks), default=None)

    @property
    def ready_count(self) -> int:
        """Number of times that `take` can be called."""
        if self.next is None:
            return 0
        return min(sum(map(self._before_hole, self.waiting)), UNANSWERED_CHUNKS_MAX - self.in_flight)

    def add(self, chunk: PendingChunk) -> None:
        """Take charge of a chunk: give it the next sequence and encode it."""
        self._encode(chunk)
        self.waiting.append(chunk)
        self._columns.busy[self._at] = True

    def put_back(self, chunk: PendingChunk) -> list[Failure]:
        """Let an unsent chunk of a bundle wait before all others. Returns the chunks that are given up now."""
        self._columns.in_flight[self._at] -= 1
        self.waiting.appendleft(chunk)
        return self.line_up()

    def take(self) -> PendingChunk:
        """Remove and return the next chunk to send."""
        if self._returned or self.exhausted or self._hole_in_sequence is not None:
            invariant(self.next, "a lane sends nothing while it waits for what comes back, and nothing behind a hole")
        chunk = self.waiting.popleft()
        chunk.in_flight = True
        self._columns.in_flight[self._at] += 1
        if not self.waiting and self._hole_in_sequence is None:
            self._columns.busy[self._at] = False
        return chunk

    def acknowledged(self, chunk: PendingChunk) -> list[Failure]:
        """Note that `chunk` is stored. Returns other chunks that are given up now."""
        chunk.in_flight = False
        self._columns.epoch_used[self._at] = True
        self._columns.in_flight[self._at] -= 1
        return self.line_up() if self._returned or self._hole_in_sequence is not None else []

    def refused(self, chunk: PendingChunk, error: KeraError, now_s: float) -> list[Failure]:
        """Note that `chunk` came back. Returns the chunks that are given up now; if it is not one, it is sent again."""
        self._columns.in_flight[self._at] -= 1
        chunk.in_flight = False
        chunk.uncertain = chunk.uncertain or isinstance(error, Uncertain)
        if not isinstance(error, NotAccepted):
            self._columns.epoch_used[self._at] = True
        if _says_why(error):
            chunk.cause = error
        failures = []
        if error.retriable and now_s < chunk.deadline_s:
            self._returned.append((chunk, error))
        else:
            failures.append(Failure(chunk, self._final(chunk, error)))
            if self._before_hole(chunk):
                self._hole_in_sequence = failures[0]
        return failures + self.line_up()

    def abandon(self, error: KeraError) -> list[Failure]:
        """Give up and return all chunks that are not in flight."""
        chunks = [*(chunk for chunk, _ in self._returned), *self.waiting]
        self._returned.clear()
        self.waiting.clear()
        self._note_whether_busy()
        return [Failure(chunk, self._final(chunk, error)) for chunk in chunks]

    def _final(self, chunk: PendingChunk, error: KeraError) -> KeraError:
        """Return why `chunk` is given up after `error`: with the cause, if `error` does not state it."""
        cause = chunk.cause
        if cause is None and self._hole_in_sequence is not None and isinstance(error, OutOfSequence):
            cause = self._hole_in_sequence.error  # the chunk that is missing before it
        if chunk.uncertain and not isinstance(error, Uncertain):
            error = Uncertain(f"not known to be stored; last: {error.message}", **error.attributes)
        if cause is None or _says_why(error) or cause.message in error.message:
            return error
        kind = type(cause) if isinstance(cause, Uncertain) and isinstance(error, Uncertain) else type(error)
        return kind(f"{error.message}; before that: {cause.message}", **{**cause.attributes, **error.attributes})

    def _before_hole(self, chunk: PendingChunk) -> bool:
        return self._hole_in_sequence is None or chunk.sequence < self._hole_in_sequence.chunk.sequence

    def line_up(self) -> list[Failure]:
        """Once nothing is in flight, queue the returned chunks again, in a new epoch if necessary.

        Returns the chunks that are given up now.
        """
        failures = self._lined_up()
        self._note_whether_busy()
        return failures

    def _note_whether_busy(self) -> None:
        self._columns.busy[self._at] = (
            bool(self.waiting or self._returned) or self.exhausted or self._hole_in_sequence is not None
        )

    def _lined_up(self) -> list[Failure]:
        if self.in_flight:
            return []
        if self._returned:
            self._returned.sort(key=lambda returned: returned[0].sequence)
            oldest, error = self._returned[0]
            self.waiting.extendleft(chunk for chunk, _ in reversed(self._returned))
            self._returned.clear()
            if isinstance(error, OutOfSequence) and self._before_hole(oldest):
                self._new_epoch()  # no chunk before it is missing: the broker has forgotten this producer's chunks
                return []
        if self._hole_in_sequence is None or (self.waiting and self._before_hole(self.waiting[0])):
            return []
        doubtful = self._remove_doubtful(self._hole_in_sequence.error)
        self._new_epoch()
        return doubtful

    def _remove_doubtful(self, cause: KeraError) -> list[Failure]:
        """Remove and return the chunks behind a hole that may be stored, if the chunk of the hole may be stored."""
        if not isinstance(cause, Uncertain):
            return []
        doubtful = [chunk for chunk in self.waiting if chunk.uncertain]
        if doubtful:
            self.waiting = deque(chunk for chunk in self.waiting if not chunk.uncertain)
        error = Uncertain(f"not known to be stored, like a chunk before it: {cause.message}", **cause.attributes)
        return [Failure(chunk, error) for chunk in doubtful]

    def _new_epoch(self) -> None:
        columns, at = self._columns, self._at
        if columns.epoch_used[at] and columns.producer_epoch[at] >= self._last_epoch:
            self.exhausted = True
            return
        self._hole_in_sequence = None
        columns.producer_epoch[at] += columns.epoch_used[at]
        columns.epoch_used[at] = False
        columns.next_sequence[at] = 0
        for chunk in self.waiting:
            self._encode(chunk)

    def _encode(self, chunk: PendingChunk) -> None:
        identity, payload = self.identity, chunk.payload
        columns, at = self._columns, self._at
        chunk.sequence = sequence = columns.next_sequence[at]
        columns.next_sequence[at] = sequence + 1
        chunk.header = encode_header(
            payload.payload, payload.version, self._flags, payload.record_count, identity.stream_id,
            identity.streamlet_id, payload.schema_id, identity.producer_id, columns.producer_epoch[at], identity.codec,
            sequence, chunk.created_us, payload.min_timestamp_us, payload.max_timestamp_us,
        )  # fmt: skip


def _says_why(error: KeraError) -> bool:
    """Return whether `error` names a cause: a missing answer or a chunk ahead of its predecessors does not."""
    return type(error) is not Uncertain and not isinstance(error, OutOfSequence)
