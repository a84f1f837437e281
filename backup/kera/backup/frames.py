"""The layout of replicas on a disk: frames of one size, each with a header of one block and room for a replica.

    ┌───────────────┬──────────────────────────────────────┬──────────────────────────────────────┬──
    │ file header   │ frame 0: header block, replica        │ frame 1: header block, replica        │ …
    │ 4096 bytes    │ 4096 + segment_bytes                  │ 4096 + segment_bytes                  │
    └───────────────┴──────────────────────────────────────┴──────────────────────────────────────┴──

A free frame is a hole, or begins with zeros. Every header is written twice in its block, at 0 and at 2048, each time
within one sector and with a checksum: of the intact copies, the one with the higher sequence counts.

A header has two lengths. It vouches for data that were durable *before* the header was written: if these do not match
their checksum, they are damaged. Data that were written *with* the header may be incomplete after a crash, as the two
writes have no order: they count only if their checksum matches, and if it does not, they were never acknowledged.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from kera.core.base.blocks import BLOCK_BYTES
from kera.core.errors import StartError, invariant
from kera.core.format.checksum import crc32c

FORMAT = 1
COPY_AT = 2048
SECTOR_BYTES = 512
CLUSTER_ID_BYTES_MAX = 128

_FILE_MAGIC = b"KERABACK"
_FILE = struct.Struct("<8sIQ")
"""The file header: magic, format, segment_bytes."""
_MAGIC = b"KERAREPL"
_FRAME = struct.Struct("<8sIQIIQQIQIIIIIBB128s")
_CRC = struct.Struct("<I")
invariant(_FRAME.size + _CRC.size <= SECTOR_BYTES, "a sector holds a header")


class ReplicaHeader(NamedTuple):
    """The header of a replica on the disk."""

    sequence: int
    """Number of the write within the backup: of two frames of one replica, the one with the higher sequence counts."""
    backup_id: int
    broker_id: int
    broker_epoch: int
    stream_id: int
    virtual_log_id: int
    virtual_segment_id: int
    length: int
    checksum: int
    chunk_count: int
    vouched_length: int
    """Length that was durable before this header was written."""
    vouched_checksum: int
    closed: bool
    cluster_id: str

    def encode(self) -> bytes:
        """Return the header block."""
        *numbers, closed, cluster_id = self
        name = cluster_id.encode()
        invariant(len(name) <= CLUSTER_ID_BYTES_MAX, "a header has room for the cluster's id", cluster_id=cluster_id)
        return _block(_FRAME.pack(_MAGIC, FORMAT, *numbers, closed, len(name), name))


def decode_header(block: memoryview | bytes, where: str) -> ReplicaHeader | None:
    """Return the content of a header block; None: neither of its copies is intact.

    Raises `StartError` if a newer version has written it; `where`: the name of the place in the message.
    """
    found: ReplicaHeader | None = None
    for fields in _copies(block, _FRAME):
        magic, version, *numbers, closed, name_bytes, name = fields
        if magic != _MAGIC:
            continue
        if version != FORMAT:
            raise StartError(f"{where} has format {version}, this version knows {FORMAT}; use a newer version")
        header = ReplicaHeader(*[*numbers, bool(closed), name[:name_bytes].decode()])
        if found is None or header.sequence > found.sequence:
            found = header
    return found


def encode_file_header(segment_bytes: int) -> bytes:
    """Return the first block of a file."""
    return _block(_FILE.pack(_FILE_MAGIC, FORMAT, segment_bytes))


def decode_file_header(block: memoryview | bytes, where: str) -> int | None:
    """Return the size of replicas in a file; None: it has no valid header.

    Raises `StartError` if a newer version has written it.
    """
    for magic, version, segment_bytes in _copies(block, _FILE):
        if magic == _FILE_MAGIC:
            if version != FORMAT:
                raise StartError(f"{where} has format {version}, this version knows {FORMAT}; use a newer version")
            return int(segment_bytes)
    return None


def _block(content: bytes) -> bytes:
    half = (content + _CRC.pack(crc32c(content))).ljust(COPY_AT, b"\0")
    return half + half


def _copies(block: memoryview | bytes, layout: struct.Struct) -> list[tuple[Any, ...]]:
    """Return the copies in a block, of two, that match their checksums."""
    view = memoryview(block)
    return [
        layout.unpack_from(view, at)
        for at in (0, COPY_AT)
        if len(view) >= at + layout.size + _CRC.size
        and crc32c(view[at : at + layout.size]) == _CRC.unpack_from(view, at + layout.size)[0]
    ]


class Layout(NamedTuple):
    """The layout of frames in a file."""

    segment_bytes: int

    @property
    def frame_bytes(self) -> int:
        """Size of header and replica."""
        return BLOCK_BYTES + self.segment_bytes

    def offset(self, index: int) -> int:
        """Return the offset of a frame's header in the file; its replica begins a block later."""
        return BLOCK_BYTES + index * self.frame_bytes

    def frame_at(self, offset: int) -> int:
        """Return the frame that contains a byte of the file, which must be behind the file header."""
        return (offset - BLOCK_BYTES) // self.frame_bytes
