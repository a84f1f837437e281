"""Values of the benchmark's producers: random hex digits of a fixed length.

Zeros would compress too well, and random bytes not at all.
"""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa

from kera.client.producing.encoding.payloads import size_of
from kera.connect.files.lines import null_column
from kera.core.format.schema import DEFAULT_SCHEMA


def make_value(record_bytes: int) -> bytes:
    """Return one value."""
    return os.urandom(record_bytes // 2 + 1).hex().encode()[:record_bytes]


def make_batch(record_bytes: int, records: int) -> pa.RecordBatch:
    """Return `records` records without keys and headers, each with a different value, all with the same timestamp."""
    values = os.urandom(record_bytes * records // 2 + 1).hex().encode()
    offsets = np.arange(0, record_bytes * (records + 1), record_bytes, dtype=np.int32)
    value = pa.Array.from_buffers(pa.binary(), records, [None, pa.py_buffer(offsets), pa.py_buffer(values)])
    columns = {
        "timestamp": pa.array(np.full(records, 1_700_000_000_000_000)).cast(DEFAULT_SCHEMA.field("timestamp").type),
        "keys": null_column(records, DEFAULT_SCHEMA.field("keys").type),
        "value": value,
        "headers": null_column(records, DEFAULT_SCHEMA.field("headers").type),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=DEFAULT_SCHEMA)


def records_per_chunk(record_bytes: int, chunk_bytes: int, *, lean: bool = False) -> int:
    """Return how many records a producer puts into a chunk of at most `chunk_bytes`; at least one.

    `lean`: for version 2 of the format.
    """
    least, most = 1, max(2, chunk_bytes // max(1, record_bytes) + 1)
    while most - least > 1:
        middle = (least + most) // 2
        if size_of(make_batch(record_bytes, middle), lean=lean) <= chunk_bytes:
            least = middle
        else:
            most = middle
    return least
