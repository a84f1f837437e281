"""What both ends of a gRPC connection agree on."""

from __future__ import annotations

from typing import Any

from kera.core.rpc.limits import BULK_BYTES_MAX, HEAD_BYTES_MAX, REQUESTS_IN_FLIGHT_MAX

ERROR_METADATA = "kera-error-bin"
"""Trailing metadata of a failed call: a ``kera.v1.Error``."""
_FIELD_OVERHEAD_BYTES = 64
"""Tag and length of the bulk field, and the request id, come on top of the two limits."""


def channel_options(bulk_bytes_max: int = BULK_BYTES_MAX) -> list[tuple[str, Any]]:
    """Explicit message-size limits, the same on both sides."""
    limit = HEAD_BYTES_MAX + bulk_bytes_max + _FIELD_OVERHEAD_BYTES
    return [("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]


def server_options(bulk_bytes_max: int = BULK_BYTES_MAX) -> list[tuple[str, Any]]:
    """Ports are not shared, so a taken one is an error; a connection's unary calls are bounded as frames are."""
    return [
        *channel_options(bulk_bytes_max),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", REQUESTS_IN_FLIGHT_MAX),
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
