"""One producer's chunks for one streamlet, on their way: a state machine without I/O.

    add → waiting ──take──► in flight ──acknowledged──► gone
              ▲                 │
              └── all returned ─┴── refused, retriable: held until nothing is in flight, then again from the oldest

Chunks go out in the order of their sequences, several requests at a time. When one of them comes back, those behind it
will come back as well (`OutOfSequence`), or have been stored by an attempt whose answer was lost; so the lane waits
until nothing is in flight, and sends again from the oldest chunk on. The broker's deduplication makes that exact.

A chunk that can never be stored leaves a gap that the broker would not accept. Then the lane begins a new epoch of the
producer, in which the chunks that are left count from 0. Its producer id stays, and so does the entry, and the order.

Invariants: sequences of waiting and in-flight chunks are contiguous and ascending; nothing is taken while any chunk is
held.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from kera.client.encoding import Payload
from kera.client.types import Delivery
from kera.core.chunk import Codec, EncodedChunk, encode_chunk
from kera.core.errors import KeraError, OutOfSequence, Uncertain, invariant


@dataclass(slots=True, eq=False)
class PendingChunk:
    """A chunk that is not acknowledged yet."""

    lane: Lane
    payload: Payload
    created_us: int
    deadline_s: float
    """On the loop's clock: after it the chunk is given up."""
    delivered: asyncio.Future[Delivery]
    sequence: int = 0
    encoded: EncodedChunk | None = None
    chunk_bytes: int = 0
    uncertain: bool = False
    """An attempt was sent and its outcome is not known."""


@dataclass(frozen=True, slots=True)
class LaneIdentity:
    """What all chunks of a lane have in common."""

    stream: str
    stream_id: int
    streamlet_id: int
    schema_id: int
    producer_id: int
    codec: Codec
    typed: bool


class Lane:
    """See the head of this module."""

    def __init__(self, identity: LaneIdentity, producer_epoch: int) -> None:
        self.identity = identity
        self.producer_epoch = producer_epoch
        self.waiting: deque[PendingChunk] = deque()
        self.in_flight = 0
        self.attempt = 0
        """How often in a row the lane had to send again."""
        self._held: list[tuple[PendingChunk, KeraError]] = []
        self._begin_epoch = False
        self._next_sequence = 0

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is in flight."""
        return not (self.waiting or self.in_flight or self._held)

    @property
    def ready(self) -> bool:
        """Whether `take` would return a chunk."""
        return bool(self.waiting) and not self._held

    @property
    def ready_count(self) -> int:
        """How many times `take` can be called."""
        return 0 if self._held else len(self.waiting)

    def add(self, chunk: PendingChunk) -> None:
        """Take charge of a chunk: give it the next sequence and encode it."""
        self._encode(chunk)
        self.waiting.append(chunk)

    def take(self) -> PendingChunk:
        """The next chunk to send."""
        invariant(not self._held, "a lane sends nothing while it waits for chunks to come back")
        self.in_flight += 1
        return self.waiting.popleft()

    def acknowledged(self) -> None:
        """A chunk in flight is stored."""
        self.in_flight -= 1
        self.attempt = 0
        self._all_returned()

    def refused(self, chunk: PendingChunk, error: KeraError, now_s: float) -> KeraError | None:
        """`chunk` came back. Returns the error it failed with for good, or None if it will be sent again."""
        self.in_flight -= 1
        chunk.uncertain = chunk.uncertain or isinstance(error, Uncertain)
        failure: KeraError | None = None
        if error.retriable and now_s < chunk.deadline_s:
            self._held.append((chunk, error))
        else:
            self._begin_epoch = True
            failure = error
            if chunk.uncertain and not isinstance(error, Uncertain):
                failure = Uncertain(f"not known to be stored; last: {error.message}", **error.attributes)
        self._all_returned()
        return failure

    def _all_returned(self) -> None:
        """When nothing is in flight any more: line up what came back, in a new epoch if the old one has a gap."""
        if self.in_flight:
            return
        if self._held:
            self.attempt += 1
            self._held.sort(key=lambda held: held[0].sequence)
            # Nothing is missing before the oldest chunk, unless the broker has forgotten what it had of this producer.
            self._begin_epoch = self._begin_epoch or isinstance(self._held[0][1], OutOfSequence)
            self.waiting.extendleft(chunk for chunk, _ in reversed(self._held))
            self._held.clear()
        if self._begin_epoch:
            self._begin_epoch = False
            self.producer_epoch += 1
            self._next_sequence = 0
            for chunk in self.waiting:
                self._encode(chunk)

    def _encode(self, chunk: PendingChunk) -> None:
        identity, payload = self.identity, chunk.payload
        chunk.sequence = self._next_sequence
        self._next_sequence += 1
        chunk.encoded = encode_chunk(
            payload.payload,
            record_count=payload.record_count,
            stream_id=identity.stream_id,
            streamlet_id=identity.streamlet_id,
            schema_id=identity.schema_id,
            producer_id=identity.producer_id,
            producer_epoch=self.producer_epoch,
            sequence=chunk.sequence,
            created_us=chunk.created_us,
            min_timestamp_us=payload.min_timestamp_us,
            max_timestamp_us=payload.max_timestamp_us,
            codec=identity.codec,
            typed=identity.typed,
        )
        chunk.chunk_bytes = chunk.encoded.chunk_bytes
