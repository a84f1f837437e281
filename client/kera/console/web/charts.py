"""Charts of numbers over time, drawn on the server as SVG paths. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

WIDTH, HEIGHT = 600.0, 120.0
_STEPS = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True)
class Chart:
    """The data of a template's chart, in a box of `width` by `height`."""

    line: str
    """The data of an SVG path for the line; empty: there are fewer than two points."""
    area: str
    """The data of an SVG path for the area between the line and the axis."""
    top: float
    """The value at the upper edge; the lower edge is 0."""
    latest: float | None
    span_s: float
    """The time from the first point to the last one."""
    width: float = WIDTH
    height: float = HEIGHT


def chart(points: Sequence[tuple[float, float | None]], *, binary: bool = False) -> Chart:
    """Return the chart of points: times in seconds, in order, with values; None makes a gap in the line.

    `binary`: values are bytes, so that round numbers are powers of two.
    """
    first = next((at for at, (_, value) in enumerate(points) if value is not None), 0)
    points = points[first:]
    known = [value for _, value in points if value is not None]
    highest = max(known, default=0.0)
    top = 2.0 ** ceil(log2(max(highest, 1.0))) if binary else ceiling(highest)
    span_s = points[-1][0] - points[0][0] if points else 0.0
    latest = points[-1][1] if points else None
    if len(known) < 2 or span_s <= 0:
        return Chart("", "", top, latest, max(span_s, 0.0))
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is None:
            pieces.append([])
        else:
            x = (at - points[0][0]) / span_s * WIDTH
            pieces[-1].append((x, HEIGHT - min(value, top) / top * HEIGHT))
    drawn = [piece for piece in pieces if len(piece) > 1]
    lines = ["M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in piece) for piece in drawn]
    areas = [
        f"{line} L{piece[-1][0]:.1f} {HEIGHT:.1f} L{piece[0][0]:.1f} {HEIGHT:.1f} Z"
        for line, piece in zip(lines, drawn, strict=True)
    ]
    return Chart(" ".join(lines), " ".join(areas), top, latest, span_s)


def ceiling(value: float) -> float:
    """Return the next round number from `value` on, at least 1."""
    step = 1.0
    while True:
        for factor in _STEPS:
            if value <= step * factor:
                return step * factor
        step *= 10
