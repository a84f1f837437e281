"""Makes a producer's chunks together from the rows of one batch: one chunk for each streamlet, all of one stream.

begin_chunks     writes the payloads, with room for a header before each; their streamlets are not known yet
seal_chunks      writes the headers, with the checksums
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
"""Stands for the length of a payload that cannot be lean."""


@accelerated()
def begin_chunks(
    batch: pa.RecordBatch,
    order: npt.NDArray[np.int64] | None,
    ends: array[int] | npt.NDArray[np.uint32],
    bytes_max: int,
) -> tuple[bytearray, bytes]:
    """Make one chunk of the rows between each two consecutive `ends` (ascending), with payloads as of `lean.encode`.

    `order`: the numbers of the rows in the order in which they are taken; None: the order of `batch`. Returns the
    chunks, one after the other, with zeros instead of headers, and the number of bytes of each payload, as 64-bit
    numbers. A chunk whose payload cannot be lean is left out; its number is `NOT_LEAN`.
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
    """Write the headers of chunks that `begin_chunks` has made: fields of each chunk, and fields common to all.

    Raises `InvalidArgument` if chunks with such payloads do not have exactly the length of `chunks`.
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
    """Yield the begin and end of each of the consecutive chunks with payloads of these lengths."""
    start = 0
    for size in payload_bytes.tolist():
        if size < 0:
            raise InvalidArgument(f"there is no payload of {size} bytes")
        end = start + HEADER_BYTES + padded(size)
        yield start, end
        start = end
