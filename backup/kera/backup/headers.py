"""Keeps headers of chunks that are on disk only in memory, so that a recovery reads them without reading the disk.

Headers show where streamlets end and how far producers got, and producers wait until a recovery knows that. On disk
headers are scattered: to read the headers of chunks of 16 KiB, one has to read everything. So when a replica's memory
is released, its headers are kept, 128 bytes for each chunk, which were verified on arrival. They may take `bytes_max`
in all; beyond that, the oldest are dropped. Headers that are not kept, as after a start, are read from disk.

Belongs to one event loop. Pure.
"""

from __future__ import annotations

import numpy as np

from kera.backup.reading import Streamlets, Walk
from kera.backup.replica import Replica
from kera.core.format.chunk import ALIGNMENT_BYTES, HEADER_BYTES
from kera.core.format.header_table import HEADER, Headers, Rows, chunk_bytes

_UNITS = HEADER_BYTES // ALIGNMENT_BYTES
"""Size of a header in units of the alignment of chunks."""


class KeptHeaders:
    """A bounded cache of the chunk headers of replicas that are on disk only; the oldest headers go first."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_kept = 0
        self._bytes_max = bytes_max
        self._kept: dict[Replica, bytes] = {}
        """Headers by replica, the oldest first."""

    def keep(self, replica: Replica) -> None:
        """Keep the headers of a replica whose memory is about to be given back."""
        size = len(replica.chunk_ends) * HEADER_BYTES
        if not size or size > self._bytes_max or replica in self._kept or replica.chunk_ends[-1] != replica.length:
            return
        starts = np.zeros(len(replica.chunk_ends), dtype=np.uint32)
        starts[1:] = np.array(replica.chunk_ends)[:-1] // ALIGNMENT_BYTES  # a copy: a view would keep it from shrinking
        units = np.frombuffer(replica.view, dtype=np.uint8).reshape(-1, ALIGNMENT_BYTES)
        self._kept[replica] = units[(starts[:, None] + np.arange(_UNITS, dtype=np.uint32)).ravel()].tobytes()
        self.bytes_kept += size
        while self.bytes_kept > self._bytes_max:
            self.forget(next(iter(self._kept)))

    def forget(self, replica: Replica) -> None:
        """Forget the headers of a replica."""
        self.bytes_kept -= len(self._kept.pop(replica, b""))

    def read(self, replica: Replica, offset: int, bytes_max: int, streamlets: Streamlets) -> Walk | None:
        """Return the result of `kera.backup.reading.walk` with `headers_only`; None: the headers are not kept."""
        if replica.slot is not None and replica.finished:
            self.keep(replica)
        kept = self._kept.get(replica)
        if kept is None:
            return None
        headers = np.frombuffer(kept, dtype=HEADER)
        sizes = chunk_bytes(headers)
        ends = np.cumsum(sizes)
        first = int(np.searchsorted(ends - sizes, offset))
        wanted = np.flatnonzero(_wanted(headers[first:], streamlets)) + first
        count_max = max(1, bytes_max // HEADER_BYTES)
        stop = int(wanted[count_max]) if len(wanted) > count_max else len(ends)
        return Walk(
            bytearray(headers[wanted[:count_max]].tobytes()), int(ends[stop - 1]), ends=ends[first:stop].tolist()
        )


def _wanted(headers: Headers, streamlets: Streamlets) -> Rows:
    if not streamlets:
        return np.ones(len(headers), dtype=np.bool_)
    found = np.zeros(len(headers), dtype=np.bool_)
    for stream_id, numbers in streamlets.items():
        mine = headers["stream_id"] == stream_id
        found |= mine & np.isin(headers["streamlet_id"], list(numbers)) if numbers else mine
    return found
