"""Allocates all pages of a memory map at the start, and not on their first use.

The kernel clears half a GiB in a quarter of a second, and Python lets no other thread run during such a call. So the
call is made in pieces: on a thread, it does not block the event loop.
"""

from __future__ import annotations

import contextlib
import mmap

PIECE_BYTES = 4 << 20
"""A piece takes some 2 ms."""
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in the mmap module


def populate(memory: mmap.mmap) -> None:
    """Allocate all pages, as huge pages where possible. Their content is unchanged."""
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # if the kernel or the file system supports huge pages
    with contextlib.suppress(OSError, ValueError):  # an older kernel faults the pages in on their first use
        for start in range(0, len(memory), PIECE_BYTES):
            memory.madvise(_MADV_POPULATE_WRITE, start, min(PIECE_BYTES, len(memory) - start))
