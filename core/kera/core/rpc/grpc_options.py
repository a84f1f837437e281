"""What both ends of a gRPC connection agree on."""

from __future__ import annotations

from typing import Any

from kera.core.rpc.limits import BULK_BYTES_MAX, HEAD_BYTES_MAX

ERROR_METADATA = "kera-error-bin"
"""Trailing metadata of a failed call: a ``kera.v1.Error``."""
CALLS_MAX = 1 << 14
"""Calls of all clients that a server has at once; further ones are refused (``RESOURCE_EXHAUSTED``)."""
_FIELD_OVERHEAD_BYTES = 64
"""Tag and length of the bulk field, and the request id, come on top of the two limits."""
_LARGEST_LEARNT_BYTES = 31 << 20
"""glibc learns from freed blocks of up to 32 MiB, with what it adds to them."""


def channel_options(bulk_bytes_max: int = BULK_BYTES_MAX) -> list[tuple[str, Any]]:
    """Explicit message-size limits, the same on both sides."""
    limit = HEAD_BYTES_MAX + bulk_bytes_max + _FIELD_OVERHEAD_BYTES
    return [("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]


def server_options(bulk_bytes_max: int = BULK_BYTES_MAX) -> list[tuple[str, Any]]:
    """Ports are not shared, so a taken one is an error; and calls that came in a burst wait for their turn.

    By itself gRPC cancels calls at random when more than 1000 are waiting. Its own limit of a connection's calls
    (``max_concurrent_streams``) is worse: it refuses calls that a client sends just when others have been answered.
    """
    return [
        *channel_options(bulk_bytes_max),
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", CALLS_MAX),
    ]


def client_options(bulk_bytes_max: int = BULK_BYTES_MAX) -> list[tuple[str, Any]]:
    """A daemon that is back is found within a second; by itself gRPC would wait up to two minutes.

    Each channel has a connection of its own, as in the other transports.
    """
    return [
        *channel_options(bulk_bytes_max),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def keep_freed_memory() -> None:
    """Have the process keep memory that it frees, for the next message; for either end of a bulk stream.

    gRPC takes new memory for each message, several times. By default glibc gives what is freed back to the kernel, and
    faulting it in again, page by page, costs as much as several copies. But when a block is freed that was mapped by
    itself, glibc expects more of its size: it takes up to that from the heap from then on, and lets twice as much lie
    free there. One such block, never touched, is enough. Elsewhere than with glibc this does nothing.
    """
    bytes(_LARGEST_LEARNT_BYTES)
