"""Chunks of a producer that are made together, of the rows of one batch: for as many streamlets, of one stream.

begin_chunks     payloads in their places, with room for a header before each; where they go is not known yet
seal_chunks      the headers, with the checksums
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kera.core.errors import InvalidArgument
from kera.core.format import lean
from kera.core.format.chunk import HEADER_BYTES, encode_header, padded, padding_of
from kera.core.native import accelerated

Numbers: TypeAlias = "array[int] | npt.NDArray[np.int64]"
NOT_LEAN = -1
"""Instead of a payload's length."""


@accelerated()
def begin_chunks(
    batch: pa.RecordBatch,
    order: npt.NDArray[np.int64] | None,
    ends: array[int] | npt.NDArray[np.uint32],
    bytes_max: int,
) -> tuple[bytearray, bytes]:
    """Chunks of the rows up to each of `ends`, ascending, from the one before: payloads as `lean.encode` makes them.

    `order`: which rows, by number, up to the last of `ends`; None: as they are. Returns the chunks, one
    after the other, with zeros instead of headers, and how many bytes each payload is, as numbers of 64 bits. Of one
    that cannot be lean there is nothing but `NOT_LEAN`.
    """
    chunks, sizes = bytearray(), array("q")
    for start, end in pairwise([0, *ends.tolist()]):
        part = batch.slice(start, end - start) if order is None else batch.take(pa.array(order[start:end]))
        payload = lean.encode(part, None, bytes_max=bytes_max)
        sizes.append(NOT_LEAN if payload is None else len(payload))
        if payload is not None:
            chunks += bytes(HEADER_BYTES) + payload + padding_of(len(payload))
    return chunks, sizes.tobytes()


@accelerated()
def seal_chunks(  # noqa: PLR0913, PLR0917 - as of `encode_header`
    chunks: bytearray | memoryview,
    payload_bytes: Numbers,
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
) -> None:
    """Write the headers of chunks that `begin_chunks` has made: of each what is its own, and what all of them have.

    Raises `InvalidArgument` if chunks with such payloads take another number of bytes.
    """
    view = memoryview(chunks)
    own = (streamlet_ids, record_counts, producer_epochs, sequences, min_timestamps_us, max_timestamps_us)
    places = list(_places_of(payload_bytes))
    if (places[-1][1] if places else 0) != len(view):
        raise InvalidArgument(f"{len(view)} bytes are not {len(places)} chunks with these payloads")
    for (start, _), size, (streamlet_id, record_count, producer_epoch, sequence, low, high) in zip(
        places, payload_bytes.tolist(), zip(*(column.tolist() for column in own), strict=True), strict=True
    ):
        at = start + HEADER_BYTES
        view[start:at] = encode_header(
            view[at : at + size], version, flags, record_count, stream_id, streamlet_id, schema_id, producer_id,
            producer_epoch, codec, sequence, created_us, low, high,
        )  # fmt: skip


def _places_of(payload_bytes: Numbers) -> Iterator[tuple[int, int]]:
    """Where chunks with payloads of these lengths, which follow each other, begin and end."""
    start = 0
    for size in payload_bytes.tolist():
        if size < 0:
            raise InvalidArgument(f"there is no payload of {size} bytes")
        end = start + HEADER_BYTES + padded(size)
        yield start, end
        start = end
