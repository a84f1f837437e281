"""The plain data of the log: where something is, what is known of it on disk, and what is said when something is done.

Promises: no I/O, and nothing that can wait. Everything else of the broker may import this, and this imports only the
core. What the data mean is said here; how they are written down is left to ``kera.broker.storage.index_format``.
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
"""Group and segment: a place in the order of an entry."""
NO_SEGMENT: Key = (0, 0)


class SegmentAddress(NamedTuple):
    """Which segment of which entry. Addresses of one entry compare in log order."""

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
"""Kept for each producer of a streamlet: enough for each repeat that a client has reason to send."""
TO_COME = 0
"""The physical id of a segment that has no file yet, as it is to come from backups: see `SegmentRecord.to_come`."""


class SegmentRecord(NamedTuple):
    """The index's record of one segment."""

    physical_id: int
    """Names its file, or is `TO_COME`."""
    length: int
    """Size of its chunks, in bytes; while `open`, the durable size when this was written down."""
    open: bool
    """The file is still written to: its chunks say up to where."""
    chunk_count: int
    crc32c: int
    """Over all its bytes: whether a look at each chunk can be spared."""
    first_record: int
    record_count: int
    min_timestamp_us: int
    max_timestamp_us: int
    newest_us: int
    """When its last chunk was appended here, by the broker's clock: the age that retention goes by. Of what was
    recovered from backups, and of all that was written down before this was so, when its newest chunk was made, by its
    producer's clock."""

    @property
    def to_come(self) -> bool:
        """Whether it is not here yet, but to come from backups: see docs/design-notes.md, "Physical id 0"."""
        return self.physical_id == TO_COME


def place_of(address: Sequence[int]) -> str:
    """The address for people: ``stream 1, streamlet 0, entry 0, group 1, segment 2``."""
    names = ("stream", "streamlet", "entry", "group", "segment")
    return ", ".join(f"{name} {number}" for name, number in zip(names, address, strict=False))


class Gap(NamedTuple):
    """Positions of an entry whose data was lost with the memory of a host, before it was on disk."""

    start: Position
    end: Position

    @property
    def unseen(self) -> bool:
        """No reader can have seen any of it, as it begins behind the end of a chunk, and not there: see ``restart``."""
        return self.start.offset % ALIGNMENT_BYTES != 0

    def has(self, position: Position) -> bool:
        """Whether who is at `position` has missed something: not at the start of a group that nobody saw any of."""
        return self.start <= position < self.end and not (self.unseen and position[1:] == (1, 0))


class EntryRecord(NamedTuple):
    """The index's record of one entry: its stored part, as a whole."""

    start: Position = EARLIEST
    """First position that is there; `EARLIEST` when nothing ever was."""
    start_record: int = 0
    next_record: int = 0
    """Ordinal behind the last stored segment."""
    stored_bytes: int = 0
    stored_segments: int = 0
    last_group_id: int = 0
    last_segment_id: int = 0
    """The last stored segment; 0, 0 when there never was one."""
    gaps: tuple[Gap, ...] = ()
    watermark_us: int = NO_TIME
    """The greatest time of all that was ever stored, or less: of what came from elsewhere it may not be known."""
    removed_watermark_us: int = NO_TIME
    """The greatest time of what was removed, or more."""


class ProducerRecord(NamedTuple):
    """Up to where chunks of a producer are stored in a streamlet."""

    producer_epoch: int
    next_sequence: int


class Digests(NamedTuple):
    """Digests of a producer's last chunks in a streamlet. Those of one producer compare by how far they reach."""

    producer_epoch: int
    next_sequence: int
    """They end before this sequence."""
    digests: bytes
    """Digests of consecutive sequences, the oldest first, `DIGEST_BYTES` each; at most `DIGESTS_MAX`."""

    @property
    def first_sequence(self) -> int:
        """The oldest sequence that has a digest."""
        return self.next_sequence - len(self.digests) // DIGEST_BYTES

    def covers(self, producer_epoch: int, sequence: int) -> bool:
        """Whether this reaches as far as a sequence, whether or not it still has its digest."""
        return (producer_epoch, sequence) < (self.producer_epoch, self.next_sequence)

    def of(self, producer_epoch: int, sequence: int) -> bytes | None:
        """The digest of a chunk; None: it is not kept."""
        if producer_epoch != self.producer_epoch or not self.first_sequence <= sequence < self.next_sequence:
            return None
        at = (sequence - self.first_sequence) * DIGEST_BYTES
        return self.digests[at : at + DIGEST_BYTES]

    def last(self, count: int) -> bytes:
        """The newest `count` of them, at least one."""
        return self.digests[-max(1, count) * DIGEST_BYTES :]


class OriginRecord(NamedTuple):
    """That a streamlet was taken over from launches that are gone, and that the index has what was found of them."""

    sources: frozenset[tuple[int, int]]
    """Brokers, and the epoch before which their launches were; none, when all has been got of them."""
    next_group_id: int
    """Above all groups that they may have given."""
    records_lost: int
    """That no replica had, though they may have been acknowledged."""

    def without_sources(self) -> OriginRecord:
        """The record that stays when all data have arrived: readers were sent to where its groups begin, if nothing is
        in them yet.
        """
        return OriginRecord(frozenset(), self.next_group_id, 0)


class UnsureTail(NamedTuple):
    """Where that begins in an entry which was taken over, and which fewer backups may have than were promised.

    It was found on a backup while another one was away, or had less. Until it has its replicas it may be lost once
    more: so nobody is told of it, neither readers nor the producer that sends it again.
    """

    position: Position
    record: int
    """Ordinal there."""


class Graft(NamedTuple):
    """An addition to the stored part of an entry from elsewhere: segments that follow each other, or only gaps."""

    start: Position
    """`EARLIEST` if it is not to change."""
    start_record: int
    next_record: int
    """Ordinal behind the last one."""
    bytes: int
    segments: int
    end: Position
    """End of the last segment; `EARLIEST` if there is none."""
    gaps: tuple[Gap, ...] = ()
    watermark_us: int = NO_TIME
    """The greatest time in the segments."""

    @property
    def last(self) -> Key:
        """The last segment."""
        return self.end.group_id, self.end.segment_id


class SegmentLookup(Protocol):
    """The log's queries to the index: an entry knows of segments on disk only by it."""

    def segment(self, address: SegmentAddress) -> SegmentRecord | None:
        """The record of a segment, None when it is not on disk."""
        ...

    def following(self, address: SegmentAddress) -> tuple[SegmentAddress, SegmentRecord] | None:
        """The first segment of the same entry behind `address`, which need not exist itself."""
        ...

    def digests(self, stream_id: int, streamlet_id: int, producer_id: int) -> Digests | None:
        """Digests of a producer's last chunks that have left memory; None: none are known."""
        ...
