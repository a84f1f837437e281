"""Break the network between two kinds of hosts under load, round after round: ``make chaos-network ROUNDS=100 SEED=1``.

A coordinator, two brokers, two backups and the clients have a host each, in network namespaces of this machine, and a
switch in user space between them (`tests.network_switch`). A round breaks the links between two roles for some seconds:
they are cut, cut one way, lose 1 to 30 % of all packets, take 200 ms, or are cut while one side's daemon is killed, so
that the other one has connections to nobody. Then all links are whole again, a daemon that has ended is started as its
supervisor would, and the round is over when all goes on. Each pair and each kind comes before one comes again.

Promised, and checked by `kera check`, which is the load as well: every acknowledged record is there once, in order, and
what was read stays. And all goes on within `GOES_ON_S` of the healing; how long it takes is printed, by kind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from kera.core.base.settings import KIB, MIB
from kera.core.base.telemetry import configure_logging
from kera.local.cluster import LocalCluster
from tests.chaos.partition_clients import Clients
from tests.chaos.verdict import Wrong, leaves
from tests.namespaces import Host, why_not
from tests.network_switch import Link, Switch, hosts_on_a_switch

CLIENT, COORDINATOR, BROKER, BACKUP = "client", "coordinator", "broker", "backup"
HOSTS = {
    CLIENT: ("clients",),
    COORDINATOR: ("coordinator",),
    BROKER: ("broker-1", "broker-2"),
    BACKUP: ("backup-1", "backup-2"),
}
PAIRS = (
    (CLIENT, BROKER),
    (CLIENT, COORDINATOR),
    (BROKER, COORDINATOR),
    (BROKER, BACKUP),
    (BACKUP, COORDINATOR),
    (BROKER, BROKER),
)
CUT, TO, FROM, LOSS, DELAY, HALF_OPEN = "cut", "cut there", "cut back", "loss", "delay", "half-open"
KINDS = (CUT, TO, FROM, LOSS, DELAY, HALF_OPEN)
LOSSES = (0.01, 0.03, 0.1, 0.2, 0.3)
DELAY_S = 0.2
BROKEN_S = (1.0, 12.0)
"""So that a broker counts as dead in some rounds, and not in others."""
ALL_OF_A_ROLE = 0.3
"""How often both brokers, or both backups, are meant."""
GOES_ON_S = 60.0
ROUNDS_PER_CLUSTER = 9


@dataclass(frozen=True)
class Break:
    """What a round breaks, and for how long."""

    pair: tuple[str, str]
    kind: str
    ones: tuple[str, ...]
    """Hosts of the first role."""
    others: tuple[str, ...]
    seconds: float
    loss: float = 0.0

    @property
    def killed(self) -> tuple[str, ...]:
        """Daemons that end meanwhile: those of the second role."""
        return self.others if self.kind == HALF_OPEN else ()

    def __str__(self) -> str:
        what = f"{self.loss:.0%} {self.kind}" if self.loss else self.kind
        return f"{'+'.join(self.ones)} / {'+'.join(self.others)}: {what} for {self.seconds:.1f} s"

    def apply(self, switch: Switch, hosts: dict[str, Host]) -> None:
        """Break the links."""
        link = Link(is_cut=not self.loss and self.kind != DELAY, loss=self.loss, delay_s=DELAY_S * (self.kind == DELAY))
        for one, other in product(self.ones, self.others):
            if one == other:
                continue
            if self.kind != FROM:
                switch.set(link, hosts[one], hosts[other])
            if self.kind != TO:
                switch.set(link, hosts[other], hosts[one])


def plan(seed: int) -> Iterator[Break]:
    """Rounds without end: all pairs with all kinds, in an order that the seed decides, then in another one."""
    choices = random.Random(seed)
    while True:
        every = list(product(PAIRS, KINDS))
        choices.shuffle(every)
        for pair, kind in every:
            ones, others = (_some(HOSTS[role], choices) for role in pair)
            if pair == (BROKER, BROKER):
                ones, others = (HOSTS[BROKER][:1], HOSTS[BROKER][1:])
            loss = choices.choice(LOSSES) if kind == LOSS else 0.0
            yield Break(pair, kind, ones, others, choices.uniform(*BROKEN_S), loss)


def _some(names: tuple[str, ...], choices: random.Random) -> tuple[str, ...]:
    return names if len(names) == 1 or choices.random() < ALL_OF_A_ROLE else (choices.choice(names),)


class SpreadCluster(LocalCluster):
    """Each daemon on the host that has its name."""

    def __init__(self, data_dir: Path, hosts: dict[str, Host]) -> None:
        super().__init__(
            brokers=len(HOSTS[BROKER]),
            backups=len(HOSTS[BACKUP]),
            replication=1,
            data_dir=data_dir,
            arena_bytes=64 * MIB,
            backup_memory_bytes=64 * MIB,
            segment_bytes=256 * KIB,
        )
        self._hosts = hosts

    def _argv_of(self, name: str) -> list[str]:
        host = self._hosts[name]
        return [*host.enter, *super()._argv_of(name), "--host", host.address, "--insecure"]


class Done(NamedTuple):
    """A round that is over."""

    broken: Break
    acked_s: float
    """From the healing until every streamlet had taken a record."""
    read_s: float
    """Until all readers had what was there by then."""
    restarted: tuple[str, ...]

    def __str__(self) -> str:
        again = f"; started again: {', '.join(self.restarted)}" if self.restarted else ""
        return f"{self.broken}: producers +{self.acked_s:.2f} s, readers +{self.read_s:.2f} s{again}"


class Totals:
    """Of all rounds."""

    def __init__(self) -> None:
        self.rounds: list[Done] = []
        self.acknowledged = self.sent = 0

    def table(self) -> Iterator[str]:
        """How long it took until all went on, by pair, by kind, and in all, in Markdown."""
        by: dict[str, list[float]] = defaultdict(list)
        for done in self.rounds:
            for key in (" / ".join(done.broken.pair), done.broken.kind, "all"):
                by[key].append(done.read_s)
        yield "| broken | rounds | until all goes on, s: p50 | longest |"
        yield "|---|--:|--:|--:|"
        for key in (*(" / ".join(pair) for pair in PAIRS), *KINDS, "all"):
            if found := by.get(key):
                yield f"| {key} | {len(found)} | {statistics.median(found):.2f} | {max(found):.2f} |"


async def one_round(
    broken: Break, switch: Switch, hosts: dict[str, Host], cluster: LocalCluster, clients: Clients
) -> Done:
    """Break the network, heal it, and wait until all goes on."""
    broken.apply(switch, hosts)
    await asyncio.gather(*(cluster.kill(name) for name in broken.killed))
    await asyncio.sleep(broken.seconds)  # sleep: the break itself
    switch.heal()
    ended = tuple(name for name in hosts if name != HOSTS[CLIENT][0] and name not in cluster.processes)
    going_on = asyncio.create_task(clients.go_on(GOES_ON_S))
    await asyncio.gather(*(cluster.restart(name) for name in ended))
    acked_s, read_s = await going_on
    return Done(broken, acked_s, read_s, ended)


async def run(rounds: Sequence[Break], directory: Path, seed: int, totals: Totals) -> None:
    """These rounds, with a cluster of their own. Raises `Wrong`."""
    names = [name for each in HOSTS.values() for name in each]
    with hosts_on_a_switch(*names, seed=seed) as (switch, made):
        hosts = {host.name: host for host in made}
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(SpreadCluster(directory / "data", hosts))
            log = directory / "clients.log"
            clients = await stack.enter_async_context(
                Clients.running(hosts[HOSTS[CLIENT][0]], cluster.bootstrap, log, seed)
            )
            for broken in rounds:
                try:
                    done = await one_round(broken, switch, hosts, cluster, clients)
                except Exception as error:
                    raise Wrong(f"{broken}: {error!r}") from error
                totals.rounds.append(done)
                print(f"round {len(totals.rounds)}: {done}", flush=True)
            found = await clients.stop()
            totals.sent += found["sent"]
            totals.acknowledged += found["acknowledged"]
            if found["verdict"] != "kept":
                raise Wrong("; ".join([found["verdict"], found["impossible"] or "", *found["lines"]]))


def all_rounds(arguments: argparse.Namespace, totals: Totals) -> None:
    """All of them, with a new cluster after some. Raises `Wrong`, alone or in a group."""
    breaks = plan(arguments.seed)
    for first in range(0, arguments.rounds, ROUNDS_PER_CLUSTER):
        count = min(ROUNDS_PER_CLUSTER, arguments.rounds - first)
        some = [next(breaks) for _ in range(count)]
        with tempfile.TemporaryDirectory(prefix="kera-partitions-") as directory:
            try:
                asyncio.run(run(some, Path(directory), arguments.seed + first, totals))
            except BaseException:
                if arguments.keep:
                    Path(directory).rename(arguments.keep)
                    Path(directory).mkdir()
                raise


def main() -> int:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of what is broken, and when; printed")
    parser.add_argument("--keep", type=Path, help="where data and logs of a cluster go with which a round failed")
    arguments = parser.parse_args()
    configure_logging("error", daemon="chaos")
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 2
    print(f"{arguments.rounds} rounds, seed {arguments.seed}", flush=True)
    totals = Totals()
    failures: list[Exception] = []
    try:
        all_rounds(arguments, totals)
    except* Exception as errors:  # noqa: BLE001 - whatever it is, it is the verdict
        failures = list(leaves(errors))
    for failure in failures:
        print(f"FAILED in round {len(totals.rounds) + 1}: {failure!r}")
    print(*totals.table(), sep="\n")
    if failures:
        print(f"again: make chaos-network ROUNDS={arguments.rounds} SEED={arguments.seed}")
        return 1
    print(f"PASSED: {totals.acknowledged:,} of {totals.sent:,} records acknowledged; all are there once, in order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
