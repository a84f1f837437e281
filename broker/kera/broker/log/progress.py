"""The state that appending changes in a streamlet, an entry and a segment: the bases of `Streamlet`, `Entry` and
`Segment`.

Where the native core is there, they are types of its own: it appends to a place that it knows without a look at any
object of Python. Its getters write down what it has put off (where the last chunks end, how far producers have got) and
forget what it has remembered, so that others find what they find without it, and may change it.
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
        """How far a segment is filled, and with what."""

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
        """Where the next chunk goes: bytes from the start of the slot."""
        durable_head: int
        """Up to where readers may read."""
        closed: bool
        """It takes no more appends."""
        dropped: bool
        """Removed while it was busy, or open."""
        record_count: int
        min_timestamp_us: int
        max_timestamp_us: int
        newest_us: int
        """When the newest chunk was appended here, by the broker's clock."""
        touched_ms: int
        """When something was last appended, on the monotonic clock."""
        chunk_ends: array[int]
        """Where each chunk ends, ascending: 4 bytes per chunk, and a read need not walk headers."""
        producers: dict[int, ProducerRecord]
        """Producers that have appended, each with its last sequence: stored in the index with the segment."""

    class EntryProgress:
        """The open end of an entry."""

        __slots__ = ("next_record", "promised_us", "tail", "waiters")

        next_record: int
        """Ordinal of the next record."""
        promised_us: int
        """Readers were told that nothing older comes, and the log does not say so yet; `NO_TIME`: they were not."""
        tail: list[Segment]
        """The segments that are not on disk, or not in the index yet; only the last one may be open."""
        waiters: set[EntryListener]
        """Readers to wake when the durable head moves."""

    class StreamletProgress:
        """The state of a streamlet that appending needs and changes."""

        broker_epoch: int
        """Epoch of the launch that took, or takes, its chunks."""
        takes_chunks: bool
        """It is owned, and not sealed."""
        bytes_appended: int
        """Since the last report to the coordinator, as are the records."""
        records_appended: int
        timestamp_ahead_us: int
        """How far ahead of the clock the times of chunks may be; 0: as far as they like."""
        first_epochs: Mapping[int, int]
        """See ``kera.broker.ownership.producer_fences``."""
        producers: dict[int, ProducerRecord]
        """How far each got, the one longest unheard of first, see `ProducerLimits.in_order`."""

else:
    SegmentProgress = native.SegmentProgress
    EntryProgress = native.EntryProgress
    StreamletProgress = native.StreamletProgress
