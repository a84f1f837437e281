"""Settings of the C library for large blocks of memory that are freed."""

from __future__ import annotations

_LARGEST_LEARNT_BYTES = 31 << 20
"""glibc learns from freed blocks of up to 32 MiB, with what it adds to them."""


def keep_freed_memory() -> None:
    """Have the process keep memory that it frees, up to 64 MiB, for the next message or chunk.

    Each of them takes new memory (of gRPC's messages several times). By default glibc gives what is freed back to the
    kernel, and faulting it in again, page by page, costs as much as several copies. But when a block is freed that was
    mapped by itself, glibc expects more of its size: it takes up to that from the heap from then on, and lets twice as
    much lie free there. One such block, never touched, is enough. Elsewhere than with glibc this does nothing.
    """
    bytes(_LARGEST_LEARNT_BYTES)
