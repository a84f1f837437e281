"""One record, as `Producer.send` accepts it: checked, copied where the caller could change it, counted in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kera.client import arguments
from kera.client.headers import Header
from kera.core.errors import InvalidArgument

RECORD_OVERHEAD_BYTES = 32
"""Size of a record in a chunk besides its value and keys: timestamp and offsets; estimated from above."""
_TIMESTAMP_US_MAX = (1 << 63) - 1


def listed_keys(keys: Any) -> Sequence[bytes]:
    """A copy. Raises `InvalidArgument`."""
    if isinstance(keys, str | bytearray | memoryview | Mapping) or not isinstance(keys, Iterable):
        raise arguments.wrong("keys", keys, "bytes, or a list of bytes; encode them first")
    return tuple(keys)


def bytes_of(what: str, value: bytes) -> int:
    """Length of what has to be bytes. Raises `InvalidArgument`."""
    if not isinstance(value, bytes):
        raise InvalidArgument(f"{what} is {type(value).__name__}, not bytes; encode it first")
    return len(value)


def headers_bytes(headers: Iterable[Header]) -> int:
    """Bytes of headers in a chunk, estimated from above."""
    size = 0
    for name, value in headers:
        size += (len(name) if name.isascii() else len(name.encode())) + (0 if value is None else len(value)) + 16
    return size


def checked_time(timestamp_us: int) -> int:
    """Raises `InvalidArgument`."""
    unit = " (whole microseconds since the Unix epoch)"
    return arguments.whole("timestamp_us", timestamp_us, -_TIMESTAMP_US_MAX, _TIMESTAMP_US_MAX, what=unit)
