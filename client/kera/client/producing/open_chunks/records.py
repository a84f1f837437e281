"""Accepts the records of `Producer.send`: checks them, copies what the caller could change, and counts their bytes.

Most records are a value, or a value and a key, for a chunk that is open, stays open, and is of the record's epoch. For
such a record, `send` only appends to the chunk's lists and takes its bytes from the producer's room. With the native
core, a function in C does this (``core/native/send.c``), and calls its twin `Records.send` for all other records. The
classes that both of them change are in C as well: `Room`, `Gathered` and `Accepted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kera.client import arguments
from kera.client.headers import Header, HeadersLike, pairs_of
from kera.client.producing.encoding.partitioner import streamlet_of_keys
from kera.client.producing.open_chunks.accumulator import Pending
from kera.client.producing.open_chunks.stream_writers import StreamWriters
from kera.client.producing.sending.buffer import Buffer
from kera.client.settings import ProducerSettings
from kera.core.errors import InvalidArgument

NO_KEYS = ()
"""The default of `Producer.send` for keys."""
RECORD_OVERHEAD_BYTES = 32
"""Size of a record in a chunk without its value and keys: timestamp and offsets; estimated from above."""
_TIMESTAMP_US_MAX = (1 << 63) - 1


class Records:
    """Accepts the records of one producer, one by one."""

    def __init__(
        self, settings: ProducerSettings, buffer: Buffer, writers: StreamWriters, now_s: Callable[[], float]
    ) -> None:
        """`now_s`: the time of day, in seconds."""
        self._chunk_bytes_max = int(settings.chunk_bytes_max)
        self._buffer = buffer
        self._writers = writers
        self._filling = writers.filling
        self._now_s = now_s

    def send(
        self,
        stream: str,
        value: Any,
        *,
        keys: Any = NO_KEYS,
        timestamp_us: int | None = None,
        headers: HeadersLike | None = None,
        streamlet: int | None = None,
    ) -> Pending:
        """See `Producer.send`."""
        plain = keys is NO_KEYS and timestamp_us is None and headers is None and streamlet is None
        if plain and value.__class__ is bytes and stream in self._filling:
            # The whole path of most records, inline: each call would add a tenth to the cost of a record.
            accumulator = self._filling[stream]
            buffer = self._buffer
            size = RECORD_OVERHEAD_BYTES + len(value)
            chunk_bytes = accumulator.size + size
            left_bytes = buffer.left_bytes - size
            if (
                left_bytes >= 0
                and chunk_bytes < self._chunk_bytes_max
                and (time_s := self._now_s()) < accumulator.epoch_end_s
            ):
                accumulator.size = chunk_bytes
                buffer.left_bytes = left_bytes
                values = accumulator.values
                pending = Pending()
                pending._accumulator = accumulator  # noqa: SLF001 - it has no __init__
                pending._index = len(values)  # noqa: SLF001
                values.append(value)
                accumulator.times_s.append(time_s)
                return pending
        return self._send(stream, value, keys, timestamp_us, headers, streamlet, plain=plain)

    send.__qualname__ = "Producer.send"  # errors over arguments name what users call

    def _send(
        self,
        stream: str,
        value: bytes | None,
        keys: bytes | Sequence[bytes],
        timestamp_us: int | None,
        headers: HeadersLike | None,
        streamlet: int | None,
        *,
        plain: bool,
    ) -> Pending:
        writer = self._writers.by_name.get(stream)
        if writer is None or self._buffer.ended:
            raise self._writers.not_ready(stream)
        size = RECORD_OVERHEAD_BYTES + (0 if value is None else bytes_of("value", value))
        accepted_keys: Sequence[bytes] = ()  # copies, like accepted_headers: the caller may change its own lists later
        accepted_headers: Sequence[Header] = ()
        if not plain:
            timestamp_us = None if timestamp_us is None else checked_time(timestamp_us)
            if keys is not NO_KEYS:
                accepted_keys = (keys,) if isinstance(keys, bytes) else listed_keys(keys)
                size += sum([bytes_of("key", key) + 8 for key in accepted_keys])
            if headers is not None:
                accepted_headers = pairs_of(headers)
                size += headers_bytes(accepted_headers)
        spread = False
        if streamlet is None:
            decided = streamlet_of_keys(accepted_keys, writer.streamlet_count, writer.partitioner)
            spread = decided is None
            streamlet = writer.sticky_streamlet if decided is None else decided
        elif streamlet.__class__ is not int:
            streamlet = writer.checked_streamlet(streamlet)
        if self._buffer.is_full(size):
            raise self._buffer.refuse(size)
        time_s = self._now_s()
        accumulator = writer.open_chunks.get(streamlet)
        if (
            accumulator is None
            or size > self._chunk_bytes_max
            or (time_s >= accumulator.epoch_end_s if timestamp_us is None else timestamp_us >= accumulator.epoch_end_us)
        ):
            time_us = round(time_s * 1e6) if timestamp_us is None else timestamp_us
            accumulator = writer.open_chunk(streamlet, size, time_us, spread=spread)
        pending = accumulator.append(value, time_s, size)
        if not plain:
            accumulator.describe_last(accepted_keys or None, timestamp_us, accepted_headers or None)
            self._filling.pop(stream, None)
        self._buffer.take(size)
        if accumulator.size >= self._chunk_bytes_max:
            writer.close_chunk(accumulator)
        elif plain and accumulator.keys is None and accumulator.headers is None:
            self._filling[stream] = accumulator
        return pending


def listed_keys(keys: Any) -> Sequence[bytes]:
    """Return a copy of `keys`. Raises `InvalidArgument` if they are not a list or another iterable of keys."""
    if isinstance(keys, str | bytearray | memoryview | Mapping) or not isinstance(keys, Iterable):
        raise arguments.wrong("keys", keys, "bytes, or a list of bytes; encode them first")
    return tuple(keys)


def bytes_of(what: str, value: bytes) -> int:
    """Return the length of a value. Raises `InvalidArgument` if it is not bytes."""
    if not isinstance(value, bytes):
        raise InvalidArgument(f"{what} is {type(value).__name__}, not bytes; encode it first")
    return len(value)


def headers_bytes(headers: Iterable[Header]) -> int:
    """Return the bytes of headers in a chunk, estimated from above."""
    size = 0
    for name, value in headers:
        size += (len(name) if name.isascii() else len(name.encode())) + (0 if value is None else len(value)) + 16
    return size


def checked_time(timestamp_us: int) -> int:
    """Return a checked timestamp. Raises `InvalidArgument` if it is not a whole number within 64 bits."""
    unit = " (whole microseconds since the Unix epoch)"
    return arguments.whole("timestamp_us", timestamp_us, -_TIMESTAMP_US_MAX, _TIMESTAMP_US_MAX, what=unit)
