"""The plain data of the log: addresses of segments, and the index's records.

Promises: no I/O, and nothing that can wait. All other modules of the broker may import this one, and it imports only
the core. It says what the data means; ``kera.broker.storage.index_format`` defines how the index stores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kera.core.base.ids import EARLIEST, Position
from kera.core.format.chunk import ALIGNMENT_BYTES
from kera.core.format.punctuation import NO_TIME
from kera.core.rpc.limits import UNANSWERED_CHUNKS_MAX

Change = tuple[bytes, bytes | None]
"""A key and its new value, or None to delete it."""
Key = tuple[int, int]
"""The group and segment id: a place in the order of an entry."""
NO_SEGMENT: Key = (0, 0)


class SegmentAddress(NamedTuple):
    """The address of a segment. Addresses within one entry compare in the order of the log."""

    stream_id: int
    streamlet_id: int
    entry: int
    group_id: int
    segment_id: int


class Hole(NamedTuple):
    """Damaged bytes, from the start of a chunk to the start of the next."""

    start: int
    end: int
    reason: str


DIGEST_BYTES = 8
DIGESTS_MAX = UNANSWERED_CHUNKS_MAX
"""Maximum number of digests for each producer of a streamlet: enough for every repeat that a client may send."""
TO_COME = 0
"""The physical id of a segment without a file, which has to come from backups: see `SegmentRecord.to_come`."""


class SegmentRecord(NamedTuple):
    """The index's record of one segment."""

    physical_id: int
    """The id of its file, or `TO_COME`."""
    length: int
    """Size of its chunks, in bytes; while `open`, the durable size when this was recorded."""
    open: bool
    """Whether the file is still written to; its chunks then tell where it ends."""
    chunk_count: int
    crc32c: int
    """Checksum of all its bytes; if it matches, a load need not verify each chunk."""
    first_record: int
    record_count: int
    min_timestamp_us: int
    max_timestamp_us: int
    newest_us: int
    """When its last chunk was appended here, by the broker's clock; retention takes its age from this. For segments
    that were recovered from backups, or recorded by older versions: when its newest chunk was made, by its producer's
    clock."""

    @property
    def to_come(self) -> bool:
        """Whether it still has to come from backups: see docs/design-notes.md, "Physical id 0"."""
        return self.physical_id == TO_COME


def place_of(address: Sequence[int]) -> str:
    """Return a readable address: ``stream 1, streamlet 0, entry 0, group 1, segment 2``."""
    names = ("stream", "streamlet", "entry", "group", "segment")
    return ", ".join(f"{name} {number}" for name, number in zip(names, address, strict=False))


class Gap(NamedTuple):
    """Positions of an entry whose data was lost with the memory of a host, before it was on disk."""

    start: Position
    end: Position

    @property
    def unseen(self) -> bool:
        """Whether no reader can have seen any of it, because it begins behind a chunk's end, and not at it.

        See ``kera.broker.storage.restart``.
        """
        return self.start.offset % ALIGNMENT_BYTES != 0

    def has(self, position: Position) -> bool:
        """Whether a reader at `position` has missed data; not at the start of a group that no reader has seen."""
        return self.start <= position < self.end and not (self.unseen and position[1:] == (1, 0))


class EntryRecord(NamedTuple):
    """The index's record of an entry, which sums up its stored part."""

    start: Position = EARLIEST
    """The first position that is left; `EARLIEST` if the entry never had data."""
    start_record: int = 0
    next_record: int = 0
    """The ordinal behind the last stored segment."""
    stored_bytes: int = 0
    stored_segments: int = 0
    last_group_id: int = 0
    last_segment_id: int = 0
    """The last stored segment, with its group; 0, 0 if there never was one."""
    gaps: tuple[Gap, ...] = ()
    watermark_us: int = NO_TIME
    """The greatest time of all data that was ever stored, or less: the times of data from elsewhere may be unknown."""
    removed_watermark_us: int = NO_TIME
    """The greatest time of the removed data, or more."""


class ProducerRecord(NamedTuple):
    """The progress of a producer in a streamlet: its epoch, and the sequence of its next chunk."""

    producer_epoch: int
    next_sequence: int


class Digests(NamedTuple):
    """Digests of a producer's last chunks in a streamlet. Digests of one producer compare by how far they reach."""

    producer_epoch: int
    next_sequence: int
    """The sequence behind the last digest."""
    digests: bytes
    """Digests of consecutive sequences, the oldest first, `DIGEST_BYTES` each; at most `DIGESTS_MAX`."""

    @property
    def first_sequence(self) -> int:
        """The oldest sequence with a digest."""
        return self.next_sequence - len(self.digests) // DIGEST_BYTES

    def covers(self, producer_epoch: int, sequence: int) -> bool:
        """Whether a sequence is before the end of the digests, even if its own digest is no longer kept."""
        return (producer_epoch, sequence) < (self.producer_epoch, self.next_sequence)

    def of(self, producer_epoch: int, sequence: int) -> bytes | None:
        """Return the digest of a chunk; None if it is not kept."""
        if producer_epoch != self.producer_epoch or not self.first_sequence <= sequence < self.next_sequence:
            return None
        at = (sequence - self.first_sequence) * DIGEST_BYTES
        return self.digests[at : at + DIGEST_BYTES]

    def last(self, count: int) -> bytes:
        """Return the newest `count` digests, at least one."""
        return self.digests[-max(1, count) * DIGEST_BYTES :]


class OriginRecord(NamedTuple):
    """The origin of a streamlet that was taken over from lost launches, whose findings the index has."""

    sources: frozenset[tuple[int, int]]
    """Brokers, each with the epoch before which its launches were; empty once all their data has arrived."""
    next_group_id: int
    """An id above all groups that the lost launches may have used."""
    records_lost: int
    """Number of records that no replica had, although they may have been acknowledged."""

    def without_sources(self) -> OriginRecord:
        """Return the record that stays when all data has arrived.

        It keeps the group id, because readers may have been sent to the start of groups without data.
        """
        return OriginRecord(frozenset(), self.next_group_id, 0)


class UnsureTail(NamedTuple):
    """The start of the unsure tail of a taken over entry, which may have fewer replicas than promised.

    A backup had this data while another one was away, or had less. Until it has its replicas it may be lost again, so
    neither readers nor a producer that sends it again learn of it.
    """

    position: Position
    record: int
    """The ordinal at `position`."""


class Graft(NamedTuple):
    """An addition from elsewhere to the stored part of an entry: consecutive segments, or only gaps."""

    start: Position
    """The entry's new start; `EARLIEST` if it does not change."""
    start_record: int
    next_record: int
    """The ordinal behind the last segment."""
    bytes: int
    segments: int
    end: Position
    """The end of the last segment; `EARLIEST` without segments."""
    gaps: tuple[Gap, ...] = ()
    watermark_us: int = NO_TIME
    """The greatest time in the segments."""

    @property
    def last(self) -> Key:
        """The last segment."""
        return self.end.group_id, self.end.segment_id


class SegmentLookup(Protocol):
    """The log's queries to the index, by which an entry finds its segments on disk."""

    def segment(self, address: SegmentAddress) -> SegmentRecord | None:
        """Return the record of a segment; None if it is not on disk."""
        ...

    def following(self, address: SegmentAddress) -> tuple[SegmentAddress, SegmentRecord] | None:
        """Return the first segment of the same entry behind `address`, which itself need not exist."""
        ...

    def digests(self, stream_id: int, streamlet_id: int, producer_id: int) -> Digests | None:
        """Return the digests of a producer's last chunks that have left memory; None if the index has none."""
        ...
