"""Break the network between hosts under load, round after round: `NETWORK` and `SILENCE`.

A coordinator, two brokers, two backups and the clients have a host each, in network namespaces of this machine, and a
switch in user space between them (`tests.network_switch`). A round breaks links silently for some seconds. Then all
links are whole again, a daemon that has ended is started as its supervisor would, and the round is over when
everything goes on.

* `NETWORK` breaks the links between two roles: they are cut, cut one way, lose 1 to 30 % of all packets, take 200 ms,
  or are cut while one side's daemon is killed, so that the other side has connections to a dead peer. Each pair comes
  with each kind before a combination repeats.
* `SILENCE` cuts a host off from all others, over frames and gRPC, with a replica and without: first that of the
  clients, for each of ``--cuts`` seconds, then those of the brokers for less than it takes to count as dead. At the end
  clients vanish for good.

Promised, and checked by `kera check`, which is the load as well: every acknowledged record is there once, in order, and
records that were read stay. And everything goes on within `GOES_ON_S` of the healing, after a cut of `SILENCE` within
`SILENT_S`; these times are printed, by kind. When the host of clients is gone for good, their connections are gone from
the broker and from the coordinator within `GONE_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster
from tests.chaos.processes import Process
from tests.chaos.running import Program, Run
from tests.chaos.verdict import Wrong
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
"""Short enough in some rounds, and long enough in others, that a broker counts as dead."""
ALL_OF_A_ROLE = 0.3
"""The probability of breaking both brokers, or both backups."""
GOES_ON_S = 60.0
SILENT_S = 2.0
"""After a silent cut no daemon has to be missed, recovered or started."""
GONE_S = 60.0
ROUNDS_PER_CLUSTER = 9
VANISHING = 100
STEP_TIMEOUT_S = 60.0
VERDICT_TIMEOUT_S = 180.0
LOOK_S = 0.1


@dataclass(frozen=True)
class Break:
    """The links that a round breaks, and the duration."""

    pair: tuple[str, str]
    kind: str
    ones: tuple[str, ...]
    """Hosts of the first role."""
    others: tuple[str, ...]
    seconds: float
    loss: float = 0.0
    within_s: float = GOES_ON_S
    """Time after the healing within which everything must go on."""

    @property
    def killed(self) -> tuple[str, ...]:
        """Daemons that are killed meanwhile: those of the second role."""
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


def cut_off(role: str, seconds: float) -> Break:
    """A break that cuts all hosts of a role from all others."""
    others = tuple(name for other, names in HOSTS.items() if other != role for name in names)
    return Break((role, "all"), CUT, HOSTS[role], others, seconds, within_s=SILENT_S)


class SpreadCluster(LocalCluster):
    """A cluster with each daemon on the host of the same name."""

    def __init__(self, data_dir: Path, hosts: dict[str, Host], replication: int) -> None:
        super().__init__(
            brokers=len(HOSTS[BROKER]),
            backups=len(HOSTS[BACKUP]),
            replication=replication,
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
    """A completed round."""

    broken: Break
    acked_s: float
    """From the healing until every streamlet had taken a record."""
    read_s: float
    """From the healing until all readers had all records written by then."""
    restarted: tuple[str, ...]

    def __str__(self) -> str:
        again = f"; started again: {', '.join(self.restarted)}" if self.restarted else ""
        return f"{self.broken}: producers +{self.acked_s:.2f} s, readers +{self.read_s:.2f} s{again}"

    def check(self) -> None:
        """Check that the round did not take too long. Raises `Wrong`."""
        if max(self.acked_s, self.read_s) > self.broken.within_s:
            raise Wrong(f"{self}: that is more than {self.broken.within_s:g} s")


def table(rounds: Sequence[Done]) -> Iterator[str]:
    """The times until all went on, by pair, by kind, and in all, in Markdown."""
    by: dict[str, list[float]] = defaultdict(list)
    for done in rounds:
        for key in (" / ".join(done.broken.pair), done.broken.kind, "all"):
            by[key].append(done.read_s)
    yield "| broken | rounds | until all goes on, s: p50 | longest |"
    yield "|---|--:|--:|--:|"
    for key, found in by.items():
        yield f"| {key} | {len(found)} | {statistics.median(found):.2f} | {max(found):.2f} |"


async def one_round(
    broken: Break, switch: Switch, hosts: dict[str, Host], cluster: LocalCluster, clients: Process
) -> Done:
    """Break the network, heal it, and wait until all goes on."""
    broken.apply(switch, hosts)
    await asyncio.gather(*(cluster.kill(name) for name in broken.killed))
    await asyncio.sleep(broken.seconds)  # sleep: the break itself
    switch.heal()
    ended = tuple(name for name in hosts if name != HOSTS[CLIENT][0] and name not in cluster.processes)
    going_on = asyncio.create_task(clients.answer(GOES_ON_S, "mark"))
    await asyncio.gather(*(cluster.restart(name) for name in ended))
    told = await going_on
    return Done(broken, told["acked_s"], told["read_s"], ended)


@asynccontextmanager
async def clients_on(host: Host, bootstrap: str, log: Path, *options: object) -> AsyncIterator[Process]:
    """Producers, readers and a consumer group on a host, as `partition_client`, after a first success of each."""
    with log.open("wb") as errors:
        process = await Process.start(
            "tests.chaos.partition_client", bootstrap, *options, log=errors, before=host.enter
        )
    try:
        await process.answer(STEP_TIMEOUT_S)
        yield process
    finally:
        await process.end()


async def some_rounds(
    run: Run, rounds: Iterable[Break], seed: int, *, replication: int = 1, transport: str = "auto"
) -> list[Done]:
    """Run these rounds, with a new cluster. Raises `Wrong`."""
    found = []
    names = [name for each in HOSTS.values() for name in each]
    with run.cluster_folder() as folder, hosts_on_a_switch(*names, seed=seed) as (switch, made):
        hosts = {host.name: host for host in made}
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(SpreadCluster(folder / "data", hosts, replication))
            options = ("--seed", seed, "--replication", replication, "--transport", transport)
            clients = await stack.enter_async_context(
                clients_on(hosts[HOSTS[CLIENT][0]], cluster.bootstrap, folder / "clients.log", *options)
            )
            for broken in rounds:
                try:
                    done = await one_round(broken, switch, hosts, cluster, clients)
                except Exception as error:
                    raise Wrong(f"{broken}: {error!r}") from error
                done.check()
                found.append(done)
                run.tell(done)
            ended = await clients.answer(VERDICT_TIMEOUT_S, "stop")
            run.seen["sent"] += ended["sent"]
            run.seen["acknowledged"] += ended["acknowledged"]
            if ended["verdict"] != "kept":
                raise Wrong("; ".join([ended["verdict"], ended["impossible"] or "", *ended["lines"]]))
    return found


async def break_links(run: Run) -> None:
    """Run all rounds of `NETWORK`, with a new cluster after some."""
    breaks, found = plan(run.arguments.seed), list[Done]()
    while left := run.arguments.rounds - len(found):
        some = islice(breaks, min(ROUNDS_PER_CLUSTER, left))
        found += await some_rounds(run, some, run.arguments.seed + len(found))
    print(*table(found), sep="\n")


async def cut_silently(run: Run) -> None:
    """Run all of `SILENCE`."""
    arguments = run.arguments
    for transport, replication in product(arguments.transports.split(","), (0, 1)):
        cuts = [cut_off(CLIENT, float(seconds)) for seconds in arguments.cuts.split(",")]
        if arguments.store_cut:
            cuts.append(cut_off(BROKER, arguments.store_cut))
        print(f"over {transport}, R={replication}:")
        await some_rounds(run, cuts, arguments.seed, replication=replication, transport=transport)
    if arguments.vanish:
        await vanish(run, arguments.vanish)


def connections_from(host: Host, at: Host) -> int:
    """The number of TCP connections from one host that the kernel of another one still has."""
    command = [*at.enter, "ss", "-Htn", "state", "established", "dst", host.address]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=STEP_TIMEOUT_S)
    return len(listed.stdout.splitlines())


async def vanish(run: Run, count: int = VANISHING) -> None:
    """Cut off the host of `count` clients for good: all of their connections must end in time. Raises `Wrong`."""
    names = [name for each in HOSTS.values() for name in each]
    with run.cluster_folder() as folder, hosts_on_a_switch(*names, seed=run.arguments.seed) as (switch, made):
        hosts = {host.name: host for host in made}
        work, at = hosts[HOSTS[CLIENT][0]], [hosts["broker-1"], hosts["coordinator"]]
        async with SpreadCluster(folder / "data", hosts, 0) as cluster:
            addresses = [cluster.ready["broker-1"]["frames_address"], cluster.ready["coordinator"]["grpc_address"]]
            process = await Process.start("tests.chaos.network_vanishing", count, *addresses, before=work.enter)
            try:
                await process.answer(STEP_TIMEOUT_S)
                before = sum(connections_from(work, each) for each in at)
                if before < 2 * count:
                    raise Wrong(f"{before} connections were made, and not {2 * count}")
                cut_off(CLIENT, 0).apply(switch, hosts)
                since_s = time.monotonic()
                while left := sum(connections_from(work, each) for each in at):
                    if time.monotonic() > since_s + GONE_S:
                        raise Wrong(f"{left} of {before} connections are still there after {GONE_S:.0f} s")
                    await asyncio.sleep(LOOK_S)
                run.tell(
                    f"{before} connections of clients that vanished: gone after {time.monotonic() - since_s:.1f} s"
                )
            finally:
                await process.end()


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `SILENCE`."""
    parser.add_argument("--cuts", default="8,30,60", help="lengths of the cuts of the clients' host, in seconds")
    parser.add_argument("--store-cut", type=float, default=5.0, help="of the brokers' hosts; 0: none")
    parser.add_argument("--transports", default="tcp,grpc")
    parser.add_argument("--vanish", type=int, default=VANISHING, help="clients that vanish; 0: none")


TEXT, ONCE = __doc__ or "", "every acknowledged record is there once, in order"
NETWORK = Program(TEXT, ONCE, break_links, rounds=36, why_not=why_not)
SILENCE = Program(TEXT, ONCE, cut_silently, options=options, why_not=why_not)
