"""The state that appending changes in a streamlet, an entry and a segment: the bases of `Streamlet`, `Entry` and
`Segment`.

With the native core, these are types of the core, which can append to a known place without touching Python objects.
Their getters first write down the state that the core has deferred (the ends of the last chunks, the progress of
producers), and drop its cached state. So Python code sees the same state as without the core, and may change it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kera.core.native import native

if TYPE_CHECKING:
    from kera.broker.log.entry import EntryListener
    from kera.broker.log.segment import Segment
    from kera.broker.records import ProducerRecord

if TYPE_CHECKING or native is None:

    class SegmentProgress:
        """How far a segment is filled, and what is in it."""

        __slots__ = (
            "chunk_ends",
            "closed",
            "dropped",
            "durable_head",
            "head",
            "max_timestamp_us",
            "min_timestamp_us",
            "newest_us",
            "producers",
            "record_count",
            "touched_ms",
        )

        head: int
        """Offset in the slot at which the next chunk goes."""
        durable_head: int
        """Offset up to which readers may read."""
        closed: bool
        """Whether it takes no more appends."""
        dropped: bool
        """Whether it was removed while it was busy, or open."""
        record_count: int
        min_timestamp_us: int
        max_timestamp_us: int
        newest_us: int
        """When the newest chunk was appended here, by the broker's clock."""
        touched_ms: int
        """When a chunk was last appended, on the monotonic clock."""
        chunk_ends: array[int]
        """The ends of all chunks, ascending. A read need not walk headers, at a cost of 4 bytes per chunk."""
        producers: dict[int, ProducerRecord]
        """The progress of the producers that have appended; the index stores it with the segment."""

    class EntryProgress:
        """The end of an entry, which appending changes."""

        __slots__ = ("next_record", "promised_us", "tail", "waiters")

        next_record: int
        """Ordinal of the next record."""
        promised_us: int
        """The promise to readers that nothing older comes, if the log does not have it yet; `NO_TIME`: none."""
        tail: list[Segment]
        """The segments that are not yet on disk and in the index; only the last one may be open."""
        waiters: set[EntryListener]
        """Readers to wake when the durable head moves."""

    class StreamletProgress:
        """The state of a streamlet that appending needs and changes."""

        broker_epoch: int
        """Epoch of the launch that takes, or last took, its chunks."""
        takes_chunks: bool
        """Whether it is owned, and not sealed."""
        bytes_appended: int
        """Bytes appended since the last report to the coordinator."""
        records_appended: int
        """Records appended since the last report to the coordinator."""
        timestamp_ahead_us: int
        """Maximum by which the times of chunks may be ahead of the clock; 0: no limit."""
        first_epochs: Mapping[int, int]
        """See ``kera.broker.ownership.producer_fences``."""
        producers: dict[int, ProducerRecord]
        """The progress of each producer; the longest silent one comes first, see `ProducerLimits.in_order`."""

else:
    SegmentProgress = native.SegmentProgress
    EntryProgress = native.EntryProgress
    StreamletProgress = native.StreamletProgress
