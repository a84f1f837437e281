"""A punctuation: a chunk without records, which says that nothing older comes behind it (docs/epochs.md).

It is the one kind of chunk that has no records and no payload, and brokers alone write it: what a client sends with
this flag is refused at their door, as are all chunks without records. Its times, both the same, count among those of
its segment, so whoever looks for the first chunk at or after a time finds it. It belongs to no producer.
"""

from __future__ import annotations

from typing import Any

from kera.core.format.chunk import ARROW_VERSION, ChunkHeader, encode_header

FLAG = 4
"""In the field `flags` of a chunk's header."""
FLAGS_AT = 5
"""Where that field is."""
NO_TIME = -(1 << 63)
"""Before all times: of what has none."""
EPOCH_GRACE_MS = 1000
"""Default for streams with epochs: how long after its time a record may come before its entry is silent."""
TIMESTAMP_AHEAD_MAX_MS = 3_600_000
"""Likewise: so far ahead of its broker's clock the times of a chunk may be."""


def encode_punctuation(stream_id: int, streamlet_id: int, timestamp_us: int, created_us: int) -> bytes:
    """The chunk; it has yet to be placed."""
    return encode_header(
        b"", ARROW_VERSION, FLAG, 0, stream_id, streamlet_id, 0, 0, 0, 0, 0, created_us, timestamp_us, timestamp_us
    )


def is_punctuation(header: ChunkHeader) -> bool:
    """Whether a chunk is one, by its header."""
    return header.flags & FLAG != 0


def is_punctuation_at(buffer: Any, offset: int) -> bool:
    """The same of the chunk whose header is there, without reading it."""
    flags: int = buffer[offset + FLAGS_AT]
    return flags & FLAG != 0
