"""Shows people how late records are: each stream has a bar of its hops, which starts where the previous bar ends.

The text is ASCII only, as it may go to a pipe, or to a terminal of any kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kera.cli._table import fields, table
from kera.core.base.spans import format_ms
from kera.core.base.spelling import plural

if TYPE_CHECKING:
    from kera.client import LatencyConstraint, LatencyDescription, LatencyHop

BAR_CHARS = 60
"""Length of a bar that stands for the limit, or for the whole time if that is longer."""
BAR_CHARS_MIN = 20
LETTERS = {"gather": "g", "send": "s", "replicate": "r", "hand-over": "h", "prefetch": "p", "work": "w"}
FILLING = ("gather", "replicate", "hand-over")
"""Hops whose buffers get advice how long to wait."""
HEADING = ("STREAM", "HOP", "GROUP", "CHUNKS", "MEAN", "P99", "WORST STREAMLET", "ITS PART", "MAY WAIT", "")
LIST_HEADING = ("CONSTRAINT", "STATE", "TOOK", "LIMIT", "OF", "WINDOW", "VIOLATIONS", "WORST HOP", "PATH")


def in_ms(time_us: float) -> str:
    """Return a time as text: ``0.05 ms``, ``4.2 ms``, ``130 ms``, ``4.50 s``."""
    if time_us >= 10_000_000:
        return format_ms(round(time_us / 1000))
    if time_us >= 1_000_000:
        return f"{time_us / 1e6:.2f} s"
    if time_us >= 100_000:
        return f"{time_us / 1000:.0f} ms"
    if time_us >= 1_000:
        return f"{time_us / 1000:.1f} ms"
    return f"{time_us / 1000:.2f} ms" if time_us else "0 ms"


def described(found: LatencyDescription) -> str:
    """Describe a constraint, and how late records are on its path."""
    constraint = found.constraint
    known = sum(hop.chunks > 0 for hop in found.hops)
    part = f"; {known} of {plural(len(found.hops), 'hop')} measured" if known < len(found.hops) else ""
    clocks = known_to_within(found.hops)
    lines = [
        fields(
            (
                ("constraint", constraint.name),
                ("path", ", ".join(constraint.path)),
                ("limit", f"{in_ms(constraint.limit_ms * 1000)}, {of_which(constraint)}"),
                ("took", f"mean {in_ms(found.mean_us)}, p99 {in_ms(found.p99_us)} at most{part}" if known else "-"),
                *((("clocks", clocks),) if clocks else ()),
                ("state", found.state + (f": {found.reason}" if found.reason else "")),
                *((("least limit", in_ms(found.least_limit_us)),) if found.least_limit_us else ()),
                ("violations", plural(found.violations, "window")),
                *(("own linger", each) for each in own_lingers(found.hops)),
            )
        )
    ]
    if known:
        lines += ["", "\n".join(bars(found.hops, constraint.limit_ms * 1000, by_p99=constraint.statistic == "p99"))]
    if found.hops:
        lines += ["", table(HEADING, map(_row, found.hops))]
    return "\n".join(lines)


def known_to_within(hops: Iterable[LatencyHop]) -> str:
    """Return how far clock errors of writers and readers may falsify the time of a path; empty: unknown."""
    error_us = sum(hop.clock_error_us for hop in hops)
    return f"known to within {in_ms(error_us)}, the error of hand-over times" if error_us else ""


def own_lingers(hops: Iterable[LatencyHop]) -> Iterator[str]:
    """Name the producers whose own linger_ms lets chunks fill for longer than advised."""
    for hop in hops:
        if hop.own_linger_us > hop.advised_us:
            own = f"a producer of {hop.stream} sets linger_ms {hop.own_linger_us / 1000:g} itself"
            yield f"{own}, which overrides the advice"


def of_which(constraint: LatencyConstraint) -> str:
    """Return the statistic and window of the limit, in words."""
    which = "the mean" if constraint.statistic == "mean" else "the 99th percentile"
    return f"for {which} over {format_ms(constraint.window_ms)}"


def bars(hops: Sequence[LatencyHop], limit_us: float, *, by_p99: bool, width: int | None = None) -> Iterator[str]:
    """Yield a line with the hops of each stream, one for the limit, and a legend. `width`: of a line, in characters."""
    taken = [hop.p99_us if by_p99 else hop.mean_us for hop in hops]
    names = max(len("limit"), *(len(hop.stream) for hop in hops))
    chars = BAR_CHARS if width is None else max(BAR_CHARS_MIN, min(BAR_CHARS, width - names - len("  " * 2) - 8))
    scale = chars / max(limit_us, sum(taken), 1)
    place_us = 0.0
    for stream, some in groupby(zip(hops, taken, strict=True), key=lambda pair: pair[0].stream):
        bar, begun_us = " " * round(place_us * scale), place_us
        for hop, took_us in some:
            place_us += took_us
            bar += LETTERS.get(hop.hop, "?") * (round(place_us * scale) - len(bar))
        yield f"{stream.ljust(names)}  {bar.ljust(chars)}  {in_ms(place_us - begun_us):>8}"
    end = max(1, round(limit_us * scale))
    yield f"{'limit'.ljust(names)}  {('-' * (end - 1) + '|').ljust(chars)}  {in_ms(limit_us):>8}"
    yield f"{' ' * names}  {'  '.join(f'{letter} {hop}' for hop, letter in LETTERS.items())}"


def hop_text(hop: LatencyHop, *, by_p99: bool) -> str:
    """Return a hop in few words, with its time: ``work of clicks to enrich 200 ms``."""
    reader = f" to {hop.consumer_group}" if hop.consumer_group else ""
    return f"{hop.hop} of {hop.stream}{reader} {in_ms(hop.p99_us if by_p99 else hop.mean_us)}"


def listed(found: Iterable[LatencyDescription]) -> str:
    """Return a table of constraints, a line each."""
    return table(LIST_HEADING, map(_listed, found))


def _listed(found: LatencyDescription) -> tuple[object, ...]:
    constraint = found.constraint
    took_us = found.p99_us if constraint.statistic == "p99" else found.mean_us
    return (
        constraint.name,
        found.state,
        in_ms(took_us) if took_us else "",
        in_ms(constraint.limit_ms * 1000),
        constraint.statistic,
        format_ms(constraint.window_ms),
        found.violations,
        "" if found.worst_hop is None else hop_text(found.worst_hop, by_p99=constraint.statistic == "p99"),
        ", ".join(constraint.path),
    )


def _row(hop: LatencyHop) -> tuple[object, ...]:
    known = hop.chunks > 0
    worst = f"{hop.worst_streamlet_id}: {in_ms(hop.worst_mean_us)}" if known else ""
    return (
        hop.stream,
        hop.hop,
        hop.consumer_group,
        hop.chunks if known else "",
        in_ms(hop.mean_us) if known else "",
        in_ms(hop.p99_us) if known else "",
        worst,
        in_ms(hop.allowed_us) if hop.allowed_us else "",
        in_ms(hop.advised_us) if hop.hop in FILLING and hop.allowed_us + hop.advised_us else "",
        "<- too long" if hop.violates else " ",
    )
