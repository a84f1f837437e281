"""Places as users write them in options: words, JSON, times.

    startingOffsets               earliest | latest | {"clicks": {"0": place, "1": [place of entry 0, of entry 1, …]}}
    startingOffsetsByTimestamp    {"clicks": {"0": time, "1": time}}
    startingTimestamp             time

A place is "earliest" (or -2), "latest" (or -1), or [group, segment, offset]. A time is in milliseconds since the epoch
as for Kafka, ISO-8601 (UTC unless it says otherwise), or before now: ``-30s``, ``-15m``, ``-2h``, ``-1d``.

``startingOffsets`` also takes the offsets that a query's progress shows. They add the incarnation of each stream and
the ordinal of the next record.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kera.core.base import spans
from kera.core.base.ids import Position
from kera.core.errors import InvalidArgument
from kera.spark_connector.planning.offsets import EntryOffset
from kera.spark_connector.planning.places import Place, Time, Where

T = TypeVar("T")

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
EPOCH_MS_MAX = 253_402_300_799_999
"""End of the year 9999: a larger number cannot be meant as milliseconds, also not before now."""
_NUMBERS_MAX = (1 << 64) - 1
"""The largest number in a position."""


def parse_where(option: str, text: str) -> Where:
    """Parse ``earliest``, ``latest``, or JSON, also that of a query's progress; raises `InvalidArgument`."""
    word = text.strip().lower()
    if word == "earliest":
        return Where(option, "earliest")
    if word == "latest":
        return Where(option, "latest")
    document = _document(option, text, "must be 'earliest', 'latest' or a JSON object", '{"clicks": {"0": place, ...}}')
    stream_ids = {}
    if isinstance(document.get("streams"), dict) and isinstance(document.get("version"), int):
        shown = document["streams"]
    elif isinstance(document.get("stream"), str) and isinstance(document.get("streamlets"), dict):  # version 1
        shown = {document["stream"]: document}
    else:
        return Where(option, streams=_streams(option, text, document, _places))
    for name, stream in shown.items():
        if not isinstance(stream, dict) or not isinstance(stream.get("stream_id"), int):
            raise _refused(option, text, f"stream {name!r} has no stream_id: it is not what a query's progress shows")
        stream_ids[name] = stream["stream_id"]
    streamlets = {name: stream.get("streamlets") for name, stream in shown.items()}
    return Where(option, streams=_streams(option, text, streamlets, _places), stream_ids=stream_ids)


def parse_times(option: str, text: str) -> Where:
    """Parse JSON with a time per streamlet, as in ``startingOffsetsByTimestamp``; raises `InvalidArgument`."""
    document = _document(option, text, "must be a JSON object", '{"clicks": {"0": time, ...}}')
    return Where(option, streams=_streams(option, text, document, _time))


def parse_time(option: str, text: str) -> Time:
    """Parse one time; raises `InvalidArgument`."""
    try:
        return _time(text)
    except ValueError as error:
        raise _refused(option, text, str(error)) from None


def span_ms(text: str) -> int | None:
    """Return a text's span in milliseconds (see `kera.core.base.spans`).

    None if the text is no span, or if the span is above 0 and below a millisecond.
    """
    found_ms = spans.span_ms(text)
    return None if found_ms is None or 0 < found_ms < 1 else round(found_ms)


def _document(option: str, text: str, otherwise: str, form: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise _refused(option, text, otherwise) from None
    if not isinstance(document, dict) or not document:
        raise _refused(option, text, f"must have the form {form}")
    return document


def _streams(
    option: str, text: str, document: Mapping[str, Any], value_of: Callable[[Any], T]
) -> dict[str, dict[int, T]]:
    streams: dict[str, dict[int, T]] = {}
    for name, rows in document.items():
        if not isinstance(rows, dict) or not rows:
            raise _refused(option, text, f'stream {name!r} must have its streamlets, as in {{"{name}": {{"0": ...}}}}')
        streams[name] = {}
        for streamlet, value in rows.items():
            try:
                number = _streamlet(streamlet)
                if number in streams[name]:
                    raise ValueError("is named twice")
                streams[name][number] = value_of(value)
            except ValueError as error:
                raise _refused(option, text, f"stream {name!r}, streamlet {streamlet!r}: {error}") from None
    return streams


def _streamlet(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ValueError("a streamlet is a number from 0")
    return int(text)


def _places(value: Any) -> Place | list[Place]:
    return [_place(item) for item in value] if isinstance(value, list) else _place(value)


def _place(value: Any) -> Place:
    if not isinstance(value, bool) and value in ("earliest", -2):
        return "earliest"
    if not isinstance(value, bool) and value in ("latest", -1):
        return "latest"
    if isinstance(value, list) and len(value) in (3, 4) and all(map(_is_number, value)):
        position = Position(*value[:3])
        return EntryOffset(position, value[3]) if len(value) == 4 else position
    raise ValueError(
        f"{json.dumps(value)} is not a position: use earliest, latest or, in a list with one per entry,"
        " [group, segment, offset]"
    )


def _is_number(part: Any) -> bool:
    return type(part) is int and 0 <= part <= _NUMBERS_MAX


def _time(value: Any) -> Time:
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and re.fullmatch(r"[0-9]{1,20}", text):
        text = int(text)
    if type(text) is int and 0 <= text <= EPOCH_MS_MAX:
        return Time(epoch_us=text * 1000)
    if isinstance(text, str) and text.startswith("-"):
        ago_ms = span_ms(text[1:])
        if ago_ms is not None and ago_ms <= EPOCH_MS_MAX:
            return Time(ago_us=ago_ms * 1000)
    elif isinstance(text, str):
        try:
            moment = dt.datetime.fromisoformat(text)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
            return Time(epoch_us=(moment - _EPOCH) // dt.timedelta(microseconds=1))
        except (ValueError, OverflowError):
            pass
    raise ValueError(
        f"{json.dumps(value)} is not a time: use milliseconds since the epoch, ISO-8601 as in 2026-01-31T12:00:00Z, or"
        f" a time before now as in -15min ({spans.UNITS})"
    )


def _refused(option: str, text: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"option {option}: {problem}; it is {text!r}", option=option, value=text)
