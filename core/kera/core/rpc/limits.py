"""Bounds that hold on every transport, so that a caller need not know by which one a call goes."""

from __future__ import annotations

from typing import Any

from kera.core.errors import InternalError, RecordTooLarge, invariant
from kera.core.rpc.method import Method

HEAD_BYTES_MAX = 4 << 20
"""Largest message, without its bulk; of requests see `Method.request_bytes_max`."""
BULK_BYTES_MAX = 32 << 20
"""Default bound on the bulk of a message, both ways."""
REQUEST_CHUNKS_MAX = 1024
"""Chunks of one request to write: each costs a broker some 10 us, in one go."""
UNANSWERED_CHUNKS_MAX = 256
"""Chunks of one producer for one streamlet that wait for an answer. A broker remembers the digests of so many, by which
it tells a repeat from another chunk with the same sequence."""
REPLICATED_BYTES_MAX = 1 << 20
"""Maximum of one request from a broker to a backup, unless it is a single write: at this size a copy is cheap and a
delay short. It is verified in one go, so larger requests have at most `REQUEST_CHUNKS_MAX` chunks."""
REQUESTS_IN_FLIGHT_MAX = 1024
"""Requests of one connection (gRPC: of one stream) that may wait for an answer; then the server stops reading."""
TAKEN_REQUESTS_MAX = 32
TAKEN_BYTES_MAX = 64 << 10
"""Requests, and their bytes, that a taker is given at once: how long that took is asked only then."""
SEND_BUFFER_BYTES_MAX = 4 << 20
"""Replies of one connection that its peer has not taken yet; then the server stops reading."""
ERROR_TEXT_BYTES_MAX = 2048
"""An error's message is cut to this, and its attributes are left out from where they pass it."""
ERROR_METADATA_BYTES_MAX = 8192
"""Default limit of gRPC implementations for the metadata of a reply; unary errors travel there."""

invariant(
    2 * ERROR_TEXT_BYTES_MAX * 4 / 3 < ERROR_METADATA_BYTES_MAX * 3 / 4,
    "an error must fit into metadata in base64, and leave room for the status text",
)


def check_request(method: Method[Any, Any], head_bytes: int, bulk_bytes: int, bulk_bytes_max: int) -> None:
    """Refuse a request that is larger than the method's may be: raises `RecordTooLarge`."""
    _check(method, head_bytes, bulk_bytes, head_bytes_max(method, bulk_bytes_max), bulk_bytes_max)


def head_bytes_max(method: Method[Any, Any], bulk_bytes_max: int) -> int:
    """The largest request of a method, without its bulk."""
    return bulk_bytes_max if method.large_request else method.request_bytes_max


def check_size(method: Method[Any, Any], head_bytes: int, bulk_bytes: int, bulk_bytes_max: int) -> None:
    """Refuse to send what the other end would refuse to receive: raises `RecordTooLarge`."""
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
