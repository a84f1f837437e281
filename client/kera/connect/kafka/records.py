"""Converts messages of Kafka into records of streams, and back: times, keys, values and headers stay unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kera.client.arrow_input import null_column
from kera.client.headers import Header
from kera.connect.records import key_lists
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

NO_TIME_MS = -1
"""Kafka's time of a record without one."""
TIME_MS_MAX = (1 << 63) // 1000 - 1
"""The largest time that fits into 64 bits in microseconds, the unit of records."""
_NO_TIME = 0
"""The kind of a missing time: TIMESTAMP_NOT_AVAILABLE of Kafka's client library."""
_TIMES, _KEYS, _VALUES, _HEADERS = (field.type for field in DEFAULT_SCHEMA)


def rows_of(messages: Sequence[Any]) -> pa.RecordBatch:
    """Convert messages into records. A message without a time gets 1970; its key becomes the primary key of the record.

    Raises `SchemaMismatch` for a header whose name is not UTF-8, and for a time that a record cannot have.
    """
    times = pa.array([_time_us(message) for message in messages], pa.int64())
    keys = pa.array([message.key() for message in messages], pa.binary())
    values = pa.array([message.value() for message in messages], pa.binary())
    headers = [_headers_of(message) for message in messages]
    return pa.RecordBatch.from_arrays(
        [
            times.cast(_TIMES),
            key_lists(keys),
            values,
            pa.array(headers, _HEADERS) if any(headers) else null_column(len(headers), _HEADERS),
        ],
        schema=DEFAULT_SCHEMA,
    )


def _headers_of(message: Any) -> list[Header] | None:
    try:
        found: list[Header] | None = message.headers()
    except (SystemError, UnicodeDecodeError) as error:  # confluent-kafka 2.16 raises the first
        place = f"topic {message.topic()}, partition {message.partition()}, offset {message.offset()}"
        raise SchemaMismatch(f"{place}: the name of a header is not UTF-8, and a stream has no such names") from error
    return found


def _time_us(message: Any) -> int:
    kind, time_ms = message.timestamp()
    if kind == _NO_TIME or time_ms == NO_TIME_MS:
        return 0
    if abs(time_ms) > TIME_MS_MAX:
        raise SchemaMismatch(
            f"the record at offset {message.offset()} of partition {message.partition()} has a time of {time_ms} ms,"
            " which a record of a stream cannot have",
            column="timestamp",
        )
    return int(time_ms) * 1000


def _time_ms(time_us: int) -> int:
    """Return the time of a message. For 1970 it has none, because the client library would send the present time for 0.

    Raises `SchemaMismatch` for a time within the millisecond before 1970.
    """
    time_ms = time_us // 1000
    if time_ms == NO_TIME_MS:
        raise SchemaMismatch(
            f"a record has a time of {time_us} us since 1970, within the millisecond before 1970 that means no time in"
            " Kafka",
            column="timestamp",
        )
    return time_ms or NO_TIME_MS


def messages_of(rows: pa.RecordBatch) -> Iterator[tuple[int, bytes | None, bytes | None, list[Header]]]:
    """Yield milliseconds, key, value and headers of each record. Of several keys only the primary one is kept.

    Raises `SchemaMismatch` for a header that Kafka's client library cannot send, and for a time that Kafka cannot hold.
    """
    times = rows.column("timestamp").cast(pa.int64()).to_pylist()
    keys = rows.column("keys").to_pylist()
    values = rows.column("value").to_pylist()
    headers = rows.column("headers")
    given = [None] * rows.num_rows if headers.null_count == rows.num_rows else _sendable(headers).to_pylist()
    for time_us, own_keys, value, own in zip(times, keys, values, given, strict=True):
        yield _time_ms(time_us), own_keys[0] if own_keys else None, value, own or []


def _sendable(headers: pa.MapArray) -> pa.MapArray:
    """Return `headers`. Raises `SchemaMismatch` for a name with a zero byte, where librdkafka would truncate it."""
    first, end = headers.offsets[0].as_py(), headers.offsets[-1].as_py()
    names = headers.keys.slice(first, end - first)
    cut = pc.index(pc.match_substring(names, "\0"), True).as_py()
    if cut >= 0:
        raise SchemaMismatch(
            f"a record has a header named {names[cut].as_py()!r}; Kafka's client library cannot send its zero byte",
            column="headers",
        )
    return headers
