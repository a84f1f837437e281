"""Chunks of one batch, often for many lanes, that go out together: a `PendingChunk` of each would cost more.

    made ──► queued ──► sent ──all stored──► gone
                │          │
                └──────────┴── anything else ──► taken apart: from then on each chunk is a single one in its lane

A chunk in a bundle counts as in flight in its lane from the start, with the lane's next sequence. So no other chunk of
the lane may go before it: a chunk joins a bundle only when no chunk of its lane waits (`LaneColumns.busy`).
"""

from __future__ import annotations

from kera.client.producing.encoding.partition_payloads import Payloads
from kera.client.producing.encoding.partitioner import Numbers
from kera.client.producing.lanes.lane import Lane, PendingChunk
from kera.client.producing.lanes.stream_lanes import StreamLanes
from kera.client.producing.outcomes.outcome import BundleOutcome, Outcome
from kera.core.format.chunk import HEADER_BYTES, flags_of
from kera.core.format.many_chunks import seal_chunks


class Bundle:
    """Chunks of one batch that are sent and acknowledged together, or taken apart into single chunks."""

    def __init__(
        self,
        lanes: StreamLanes,
        epochs: Numbers,
        sequences: Numbers,
        payloads: Payloads,
        created_us: int,
        deadline_s: float,
    ) -> None:
        """`epochs`, `sequences`: of the chunks. `deadline_s`: on the loop's clock; after it the chunks are given up."""
        self._lanes = lanes
        self.columns = lanes.columns
        self.created_us = created_us
        self.deadline_s = deadline_s
        self.delivered = BundleOutcome()
        self.sent = False
        self.chunk_count = len(payloads.streamlets)
        self.streamlets = payloads.streamlets
        self.record_counts = payloads.record_counts
        self.identity = identity = lanes.lanes[int(payloads.streamlets[0])].identity
        """Identity of one of the lanes: all of them belong to one stream and producer."""
        self.payload_bytes = int(payloads.payload_bytes.sum())
        self._payloads = payloads
        self._sequences = sequences
        self._apart: list[PendingChunk] | None = None
        self.bulk = payloads.chunks
        seal_chunks(
            self.bulk, payloads.payload_bytes, payloads.streamlets, payloads.record_counts, epochs, sequences,
            payloads.min_timestamps_us, payloads.max_timestamps_us,
            payloads.version, flags_of(identity.codec, typed=identity.typed), identity.stream_id,
            payloads.schema_id, identity.producer_id, identity.codec, created_us,
        )  # fmt: skip
        """The chunks, one after the other."""

    def lane(self, streamlet: int) -> Lane:
        """Return the lane of a streamlet."""
        return self._lanes.lanes[streamlet]

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of the chunks, in their order; a lane may occur several times."""
        return [*map(self.lane, self.streamlets.tolist())]

    def taken(self) -> None:
        """Note that the bundle is sent."""
        self.sent = True

    def take_apart(self) -> list[PendingChunk]:
        """Return the chunks as single ones: the same objects each time."""
        if self._apart is None:
            self._apart, start = [], 0
            numbers = self._sequences.tolist()
            for lane, sequence, payload in zip(self.lanes, numbers, self._payloads.all(), strict=True):
                chunk = PendingChunk(lane, payload, self.created_us, self.deadline_s, Outcome())
                header = bytes(self.bulk[start : start + HEADER_BYTES])
                chunk.was_bundled(sequence, header, sent=self.sent)
                self._apart.append(chunk)
                start += chunk.chunk_bytes
            self.delivered.take_apart([chunk.delivered for chunk in self._apart])
        return self._apart
