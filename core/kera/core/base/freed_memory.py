"""Settings of the C library for large blocks of memory that are freed."""

from __future__ import annotations

_LARGEST_LEARNT_BYTES = 31 << 20
"""glibc learns from freed blocks of up to 32 MiB, including its own overhead."""


def keep_freed_memory() -> None:
    """Have the process keep memory that it frees, up to 64 MiB, for the next message or chunk.

    Each message or chunk allocates memory (a message of gRPC several times). By default glibc returns freed memory to
    the kernel, and faulting it in again, page by page, costs as much as several copies. But when a block with its own
    mapping is freed, glibc expects more of this size: from then on it allocates blocks of up to this size on the heap,
    and keeps twice as much free there. One such block, never touched, is enough. With other C libraries this does
    nothing.
    """
    bytes(_LARGEST_LEARNT_BYTES)
