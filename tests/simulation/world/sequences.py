"""Sequences of faults that do little alone and end badly together in practice.

Random draws seldom combine them: a streamlet that returns to its former owner; a broker that is lost right after a
truncation; a broker that is lost together with one of its backups while the other backup is unreachable; and a broker
that only the coordinators cannot reach, or a coordinator that only ZooKeeper cannot reach. They are drawn separately,
so that the rest of a plan stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.world import disk_faults, people
from tests.simulation.world.aimed import SENDER

if TYPE_CHECKING:
    from tests.simulation.world.plan import Plan

CUT_OFF = "cut off"
"""A broker is cut off from the coordinators, or a coordinator from ZooKeeper, but not from the others."""
LIKELY = 0.3
"""The probability that a seed has a certain sequence, if it may."""
GAP_S = 6.0
"""The mean time between two sequences of a kind."""
LOST_S = (8.0, 12.0, 18.0)
"""Times away that are long enough to count as lost."""


class Step(NamedTuple):
    """The fields of a future fault."""

    at_s: float
    kind: str
    lasts_s: float
    targets: tuple[str, ...]
    amount: float = 0.0


def draw(plan: Plan) -> Iterator[Step]:
    """The sequences of a plan; a plan in which no broker may be lost has none."""
    random = Random(f"sequences {plan.seed}")
    if people.OLD_METADATA in plan.kinds or disk_faults.BITS in plan.kinds:
        return
    sequences: list[Callable[[Plan, Random, float], Iterator[Step]]] = [_cut_off, _truncated_and_lost]
    if plan.brokers > 1:
        sequences.append(_to_and_fro)
    if plan.replication > 1:
        sequences.append(_both_lost)
    for sequence in sequences:
        at_s = random.uniform(1.0, plan.load_s / 2) if random.random() < LIKELY else plan.load_s
        while at_s < plan.load_s:
            yield from sequence(plan, random, at_s)
            at_s += random.expovariate(1 / GAP_S)


def _cut_off(plan: Plan, random: Random, at_s: float) -> Iterator[Step]:
    deaf = plan.broker_names if plan.coordinators == 1 or random.random() < 0.6 else plan.coordinator_names
    yield Step(at_s, CUT_OFF, random.choice(LOST_S), (random.choice(deaf),))


def _truncated_and_lost(plan: Plan, random: Random, at_s: float) -> Iterator[Step]:
    where = random.randint(1, plan.streamlets) + random.choice((0.0, 0.5, 0.75))
    yield Step(at_s, people.TRUNCATE, 0.01, ("operator",), where)
    lost_s = at_s + random.choice((0.02, 0.1, 0.5, 2.0)) * (0.5 + random.random())
    yield Step(lost_s, "kill", random.choice(LOST_S), (random.choice(plan.broker_names),))


def _to_and_fro(plan: Plan, random: Random, at_s: float) -> Iterator[Step]:
    streamlet, between = random.randint(1, plan.streamlets), random.sample(plan.broker_names, 2)
    for number in range(random.randint(2, 6)):
        yield Step(at_s, people.MOVE, 0.0, (between[number % 2],), streamlet)
        at_s += random.choice((0.1, 0.5, 2.0)) * (0.5 + random.random())


def _both_lost(plan: Plan, random: Random, at_s: float) -> Iterator[Step]:
    """Cut the brokers off from one backup; then kill the next acknowledging broker, and isolate another backup."""
    lasts_s = random.choice(LOST_S)
    unreached, lost = random.sample(plan.backup_names, 2)
    for broker in plan.broker_names:
        yield Step(at_s, "cut", lasts_s, (broker, unreached))
    yield Step(at_s, "aim", lasts_s, ("records are acknowledged", "kill", SENDER, lost), 1)
