"""The plan of a seed: the cluster, its load, and the faults. It is drawn completely before the run.

Faults are drawn by swarm testing: each seed leaves some kinds out, and the others are frequent. Kills leave enough
copies, so that no loss of data is legitimate: see `Plan.may_kill_backups`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from tests.simulation.world import disk_faults, impostors, others, people, sequences
from tests.simulation.world.aimed import MOMENTS, RECEIVER, SENDER

KINDS = (
    "kill",
    "stop",
    "pause",
    "cut",
    "cut one way",
    "isolate",
    "slow way",
    "reset",
    "set clock",
    "slow disk",
    "aim",
    *disk_faults.KINDS,
    disk_faults.BITS,
    *people.KINDS,
)
"""The kinds of faults and of operators' actions."""
AIMS_FOR_EACH = 4
"""Aimed faults are as frequent as this number of other kinds together."""
BLOWS = ("kill", "kill", "pause", "isolate", "reset")
KIND_LIKELY = 0.5
"""The probability that a seed has a kind."""


class Fault(NamedTuple):
    """A fault or an operator's action."""

    at_s: float
    kind: str
    lasts_s: float
    """The time until a process is back, a cut way is open again, and so on."""
    targets: tuple[str, ...]
    """Names of machines; their meaning depends on the kind."""
    amount: float = 0.0

    def __str__(self) -> str:
        amount = f" ({self.amount:+.3f})" if self.amount else ""
        return f"{self.kind}: {', '.join(self.targets)} for {self.lasts_s:.2f} s{amount}"


@dataclass(frozen=True, slots=True)
class Plan:
    """See the head of this module."""

    seed: int
    coordinators: int
    brokers: int
    backups: int
    streamlets: int
    entries: int
    replication: int
    durability: str
    producers: int
    readers: int
    members: int
    """The members of the consumer group."""
    records: int
    """The records of each producer."""
    record_bytes: int
    burst: int
    """The records that a producer sends before it waits for their acknowledgements."""
    delay_s: float
    pieces: float
    drift: float
    """The largest relative error of clock rates."""
    load_s: float
    """The duration of the load and of the faults."""
    kinds: tuple[str, ...]
    faults: tuple[Fault, ...]
    named: bool = False
    """Whether producers have names: a killed one then has a successor, and a late one is fenced."""
    latency_target_ms: int | None = None
    """The latency target of producers; None: they send without waiting for more records."""
    impostor: bool = False
    """Whether an impostor writes under the ids of producers, which may fence them."""

    @property
    def may_kill_backups(self) -> bool:
        """A kill loses a backup's memory, so it is safe only if acknowledged records are on its disk."""
        return self.durability == "persisted"

    @property
    def mortal(self) -> list[str]:
        """Machines whose processes may be killed; not producers without names, whose sent records would be unknown."""
        names = [*self.zookeeper_names, *self.coordinator_names, *self.broker_names]
        names += [name for name in self.client_names if name.startswith("member")]
        names += self.producer_names if self.named else []
        return names + (self.backup_names if self.may_kill_backups else [])

    def lines(self) -> Iterator[str]:
        """The plan as text for people."""
        yield (
            f"seed {self.seed}: {self.coordinators} coordinators, {self.brokers} brokers, {self.backups} backups;"
            f" {self.streamlets} streamlets of {self.entries} entries, {self.replication} replicas, {self.durability};"
            f" {self.producers} producers of {self.records} records, {self.readers} readers, {self.members} members"
        )
        if self.latency_target_ms is not None:
            yield f"latency target: {self.latency_target_ms} ms"
        if self.impostor:
            yield "an impostor"
        yield f"kinds: {', '.join(self.kinds) or 'none'}"
        for fault in self.faults:
            yield f"{fault.at_s:8.3f}  {fault}"

    @property
    def coordinator_names(self) -> list[str]:
        """The names of the coordinators' machines."""
        return [f"coordinator-{number}" for number in range(1, self.coordinators + 1)]

    @property
    def zookeeper_names(self) -> list[str]:
        """The names of ZooKeeper's machines: one if there are several coordinators."""
        return ["zookeeper-1"] if self.coordinators > 1 else []

    @property
    def broker_names(self) -> list[str]:
        """Likewise."""
        return [f"broker-{number}" for number in range(1, self.brokers + 1)]

    @property
    def backup_names(self) -> list[str]:
        """Likewise."""
        return [f"backup-{number}" for number in range(1, self.backups + 1)]

    @property
    def producer_names(self) -> list[str]:
        """Likewise."""
        return [f"producer-{number}" for number in range(1, self.producers + 1)]

    @property
    def client_names(self) -> list[str]:
        """Likewise."""
        kinds = ("producer", self.producers), ("reader", self.readers), ("member", self.members)
        return [f"{kind}-{number}" for kind, count in kinds for number in range(1, count + 1)]


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(f"plan {seed}")
    replication = random.choice((0, 1, 1, 2, 2))
    kinds = tuple(kind for kind in KINDS if random.random() < KIND_LIKELY)
    for one, harmless in people.ONLY_WITH.items():
        if one in kinds:
            kinds = tuple(kind for kind in kinds if kind in harmless)
    plan = Plan(
        seed=seed,
        coordinators=random.choice((1, 1, 2, 3)),
        brokers=random.randint(1 if replication == 0 else 2, 3),
        backups=replication + random.randint(0, 1) if replication else 0,
        streamlets=random.choice((1, 2, 4, 6)),
        entries=random.choice((1, 1, 2)),
        replication=replication,
        durability=random.choice(("leader", "persisted") if replication == 0 else ("replicated", "persisted")),
        producers=random.randint(1, 3),
        readers=random.randint(1, 2),
        members=random.randint(0, 2),
        records=random.choice((20, 60, 150)),
        record_bytes=random.choice((0, 100, 1000)),
        burst=random.choice((1, 10, 100)),
        delay_s=random.choice((0.0003, 0.003, 0.02)),
        pieces=random.choice((0.0, 0.0, 0.05)),
        drift=random.choice((0.0, 0.0, 0.001, 0.02)),
        load_s=random.choice((10.0, 20.0, 40.0)),
        kinds=kinds,
        faults=(),
        named=people.OLD_METADATA not in kinds and random.random() < 0.5,
    )
    return _with_others(_with_faults(plan, random))


def _with_others(plan: Plan) -> Plan:
    """Add the kinds that are drawn separately, so that the rest of a plan stays unchanged."""
    more = [Fault(at_s, others.KIND, lasts_s, ("operator",)) for at_s, lasts_s in others.draw(plan)]
    more += [
        Fault(at_s, people.UNHEARD, lasts_s, (to,), streamlet)
        for at_s, lasts_s, to, streamlet in people.draw_unheard(plan)
    ]
    more += [Fault(*step) for step in sequences.draw(plan)]
    kinds = (*plan.kinds, *sorted({fault.kind for fault in more} - set(plan.kinds)))
    target_ms = Random(f"latency target {plan.seed}").choice((None, None, 20, 500))
    return dataclasses.replace(
        plan,
        kinds=kinds,
        faults=tuple(sorted([*plan.faults, *more])),
        latency_target_ms=target_ms,
        impostor=impostors.draws_one(plan),
    )


def _with_faults(plan: Plan, random: Random) -> Plan:
    faults: list[Fault] = []
    every_s = random.choice((0.3, 1.0, 3.0))
    at_s = 2.0 + random.expovariate(1 / every_s)
    kinds = [kind for kind in plan.kinds for _ in range(AIMS_FOR_EACH if kind == "aim" else 1)]
    while kinds and at_s < plan.load_s:
        fault = _fault(plan, random, random.choice(kinds), at_s)
        if fault is not None and not people.is_early(fault, faults):
            faults.append(fault)
        at_s += random.expovariate(1 / every_s)
    return dataclasses.replace(plan, faults=tuple(faults))


def _fault(  # noqa: PLR0911 - one for each kind
    plan: Plan, random: Random, kind: str, at_s: float
) -> Fault | None:
    """A fault of a kind; None when the cluster has no target for it."""
    servers = [*plan.zookeeper_names, *plan.coordinator_names, *plan.broker_names, *plan.backup_names]
    everyone = [*servers, *plan.client_names]
    lasts_s = random.choice((0.1, 1.0, 3.0, 12.0)) * (0.5 + random.random())
    if kind in (*disk_faults.KINDS, disk_faults.BITS):
        befallen = disk_faults.targets(plan, random, kind)
        count = random.randint(*disk_faults.AMOUNTS.get(kind, (0, 0)))
        return Fault(at_s, kind, lasts_s, befallen, count) if befallen else None
    if kind in people.KINDS:
        doing = people.draw(plan, random, kind)
        return doing and Fault(at_s, kind, lasts_s if doing.takes_time else 0.0, doing.targets, doing.amount)
    match kind:
        case "kill":
            return Fault(at_s, kind, lasts_s, (random.choice(plan.mortal),))
        case "aim":
            aim = random.choice(list(MOMENTS)), random.choice(BLOWS), random.choice((SENDER, RECEIVER))
            return Fault(at_s, kind, lasts_s, aim, random.choice((1, 1, 1, 2, 5)) * random.choice((1, 1, -1)))
        case "stop" | "pause" | "isolate" | "slow disk":
            if kind == "stop" and people.OLD_METADATA in plan.kinds:
                servers = [*plan.broker_names, *plan.backup_names]  # without a coordinator, stops would count as losses
            amount = random.choice((5.0, 50.0)) if kind == "slow disk" else 0.0
            return Fault(at_s, kind, lasts_s, (random.choice(servers),), amount)
        case "cut one way" if random.random() < 0.5:  # requests are carried out, and their answers are lost
            ends = random.choice(plan.broker_names), random.choice(plan.producer_names)
            return Fault(at_s, kind, lasts_s, ends)
        case "cut" | "cut one way":
            return Fault(at_s, kind, lasts_s, tuple(random.sample(everyone, 2)))
        case "slow way":
            return Fault(at_s, kind, lasts_s, tuple(random.sample(everyone, 2)), random.choice((0.02, 0.2, 1.0)))
        case "reset":
            return Fault(at_s, kind, 0.0, (random.choice([*plan.broker_names, *plan.client_names]),))
        case "set clock":
            return Fault(at_s, kind, 0.0, (random.choice(servers),), random.choice((-7200.0, -3.0, 3.0, 86_400.0)))
    return None
