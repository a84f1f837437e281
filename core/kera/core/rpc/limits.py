"""Bounds that hold on every transport, so that a caller need not know which one a call uses."""

from __future__ import annotations

from typing import Any

from kera.core.errors import InternalError, RecordTooLarge, invariant
from kera.core.rpc.method import Method

HEAD_BYTES_MAX = 4 << 20
"""Largest message, without its bulk; for requests see `Method.request_bytes_max`."""
BULK_BYTES_MAX = 32 << 20
"""Default bound on the bulk of a message, in both directions."""
REQUEST_CHUNKS_MAX = 1024
"""Maximum of chunks in one write request: each costs a broker some 10 us, without interruption."""
UNANSWERED_CHUNKS_MAX = 256
"""Maximum of unacknowledged chunks of one producer for one streamlet. A broker remembers the digests of this many, to
tell a repeated chunk from another chunk with the same sequence."""
REPLICATED_BYTES_MAX = 1 << 20
"""Maximum of one request from a broker to a backup, unless it is a single write: at this size a copy is cheap and a
delay short. It is verified in one go, so larger requests have at most `REQUEST_CHUNKS_MAX` chunks."""
REQUESTS_IN_FLIGHT_MAX = 1024
"""Maximum of requests of one connection (gRPC: one stream) that wait for an answer; then the server stops reading."""
TAKEN_REQUESTS_MAX = 32
TAKEN_BYTES_MAX = 64 << 10
"""Maximum of requests, and of their bytes, that a taker gets at once: the time is checked only after its call."""
SEND_BUFFER_BYTES_MAX = 4 << 20
"""Maximum of bytes of a connection's replies that its peer has not read yet; then the server stops reading."""
ERROR_TEXT_BYTES_MAX = 2048
"""Maximum of an error's message, which is cut to it; its attributes may take as much again, the rest is left out."""
ERROR_METADATA_BYTES_MAX = 8192
"""Default limit of gRPC implementations for the metadata of a reply; unary errors travel there."""

invariant(
    2 * ERROR_TEXT_BYTES_MAX * 4 / 3 < ERROR_METADATA_BYTES_MAX * 3 / 4,
    "an error must fit into metadata in base64, and leave room for the status text",
)


def check_request(method: Method[Any, Any], head_bytes: int, bulk_bytes: int, bulk_bytes_max: int) -> None:
    """Raise `RecordTooLarge` if a request is larger than its method allows."""
    _check(method, head_bytes, bulk_bytes, head_bytes_max(method, bulk_bytes_max), bulk_bytes_max)


def head_bytes_max(method: Method[Any, Any], bulk_bytes_max: int) -> int:
    """Return the maximum size of a method's requests, without their bulk."""
    return bulk_bytes_max if method.large_request else method.request_bytes_max


def check_size(method: Method[Any, Any], head_bytes: int, bulk_bytes: int, bulk_bytes_max: int) -> None:
    """Raise `RecordTooLarge` for a message that the peer would refuse to receive."""
    _check(method, head_bytes, bulk_bytes, bulk_bytes_max if method.large else HEAD_BYTES_MAX, bulk_bytes_max)


def _check(
    method: Method[Any, Any], head_bytes: int, bulk_bytes: int, head_bytes_max: int, bulk_bytes_max: int
) -> None:
    if head_bytes > head_bytes_max or bulk_bytes > bulk_bytes_max:
        raise RecordTooLarge(
            f"{method.name}: message of {head_bytes} + {bulk_bytes} bytes is over the limits of"
            f" {head_bytes_max} + {bulk_bytes_max}",
            message_bytes=head_bytes + bulk_bytes,
            limit=head_bytes_max if head_bytes > head_bytes_max else bulk_bytes_max,
        )
    if bulk_bytes and not method.bulk:
        raise InternalError(f"{method.name} has no bulk field", bulk_bytes=bulk_bytes)
