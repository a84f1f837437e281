"""Chunks of a producer that are encoded together: for as many streamlets, of one stream."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kera.core.chunk import encode_header, padding_of
from kera.core.native import accelerated

Numbers: TypeAlias = "array[int] | npt.NDArray[np.int64]"


@accelerated()
def encode_chunks(  # noqa: PLR0913, PLR0917 - as of `encode_header`
    payloads: list[bytes],
    streamlet_ids: Numbers,
    record_counts: Numbers,
    producer_epochs: Numbers,
    sequences: Numbers,
    min_timestamps_us: Numbers,
    max_timestamps_us: Numbers,
    version: int,
    flags: int,
    stream_id: int,
    schema_id: int,
    producer_id: int,
    codec: int,
    created_us: int,
) -> bytes:
    """Chunks that are not placed yet, one after the other: of each what is its own, and what all of them have."""
    pieces: list[bytes] = []
    own = (streamlet_ids, record_counts, producer_epochs, sequences, min_timestamps_us, max_timestamps_us)
    for payload, streamlet_id, record_count, producer_epoch, sequence, low, high in zip(
        payloads, *(column.tolist() for column in own), strict=True
    ):
        header = encode_header(
            payload, version, flags, record_count, stream_id, streamlet_id, schema_id, producer_id, producer_epoch,
            codec, sequence, created_us, low, high,
        )  # fmt: skip
        pieces += (header, payload, padding_of(len(payload)))
    return b"".join(pieces)
