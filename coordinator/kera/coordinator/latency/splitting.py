"""How a limit is split over the hops of its path. Pure.

Every hop gets what it needs: its measured time, less the time that its buffer was allowed to wait. The rest, except for
a margin, is for buffers to fill. Writers' buffers come first, since a chunk that is not made is neither sent nor
replicated nor handed over. Time that they cannot use, because their chunks are full earlier, goes to hand-over, and the
last of it to replication, as far as brokers hold anything back.

If a path has several streams, the rest is split so that all of them together make as few chunks as possible. When N
chunks of a stream fill at a time and each may take L, N / L are made per second. Over streams whose L add up to the
rest, the sum of that is least where L is proportional to the square root of N. N is measured: by Little's law it is the
rate of chunks times the time that each one fills.

If hops take longer than the limit even without waiting, as the hops of a slow application may, buffers that do not wait
gain nothing: chunks that all go at once are more load, and may be what keeps hops slow. In that case buffers wait as if
no hop took more than an equal part of the limit. Between that case and the margin no buffer waits.

For hops without measurements half of the limit is set aside, in equal parts per hop. All times are microseconds.
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
"""Hops with a buffer that may wait; the hop where that saves most comes first."""
MARGIN = 0.1
"""Share of a limit that is not split: for the time until a deadline is noticed, and for changes within a window."""

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
    """Chunks that went through it."""
    mean_us: int
    p99_us: int
    window_ms: int
    granted_us: float = 0
    """How long its buffer was allowed to wait meanwhile; infinity: unknown, and all of its time may have been wait."""
    most_us: float = UNLIMITED
    """The wait of its buffer beyond which more would be of no use, see ``filling``."""


@dataclass
class Part:
    """A hop's part of the limit."""

    need_us: int
    grant_us: int = 0
    """Additional time for its buffer to fill."""

    @property
    def allowed_us(self) -> int:
        """The need and the grant together."""
        return self.need_us + self.grant_us


@dataclass
class Split:
    """A limit, split over hops."""

    parts: dict[Hop, Part]
    """The parts in the order of the path."""
    least_limit_us: int
    """The least limit that the hops can hold if their buffers do not wait."""
    limit_us: int
    slowest: Hop | None = field(default=None)
    """The hop that needs most."""

    @property
    def is_feasible(self) -> bool:
        """Whether the hops' needs fit into the limit."""
        return self.least_limit_us <= self.limit_us

    def granted_us(self, hop: Hop) -> int:
        """Return how long the buffer of a hop may wait."""
        part = self.parts.get(hop)
        return 0 if part is None else part.grant_us


def hops_of(stages: Iterable[tuple[str, str]]) -> list[Hop]:
    """Return the hops of a path: of streams, each with its reading consumer group, which is empty at the end."""
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
    """Split a limit over the hops of a path. `caps` returns an additional maximum for the wait of a hop's buffer.

    Guarantees, whatever was measured: needs are never negative, and if the limit is feasible, all hops together are
    allowed at most the limit less the margin. If it is not feasible, no buffer waits, unless not waiting would be of no
    help.
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
    """Share a total by weights, so that none gets more than its maximum in `most`. Weights are above 0.

    An element at its maximum leaves the rest of its share to the others. A remainder is left only if all are at their
    maximum.
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
    """Return the need of each hop.

    A stream's or reader's hops are either all unmeasured, or those without measurements take no time, such as the
    replication of a stream without replicas.
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
    """Return the square root of the number of chunks that fill at a time, at least 1.

    Below one chunk, more precision gains nothing, and noise in the measurements would decide.
    """
    if found is None or not found.window_ms:
        return 1.0
    return math.sqrt(max(1.0, found.chunks * found.mean_us / (found.window_ms * 1000)))
