"""Which streamlets should move, and why: by measured load first, then by their number. Pure.

The load of a streamlet is what is appended to it and read from it, in bytes per second. A busy broker gives to the
idlest, one streamlet at a time, and chooses the one whose move brings the two closest. It does so only while it has
`LOAD_RATIO` times the mean, of all brokers or of the two, so that noise moves nothing. The busiest goes first; if it
can give nothing, as when one streamlet is all its load, the next one is tried.

Once loads are even enough, streamlets with little load go from the broker with the most streamlets to the broker with
the fewest, while the numbers differ by two or more and the move does not make the receiver busier than the giver. A
streamlet that may not move (it moved a while ago, is being recovered, or its load is unknown) stays.

The capacity of a broker depends on its records, their chunks and their readers, and not on bytes alone: it is one event
loop. Once the loop of a broker is at work half of the time, the plan evens out how much of the time each loop is at
work, of which a streamlet takes the same share as of the bytes. Before that, by bytes, no broker gets so much that its
loop would reach that point: so the two rules never move the same streamlet to and fro.

The process ends: each move by load reduces the sum of the squares of the loads, and each move by number that of the
numbers, without increasing the former by more than what counts as no difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from kera.coordinator.ids import StreamletId

LOAD_RATIO = 1.25
"""A broker counts as too busy from this many times the mean on."""
LOAD_BYTES_PER_S_MIN = 1 << 20
"""Smaller differences count as none: moving costs more than they do."""
TARGET_SHARE_MAX = 0.95
"""Maximum load of the target after a move, as a share of the giver's: with more, the two would only swap roles."""
STREAMLET_SHARE_MIN = 0.05
"""Minimum load of a streamlet that moves, as a share of the mean load of the giver's streamlets: less has no effect."""
BUSY_PPM = 500_000
"""Share of the time (in ppm) from which on a broker's loop counts as the bottleneck."""
BUSY_PPM_MIN = 100_000
"""Smaller differences of loops count as none."""
MOVES_MAX = 64
"""Maximum of moves in one plan; the rest shows when the load has been measured again."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A streamlet with its broker and its measurements."""

    broker_id: int
    bytes_per_s: int = 0
    may_move: bool = True
    busy_ppm: int = 0
    """Share of its broker's loop time that this streamlet takes, as far as known."""


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A move, and why."""

    streamlet: StreamletId
    from_broker_id: int
    to_broker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class BrokerShare:
    """The load of a broker."""

    bytes_per_s: int
    streamlets: int
    busy_ppm: int = 0
    """Share of its loop's time."""


class Plan(NamedTuple):
    """Moves, and the shares of brokers before and after them."""

    moves: list[PlannedMove]
    before: dict[int, BrokerShare]
    after: dict[int, BrokerShare]


class _BrokerLoads:
    """The load of each broker, kept up to date as moves are planned: there may be a million streamlets."""

    def __init__(self, broker_ids: Iterable[int]) -> None:
        self.streamlets: defaultdict[int, dict[StreamletId, Placed]] = defaultdict(dict)
        self.bytes_per_s = Counter(dict.fromkeys(broker_ids, 0))
        self.busy_ppm = Counter[int]()

    def add(self, streamlet: StreamletId, one: Placed) -> None:
        self.streamlets[one.broker_id][streamlet] = one
        self.bytes_per_s[one.broker_id] += one.bytes_per_s
        self.busy_ppm[one.broker_id] += one.busy_ppm

    def move(self, move: PlannedMove) -> None:
        one = self.streamlets[move.from_broker_id].pop(move.streamlet)
        self.bytes_per_s[one.broker_id] -= one.bytes_per_s
        self.busy_ppm[one.broker_id] -= one.busy_ppm
        self.add(move.streamlet, replace(one, broker_id=move.to_broker_id, may_move=False))

    def shares(self, broker_ids: Iterable[int]) -> dict[int, BrokerShare]:
        return {
            each: BrokerShare(self.bytes_per_s[each], len(self.streamlets[each]), self.busy_ppm[each])
            for each in sorted(broker_ids)
        }


class _Measure(NamedTuple):
    """The measure that is evened out."""

    of: Callable[[BrokerShare | Placed], int]
    difference_min: int
    told: Callable[[float], str]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def _part(busy_ppm: float) -> str:
    return f"{busy_ppm / 1e4:.0f} % of a loop"


_BYTES = _Measure(attrgetter("bytes_per_s"), LOAD_BYTES_PER_S_MIN, _rate)
_LOOPS = _Measure(attrgetter("busy_ppm"), BUSY_PPM_MIN, _part)


def rebalancing(
    broker_ids: Collection[int], placed: Mapping[StreamletId, Placed], *, moves_max: int = MOVES_MAX
) -> Generator[None, None, Plan]:
    """Plan the moves that even out the load of these brokers, which live and may get streamlets.

    Yields between streamlets.
    """
    brokers = _BrokerLoads(broker_ids)
    for streamlet, one in placed.items():
        brokers.add(streamlet, one)
        yield
    before = brokers.shares(brokers.bytes_per_s)
    saturated = any(before[broker_id].busy_ppm >= BUSY_PPM for broker_id in broker_ids)
    by_load = partial(_by_load, _LOOPS if saturated else _BYTES)
    moves: list[PlannedMove] = []
    for choose in (by_load, _by_number):
        while len(moves) < moves_max and len(broker_ids) > 1:
            move = yield from choose(brokers.shares(broker_ids), brokers.streamlets)
            if move is None:
                break
            brokers.move(move)
            moves.append(move)
    return Plan(moves, before, brokers.shares(brokers.bytes_per_s))


def _by_load(
    measure: _Measure,
    share: Mapping[int, BrokerShare],
    streamlets: Mapping[int, Mapping[StreamletId, Placed]],
) -> Generator[None, None, PlannedMove | None]:
    load = {broker_id: measure.of(one) for broker_id, one in share.items()}
    idlest = min(load, key=lambda broker_id: (load[broker_id], broker_id))
    low = load[idlest]
    mean = sum(load.values()) / len(load)
    for busy in sorted(load, key=lambda broker_id: (-load[broker_id], broker_id)):
        high = load[busy]
        if high - low < measure.difference_min or high < LOAD_RATIO * min(mean, (high + low) / 2):
            return None
        # Half of the difference would make the two equal; all of it or more would only swap their roles.
        least = STREAMLET_SHARE_MIN * high / share[busy].streamlets
        most = min(high - low - 1, TARGET_SHARE_MAX * high - low)
        best: tuple[float, StreamletId] | None = None
        for streamlet, one in streamlets[busy].items():
            yield
            fits = measure is _LOOPS or share[idlest].busy_ppm + one.busy_ppm < BUSY_PPM
            if one.may_move and fits and least <= measure.of(one) <= most:
                found = abs((high - low) / 2 - measure.of(one)), streamlet
                best = found if best is None else min(best, found)
        if best is not None:
            moved = streamlets[busy][best[1]]
            return PlannedMove(
                best[1],
                busy,
                idlest,
                f"broker {busy} carries {measure.told(high)}, {high / mean:.1f} times the mean of {measure.told(mean)},"
                f" broker {idlest} carries {measure.told(low)}; this streamlet makes {measure.told(measure.of(moved))}"
                " of it",
            )
    return None


def _by_number(
    share: Mapping[int, BrokerShare], streamlets: Mapping[int, Mapping[StreamletId, Placed]]
) -> Generator[None, None, PlannedMove | None]:
    fullest = max(share, key=lambda broker_id: (share[broker_id].streamlets, -broker_id))
    emptiest = min(share, key=lambda broker_id: (share[broker_id].streamlets, broker_id))
    most, fewest = share[fullest].streamlets, share[emptiest].streamlets
    if most - fewest < 2:
        return None
    high, low = share[fullest], share[emptiest]
    best: tuple[int, StreamletId] | None = None
    for streamlet, one in streamlets[fullest].items():
        yield
        if (
            one.may_move
            and _is_light(one.bytes_per_s, high.bytes_per_s, low.bytes_per_s, LOAD_BYTES_PER_S_MIN)
            and _is_light(one.busy_ppm, high.busy_ppm, low.busy_ppm, BUSY_PPM_MIN)
        ):
            found = one.bytes_per_s, streamlet
            best = found if best is None else min(best, found)
    if best is None:
        return None
    return PlannedMove(
        best[1],
        fullest,
        emptiest,
        f"broker {fullest} has {most} streamlets, broker {emptiest} {fewest}; this one carries {_rate(best[0])}",
    )


def _is_light(load: int, high: int, low: int, difference_min: int) -> bool:
    """Whether a load makes no difference, and its receiver does not become busier than its giver."""
    return not load or (load < difference_min and low + load <= max(high - load, difference_min))


def spread(placed: Mapping[StreamletId, Placed], brokers: Mapping[int, int], count: int) -> list[PlannedMove]:
    """Return the moves that spread the streamlets of one stream evenly over `count` brokers.

    `brokers` are those that may have some, each with its number of streamlets of all streams. The brokers with most of
    this stream keep theirs; of the others, the ones with the fewest streamlets join.
    """
    mine: dict[int, list[StreamletId]] = {broker_id: [] for broker_id in brokers}
    leaving: list[StreamletId] = []
    for streamlet, one in sorted(placed.items()):
        mine.get(one.broker_id, leaving).append(streamlet)
    chosen = sorted(mine, key=lambda broker_id: (-len(mine[broker_id]), brokers[broker_id], broker_id))[:count]
    fair, extra = divmod(len(placed), len(chosen))
    room = {broker_id: fair + (index < extra) for index, broker_id in enumerate(chosen)}
    for broker_id, streamlets in mine.items():
        leaving += streamlets[room.get(broker_id, 0) :]
        room[broker_id] = max(0, room.get(broker_id, 0) - len(streamlets))
    targets = [broker_id for broker_id in chosen for _ in range(room[broker_id])]
    reason = f"the stream is spread over {count} broker{'s' if count > 1 else ''}"
    return [
        PlannedMove(streamlet, placed[streamlet].broker_id, target, reason)
        for streamlet, target in zip(sorted(leaving), targets, strict=True)
    ]
