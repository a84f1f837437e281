"""The checksum of all data that KerA writes and sends: CRC-32C (Castagnoli)."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as _crc32c

from kera.core.native import accelerated

__all__ = ["crc32c", "crc32c_each"]

crc32c = accelerated()(_crc32c)
"""``crc32c(data, value=0)``: the checksum of `data` that follows bytes with the checksum `value`."""


@accelerated()
def crc32c_each(data: bytes | memoryview, offsets: array[int] | npt.NDArray[np.int32]) -> bytes:
    """Return the checksum of each piece of `data` between consecutive `offsets` (32 bits, ascending), 32 bits each."""
    bounds = np.asarray(offsets).tolist()
    if bounds and not 0 <= bounds[0] <= bounds[-1] <= len(data):
        raise ValueError("offsets beyond the data")
    return array("I", (_crc32c(data[start:end]) for start, end in pairwise(bounds))).tobytes()
