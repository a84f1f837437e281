"""How a limit is split over the hops of its path. Pure.

Every hop gets what it needs: what it was measured to take, less what its buffer was allowed to wait. The rest, but for
a margin, is for buffers to fill: those of writers first, as a chunk that is not made is neither sent nor replicated nor
handed over; what they have no use for, as their chunks are full earlier, goes to hand-over, and at last to replication,
as far as brokers hold anything back.

Of several streams on a path the rest is split so that as few chunks as can be are made of all of them together. When N
chunks of a stream are filled at a time and each may take L, N / L are made per second; over streams whose L add up to
the rest, the sum of that is least where L is as the square root of N. N is measured: by Little's law it is the rate of
chunks times how long each is filled.

Where hops take longer than the limit by themselves, as those of an application that is too slow, nothing is gained by
buffers that do not wait: chunks that all go at once are more load, and may be what keeps hops slow. So buffers wait
then as if no hop took more than an equal part of the limit. Between that and the margin no buffer waits.

Of hops that nobody has measured yet each has an equal part of half the limit set aside. All times are microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kera.core.latency.limits import HELD_US_MAX
from kera.v1 import latency_pb2 as messages

GATHER, SEND, REPLICATE = messages.HOP_GATHER, messages.HOP_SEND, messages.HOP_REPLICATE
HAND_OVER, PREFETCH, WORK = messages.HOP_HAND_OVER, messages.HOP_PREFETCH, messages.HOP_WORK
WAY_IN, WAY_OUT = (GATHER, SEND, REPLICATE), (HAND_OVER, PREFETCH, WORK)
FILLING = (GATHER, HAND_OVER, REPLICATE)
"""Hops with a buffer that may wait, from where that saves most."""
MARGIN = 0.1
"""Share of a limit that is not split: time that passes until a deadline is noticed, and changes within a window."""

UNLIMITED = math.inf


class Hop(NamedTuple):
    """A part of the way through a stream."""

    stream: str
    hop: messages.Hop.ValueType
    group: str = ""
    """The reading consumer group, for hops from `HAND_OVER` on."""


class Measured(NamedTuple):
    """The time that a hop took over the last window with any chunks."""

    chunks: int
    """That went through it."""
    mean_us: int
    p99_us: int
    window_ms: int
    granted_us: float = 0
    """The time for which its buffer was allowed to wait meanwhile; infinity: unknown, and all of it may have been
    waiting."""
    most_us: float = UNLIMITED
    """For how long its buffer may wait at most, as more would be of no use, see ``filling``."""


@dataclass
class Part:
    """The part of the limit that a hop gets."""

    need_us: int
    grant_us: int = 0
    """For its buffer to fill, besides."""

    @property
    def allowed_us(self) -> int:
        """All together."""
        return self.need_us + self.grant_us


@dataclass
class Split:
    """A limit that was split."""

    parts: dict[Hop, Part]
    """In the order of the path."""
    least_limit_us: int
    """Which limit hops would hold whose buffers do not wait."""
    limit_us: int
    slowest: Hop | None = field(default=None)
    """The hop that needs most."""

    @property
    def is_feasible(self) -> bool:
        """Whether the hops leave anything of the limit."""
        return self.least_limit_us <= self.limit_us

    def granted_us(self, hop: Hop) -> int:
        """The time for which a buffer may wait."""
        part = self.parts.get(hop)
        return 0 if part is None else part.grant_us


def hops_of(stages: Iterable[tuple[str, str]]) -> list[Hop]:
    """The hops of a path: of streams, each with who reads it there; nobody (empty) at the end."""
    found = []
    for stream, group in stages:
        found += [Hop(stream, hop) for hop in WAY_IN]
        found += [Hop(stream, hop, group) for hop in WAY_OUT if group]
    return found


def split(
    hops: Sequence[Hop],
    limit_us: int,
    measured: Mapping[Hop, Measured],
    *,
    by_p99: bool = False,
    caps: Callable[[Hop], float] = lambda _: UNLIMITED,
) -> Split:
    """Split a limit over the hops of a path. `caps`: what else says how long the buffer of a hop may wait at most.

    Promises, however odd what was measured is: needs are never negative, and if it is feasible, what all hops are
    allowed comes to at most the limit less the margin. If it is not, no buffer waits, unless that would be of no help.
    """
    parts = _needs(hops, limit_us, measured, by_p99=by_p99)
    needs = sum(part.need_us for part in parts.values())
    means = _needs(hops, limit_us, measured, by_p99=False) if by_p99 else parts
    if min(needs, sum(part.need_us for part in means.values())) > limit_us:
        counted = sum(min(part.need_us, limit_us // len(hops)) for part in parts.values())
    else:
        counted = needs
    found = Split(
        parts,
        least_limit_us=math.ceil(needs / (1 - MARGIN)),
        limit_us=limit_us,
        slowest=max(parts, key=lambda hop: parts[hop].need_us, default=None),
    )
    rest_us = math.floor(limit_us * (1 - MARGIN)) - counted
    for filling in FILLING:
        buffers = [hop for hop in hops if hop.hop == filling]
        if rest_us <= 0 or not buffers:
            continue
        most_us = UNLIMITED if filling == GATHER else HELD_US_MAX
        most = [min(caps(hop), measured[hop].most_us if hop in measured else UNLIMITED, most_us) for hop in buffers]
        shares = shared(rest_us, [_weight(measured.get(hop)) for hop in buffers], most)
        for hop, share_us in zip(buffers, shares, strict=True):
            parts[hop].grant_us = share_us
        rest_us -= sum(shares)
    return found


def shared(total: int, weights: Sequence[float], most: Sequence[float]) -> list[int]:
    """A total that is shared by weights, of which none gets more than its most. Weights are above 0.

    What one has no room for, the others get; only where nobody has room something is left over.
    """
    shares = [0] * len(weights)
    open_, left = set(range(len(weights))), total
    while open_ and left > 0:
        weight = sum(weights[each] for each in open_)
        full = {each for each in open_ if most[each] <= left * weights[each] / weight}
        for each in full or open_:
            shares[each] = max(0, math.floor(min(most[each], left * weights[each] / weight)))
        if not full:
            break
        left -= sum(shares[each] for each in full)
        open_ -= full
    return shares


def _needs(hops: Sequence[Hop], limit_us: int, measured: Mapping[Hop, Measured], *, by_p99: bool) -> dict[Hop, Part]:
    """The need of each hop. Of the hops of a stream or a reader either none was measured, or the others take no time:

    such as replication of a stream without replicas.
    """
    ways = {(hop.stream, hop.group) for hop in hops if hop in measured}
    unknown_us = limit_us // (2 * len(hops))
    parts = {}
    for hop in hops:
        found = measured.get(hop)
        if found is not None:
            took_us = found.p99_us if by_p99 else found.mean_us
            parts[hop] = Part(took_us - math.floor(min(took_us, found.granted_us)))
        else:
            parts[hop] = Part(0 if (hop.stream, hop.group) in ways else unknown_us)
    return parts


def _weight(found: Measured | None) -> float:
    """Below one chunk at a time nothing is gained by knowing better, and what was measured before would decide."""
    if found is None or not found.window_ms:
        return 1.0
    return math.sqrt(max(1.0, found.chunks * found.mean_us / (found.window_ms * 1000)))
