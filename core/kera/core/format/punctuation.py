"""A punctuation: a chunk without records, which says that no older records follow it (docs/epochs.md).

It is the only kind of chunk without records and payload, and only brokers write it: they refuse chunks from clients
that have this flag or no records. Its two times, which are equal, count among those of its segment, so a search for the
first chunk at or after a time finds it. It belongs to no producer.
"""

from __future__ import annotations

from typing import Any

from kera.core.format.chunk import ARROW_VERSION, ChunkHeader, encode_header

FLAG = 4
"""The bit of a punctuation in the field `flags` of a chunk's header."""
FLAGS_AT = 5
"""The offset of that field."""
NO_TIME = -(1 << 63)
"""A time before all others, for what has no time."""
EPOCH_GRACE_MS = 1000
"""Default for streams with epochs: how late a record may arrive after its time and still not be late."""
TIMESTAMP_AHEAD_MAX_MS = 3_600_000
"""Default for streams with epochs: how far the times of a chunk may be ahead of its broker's clock."""


def encode_punctuation(stream_id: int, streamlet_id: int, timestamp_us: int, created_us: int) -> bytes:
    """Return the header of a punctuation that is not placed yet."""
    return encode_header(
        b"", ARROW_VERSION, FLAG, 0, stream_id, streamlet_id, 0, 0, 0, 0, 0, created_us, timestamp_us, timestamp_us
    )


def is_punctuation(header: ChunkHeader) -> bool:
    """Return whether a chunk is a punctuation, by its header."""
    return header.flags & FLAG != 0


def is_punctuation_at(buffer: Any, offset: int) -> bool:
    """Return whether the chunk at `offset` is a punctuation, without reading its whole header."""
    flags: int = buffer[offset + FLAGS_AT]
    return flags & FLAG != 0
