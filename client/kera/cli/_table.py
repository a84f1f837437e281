"""Aligned text for people: columns with a heading, and lists of names and values.

The text has no rules and no colours, as it may go to a pipe.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

_GAP = "  "


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows under a heading. Columns whose cells are all numbers are aligned to the right."""
    cells = [[_text(cell) for cell in row] for row in rows]
    columns = list(zip(heading, *cells, strict=True))
    to_right = [len(column) > 1 and all(_is_number(cell) for cell in column[1:]) for column in columns]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (list(heading), *cells):
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_right, strict=True)
        )
        lines.append(_GAP.join(padded).rstrip())
    return "\n".join(lines)


def fields(pairs: Iterable[tuple[str, object]], *, indent: str = "") -> str:
    """Return names and values, with the values aligned. A value may have several lines."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    lines = []
    for name, value in pairs:
        first, *rest = _text(value).split("\n")
        lines.append(f"{indent}{name.ljust(width)}{_GAP}{first}".rstrip())
        lines += [f"{indent}{' ' * width}{_GAP}{line}" for line in rest]
    return "\n".join(lines)


def format_time(time_us: int, *, milliseconds: bool = False) -> str:
    """Return microseconds since the epoch as local time, or unchanged if the year is out of Python's range."""
    seconds, rest_us = divmod(time_us, 1_000_000)
    try:
        text = datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{time_us} µs"
    return f"{text}.{rest_us // 1000:03d}" if milliseconds else text


def _text(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace(",", "").isdigit() or text == "-"
