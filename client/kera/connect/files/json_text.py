"""Records and rows as JSON: what ``kera consume --json`` prints, and what files of JSON lines have."""

from __future__ import annotations

import base64
import datetime
import json
from typing import Any

import pyarrow as pa

from kera.client.consuming.values import rows_of


def row_lines(batch: pa.RecordBatch) -> bytes:
    """An object for each row of a typed stream, each in a line."""
    return "".join(json.dumps(row, default=jsonable) + "\n" for row in rows_of(batch)).encode()


def record_lines(batch: pa.RecordBatch) -> bytes:
    """An object for each record of a stream without columns of its own, each in a line."""
    return "".join(json.dumps(record_object(row), ensure_ascii=False) + "\n" for row in rows_of(batch)).encode()


def record_object(row: dict[str, Any]) -> dict[str, Any]:
    """A record, without the place that it has."""
    return {
        "timestamp": _iso(row["timestamp"]),
        **_keys_to_json(row["keys"]),
        **_bytes_to_json("value", row["value"]),
        **({"headers": _headers_to_json(row["headers"])} if row["headers"] else {}),
    }


def _keys_to_json(keys: list[bytes | None] | None) -> dict[str, Any]:
    if not keys:
        return {}
    if len(keys) == 1:
        return _bytes_to_json("key", keys[0])
    return {"keys": [_text_or_null(key) for key in keys]}


def _bytes_to_json(name: str, value: bytes | None) -> dict[str, Any]:
    """Text where it is text; else base64, under a name that says so."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {name + "_base64": base64.b64encode(value).decode()}


def _headers_to_json(headers: list[tuple[str, bytes | None]]) -> dict[str, str | None]:
    return {name: _text_or_null(value) for name, value in headers}


def _text_or_null(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def _iso(moment: datetime.datetime | int | None) -> str | int | None:
    """A time as text; one that `datetime` does not have, as the number that it is; none, as a strange producer has."""
    if moment is None or isinstance(moment, int):
        return moment
    return moment.astimezone(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def jsonable(value: Any) -> Any:
    """A value that JSON does not have, as text."""
    if isinstance(value, datetime.datetime):
        return _iso(value) if value.tzinfo else value.isoformat()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)
