"""Memory that is taken at the start: all its pages are given by the kernel then, and not on their first use.

The kernel clears half a GiB of them in a quarter of a second, and Python lets nobody else run during such a call. It is
made in pieces, so on a thread it holds up no event loop.
"""

from __future__ import annotations

import contextlib
import mmap

PIECE_BYTES = 4 << 20
"""Some 2 ms."""
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in the mmap module


def populate(memory: mmap.mmap) -> None:
    """Have all pages, large ones where there are any. What is in them stays."""
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # where the kernel, or the file system, gives them
    with contextlib.suppress(OSError, ValueError):  # an older kernel faults the pages in on their first use
        for start in range(0, len(memory), PIECE_BYTES):
            memory.madvise(_MADV_POPULATE_WRITE, start, min(PIECE_BYTES, len(memory) - start))
