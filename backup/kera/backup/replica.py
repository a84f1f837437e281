"""One replica of a virtual segment: its state, and the verification of its chunks. Pure.

A replica is *open* while its broker appends to it, and *closed* when the broker has ended it. It is *sealed* if nothing
can be appended although it was never closed: a newer launch of its broker has appeared, or this backup was restarted.
Its chunks are in a slot of memory until they are on disk, and afterwards only on disk.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from kera.core.errors import CorruptChunk, KeraError, RecordTooLarge, invariant
from kera.core.format.chunk import chained_checksums, verify_run
from kera.core.rpc.limits import REPLICATED_BYTES_MAX, REQUEST_CHUNKS_MAX
from kera.v1 import backup_pb2

ReplicaId = tuple[int, int]
"""Broker and virtual segment, which are unique for ever."""


class Frame(NamedTuple):
    """A place on a disk."""

    disk: int
    number: int


@dataclass(slots=True, eq=False)
class Replica:
    """One replica of a virtual segment, open, closed or sealed.

    Lengths are in bytes from the replica's start, always at the end of a chunk.
    """

    broker_id: int
    virtual_segment_id: int
    broker_epoch: int
    """Epoch of the launch that opened it."""
    stream_id: int
    virtual_log_id: int
    frame: Frame
    slot: int | None = None
    """None: its chunks are on disk only."""
    view: memoryview = field(default_factory=lambda: memoryview(b""))
    """The slot's memory."""
    length: int = 0
    checksum: int = 0
    """Over the checksums of all chunks, see `kera.core.format.chunk.chained_checksum`."""
    chunk_ends: array[int] = field(default_factory=lambda: array("I"))
    """Ends of the chunks in memory."""
    chunk_count: int = 0
    closed: bool = False
    sealed: bool = False
    durable_length: int = 0
    """Length that a start finds after any crash."""
    durable_checksum: int = 0
    durable_closed: bool = False
    """Whether the header on disk says that it is closed."""
    vouched: bool = True
    """Whether the header on disk vouches for all of `durable_length`; if not, a start has to check the chunks."""
    disk_bytes: int = 0
    """Room that it takes on its disk, written or not."""
    written_bytes: int = 0
    """The part of `disk_bytes` that has been written."""
    error: KeraError | None = None
    """Why it could not be written; nothing can be appended to it any more."""
    touched: bool = False
    """Whether its disk may have data of it."""
    busy: bool = False
    """Whether a job writes it."""
    readers: int = 0
    """Number of readers; its memory and frame are not released as long as there are any."""
    dropped: bool = False
    """Whether it was freed or replaced; it is removed when no job or reader needs it any more."""
    damaged: set[int] = field(default_factory=set)
    """Offsets of chunks that do not match their checksums."""

    @property
    def replica_id(self) -> ReplicaId:
        """The id, which is unique for ever."""
        return self.broker_id, self.virtual_segment_id

    @property
    def appendable(self) -> bool:
        """Whether its broker may append to it."""
        return not (self.closed or self.sealed) and self.error is None

    @property
    def finished(self) -> bool:
        """Whether nothing will be appended any more, so that its memory is needed only until it is on disk."""
        return self.closed or self.sealed

    @property
    def on_disk(self) -> bool:
        """Whether all of it is durable."""
        return self.durable_length == self.length and self.durable_closed == self.closed

    def cut(self, length: int, checksum: int) -> None:
        """Forget the chunks behind `length`, which must be the end of a chunk; `checksum`: of all chunks before it.

        Raises `CorruptChunk` if either does not match, and changes nothing then.
        """
        count = bisect_left(self.chunk_ends, length) + 1 if length else 0
        if length and (count > len(self.chunk_ends) or self.chunk_ends[count - 1] != length):
            raise CorruptChunk(f"offset {length} is not an end of a chunk of {self}", length=self.length, offset=length)
        found = chained_checksums(self.view, 0, self.chunk_ends[:count], 0)
        if found != checksum:
            raise CorruptChunk(
                f"up to offset {length}, {self} has checksum {found:08x} and not {checksum:08x}", offset=length
            )
        del self.chunk_ends[count:]
        self.length, self.checksum, self.chunk_count = length, checksum, count
        if self.durable_length > length:
            self.durable_length, self.durable_checksum = length, checksum

    def info(self) -> backup_pb2.ReplicaInfo:
        """Return its description for messages."""
        return backup_pb2.ReplicaInfo(
            broker_id=self.broker_id,
            broker_epoch=self.broker_epoch,
            stream_id=self.stream_id,
            virtual_log_id=self.virtual_log_id,
            virtual_segment_id=self.virtual_segment_id,
            length=self.length,
            durable_length=self.durable_length,
            checksum=self.checksum,
            closed=self.closed,
            chunk_count=self.chunk_count,
            chunks_damaged=len(self.damaged),
        )

    def __str__(self) -> str:
        return f"the replica of virtual segment {self.virtual_segment_id:#x} of broker {self.broker_id}"


def verify_chunks(chunks: memoryview, base: int, checksum: int) -> tuple[array[int], int]:
    """Check that `chunks` are whole, placed chunks; `base` and `checksum`: length and checksum of the replica so far.

    Returns the end of each chunk in the replica, and the checksum extended over them. Raises `CorruptChunk`, and
    `RecordTooLarge` for more chunks than a write or batch may have.
    """
    size = len(chunks)
    chunks_max = REQUEST_CHUNKS_MAX if size > REPLICATED_BYTES_MAX else size
    found, checksum = verify_run(chunks, base, checksum, chunks_max + 1)
    ends = array("I", found)
    if len(ends) > chunks_max:
        raise RecordTooLarge(
            f"{size} bytes of more than {chunks_max} chunks are too much to replicate at once",
            limit_bytes=REPLICATED_BYTES_MAX,
            limit_chunks=chunks_max,
        )
    invariant(not ends or ends[-1] == base + size, "a chunk that was verified ends within its memory")
    return ends, checksum
