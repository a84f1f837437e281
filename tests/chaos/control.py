"""Kill and freeze daemons under load, and leave the rest to the survivors: ``make chaos-control ROUNDS=20``.

The load and the verdict are those of `kera check`, for streams with one virtual log and with several. A round does one
thing to a cluster of four brokers and three backups, each in its turn: it kills a broker, a backup or the coordinator,
or two of them, or stops one with SIGSTOP for longer than it takes to count as dead; or it kills one in the middle of a
drain, which comes to its end all the same. Nobody starts the broker again before the others have taken over all it had;
then it comes back, as an empty member. With ``--zookeeper`` there are two coordinators, and it is the leader that is
killed or stopped, while streams are created.

Promised, and checked: no record fails; after each round every streamlet takes records, readers have what was there by
then, and nothing lacks a replica; and when a cluster has had its rounds, all that `kera check` looks at is as promised.
A broker that wakes too late ends by itself. Of each recovery a timeline is printed.
With the same seed it is done at the same moments, as far as a scheduler lets it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kera.cli.check._options import Options
from kera.client import DrainStatus
from kera.core.base.telemetry import configure_logging
from kera.core.errors import KeraError
from kera.local.cluster import LocalCluster
from tests.chaos.checked import LOAD_S_MAX, WITHIN_S, Load, under_check
from tests.chaos.verdict import Wrong, leaves
from tests.integration.control_support import (
    DETECTION_S,
    Timeline,
    broker_id_of,
    broker_name,
    broker_names,
    connect,
    control_cluster,
    now_us,
    recoveries_since,
    saying,
    streamlets_of,
    until_recovered,
    until_registered,
    until_replicas,
)
from tests.integration.replication_support import backup_names
from tests.integration.support import until

ROUND_TIMEOUT_S = 60.0
STREAMS = {
    # name: streamlets, entries, virtual logs
    "one-log": (3, 1, 1),
    "lanes": (4, 2, 2),
}
LIGHT_RATE, HEAVY_RATE = 100.0, 1000.0
"""Records a second, of each streamlet. The heavy load always has requests under way, so that some arrive and their
answers do not."""
FREEZE_S = 2 * DETECTION_S
CREATED = 20
"""Streams that are created while a leader is lost."""


@dataclass
class Totals:
    """What was done and checked."""

    rounds: int = 0
    records: int = 0
    timelines: list[Timeline] = field(default_factory=list)


class Chaos:
    """The rounds with one cluster."""

    def __init__(
        self,
        cluster: LocalCluster,
        moments: random.Random,
        *,
        replication: int,
        rate: float = LIGHT_RATE,
        copies: int = 1,
        streamlets: int = 0,
    ) -> None:
        """`copies`: of each of the `STREAMS`, which share the load; `rate`: records a second to each streamlet, of all
        copies together; `streamlets`: of each stream, 0: as many as `STREAMS` says.
        """
        self._rate = rate / copies
        self._copies = copies
        self._streamlets = streamlets
        self._cluster = cluster
        self._moments = moments
        self._replication = replication
        self._loads: dict[str, Load] = {}
        """By stream."""
        self._stack = contextlib.AsyncExitStack()
        self._killed_us: dict[int, int] = {}
        """When each broker was killed or stopped in this round, by its id."""
        self._had: dict[int, dict[str, list[int]]] = {}
        """The streamlets that it owned then, by stream."""
        self._created = 0

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(await connect(self._cluster))
            for copy, kind in itertools.product(range(self._copies), STREAMS):
                name, (streamlets, entries, virtual_logs) = f"{kind}-{copy}", STREAMS[kind]
                streamlets = self._streamlets or streamlets
                await self._client.admin.create_stream(
                    name,
                    streamlets=streamlets,
                    entries=entries,
                    group_segments=2,
                    replication=self._replication,
                    virtual_logs=virtual_logs,
                )
                options = Options(
                    LOAD_S_MAX,
                    stream=name,
                    streamlets=streamlets,
                    rate=self._rate * streamlets,
                    within_s=WITHIN_S,
                    seed=self._moments.getrandbits(32),
                )
                self._loads[name] = await stack.enter_async_context(under_check(self._cluster.bootstrap, options))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.__aexit__(*exc)  # type: ignore[arg-type]  # what the interpreter gives us

    @property
    def records(self) -> int:
        """That were acknowledged so far."""
        return sum(load.acknowledged for load in self._loads.values())

    # -- a round -------------------------------------------------------------------------------------------------

    async def round(self, name: str, totals: Totals) -> list[Timeline]:
        """Do one of `SCENARIOS`, and check everything; returns what recoveries there were. Raises `Wrong`."""
        begun_s, begun_us, before = time.monotonic(), now_us(), self.records
        self._killed_us, self._had = {}, {}
        await self._go_on()
        await self._moment(0.1)
        for load in self._loads.values():
            load.begin_period()
        await SCENARIOS[name].do(self)
        expected = [broker_id for broker_id, had in self._had.items() if had and broker_id in self._killed_us]
        await until_recovered(self._client, expected, begun_us, ROUND_TIMEOUT_S)
        await self._go_on()
        recovered = await until_recovered(self._client, expected, begun_us, ROUND_TIMEOUT_S)
        timelines = [
            Timeline(info, self._killed_us.get(info.broker_id, info.detected_us), self._pause_s(info.broker_id))
            for info in sorted(recovered, key=lambda info: info.detected_us)
        ]
        await self._all_back()
        await self._go_on()
        await until_replicas(self._cluster, ROUND_TIMEOUT_S)
        totals.rounds += 1
        totals.records += self.records - before
        totals.timelines += timelines
        print(
            f"round {totals.rounds}, R={self._replication}, {name}: {time.monotonic() - begun_s:.1f} s;"
            f" {self.records - before:,} records",
            flush=True,
        )
        for timeline in timelines:
            note = "" if timeline.info.broker_id in self._killed_us else " (it was alive)"
            print(f"  {timeline}{note}", flush=True)
        return timelines

    async def _go_on(self) -> None:
        """Every streamlet takes records again, and readers have them."""
        with saying(lambda: f"not all goes on within {ROUND_TIMEOUT_S:g} s"):
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                await asyncio.gather(*(load.goes_on() for load in self._loads.values()))

    async def _all_back(self) -> None:
        """Whoever does not run is started again."""
        for name in self._cluster.ready:
            if name not in self._cluster.processes:
                await self._cluster.restart(name)
        for name in broker_names(self._cluster):
            await until_registered(self._client, broker_id_of(self._cluster, name))

    def _pause_s(self, broker_id: int) -> float | None:
        """The longest time without an acknowledgement, of a streamlet that a broker had; None: it had none."""
        had = self._had.get(broker_id, {})
        return max((self._loads[stream].pause_s(streamlets) for stream, streamlets in had.items()), default=None)

    async def _moment(self, most_s: float) -> None:
        await asyncio.sleep(self._moments.random() * most_s)  # sleep: a moment is what is wanted

    # -- what is done to a cluster -------------------------------------------------------------------------------

    def _pick(self, names: Sequence[str]) -> str:
        return self._moments.choice([name for name in names if name in self._cluster.processes])

    async def _owner(self) -> str:
        """A broker that runs, and owns something."""
        owners = set()
        for stream in self._loads:
            assignments = (await self._client.admin.describe_stream(stream)).assignments
            owners |= {assignment.broker_id for assignment in assignments.values()}
        return self._pick([broker_name(self._cluster, broker_id) for broker_id in sorted(owners)])

    async def _note(self, name: str) -> None:
        """Remember what a broker has that is about to go."""
        broker_id = broker_id_of(self._cluster, name)
        self._had[broker_id] = await self._streamlets_of(name)

    async def _streamlets_of(self, name: str) -> dict[str, list[int]]:
        """What a broker owns, by stream."""
        broker_id = broker_id_of(self._cluster, name)
        owned = {stream: await streamlets_of(self._client, stream, broker_id) for stream in self._loads}
        return {stream: streamlets for stream, streamlets in owned.items() if streamlets}

    async def _kill(self, name: str, *, noted: bool = True) -> None:
        """`noted`: the coordinator can be asked what it had."""
        if name.startswith("broker"):
            if noted:
                await self._note(name)
            self._killed_us[broker_id_of(self._cluster, name)] = now_us()
        await self._cluster.kill(name)

    async def broker(self) -> None:
        """It is gone; the others take over."""
        await self._kill(await self._owner())

    async def broker_that_comes_back(self) -> None:
        """At once, with its memory: nothing needs to be recovered, and if it is, so be it."""
        name = self._pick(broker_names(self._cluster))
        await self._cluster.kill(name)
        await self._moment(DETECTION_S)
        await self._cluster.restart(name)

    async def broker_without_memory(self) -> None:
        """Its host crashed and is back: what was in memory only is on backups."""
        name = await self._owner()
        await self._kill(name)
        Path(self._cluster.ready[name]["arena_path"]).unlink()
        await self._cluster.restart(name)

    async def backup(self) -> None:
        """Its replicas are made anew elsewhere."""
        await self._kill(self._pick(backup_names(self._cluster)))
        await self._go_on()

    async def coordinator(self) -> None:
        """Nobody leads for a while, or the other one does; what is in order goes on."""
        name = await self._leader()
        if self._zookeeper:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._create_streams())
                await self._moment(0.5)
                await self._kill(name)
            return
        await self._kill(name)
        await self._moment(1.5 * DETECTION_S)
        await self._cluster.restart(name)

    async def broker_and_backup(self) -> None:
        """Each chunk is on another backup, too."""
        await self._note(broker := await self._owner())
        both = [broker, self._pick(backup_names(self._cluster))]
        self._moments.shuffle(both)
        await self._kill(both[0], noted=False)
        await self._moment(self._moments.choice((0, DETECTION_S, 2 * DETECTION_S)))
        await self._kill(both[1], noted=False)

    async def broker_and_coordinator(self) -> None:
        """Whoever leads next finds the broker gone, or its recovery half done."""
        await self._note(broker := await self._owner())
        leader = await self._leader()
        await self._kill(broker, noted=False)
        await self._moment(self._moments.choice((0, 2 * DETECTION_S)))
        await self._kill(leader)
        if not self._zookeeper:
            await self._moment(1.5 * DETECTION_S)
            await self._cluster.restart(leader)

    async def broker_and_its_new_owner(self) -> None:
        """Whoever recovers is killed, too."""
        begun_us = now_us()
        first = await self._owner()
        await self._kill(first)
        owners: set[int] = set()
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while not owners:
                for info in await recoveries_since(self._client, begun_us):
                    if info.broker_id == broker_id_of(self._cluster, first):
                        owners |= set(info.owner_ids)
                await asyncio.sleep(0.005)
        await self._moment(self._moments.choice((0, 0.1, 0.5)))
        await self._kill(self._pick([broker_name(self._cluster, owner) for owner in sorted(owners)]))

    async def two_brokers(self) -> None:
        """One after the other; the last one has everything."""
        await self._kill(await self._owner())
        await self._moment(self._moments.choice((0, DETECTION_S, 2 * DETECTION_S)))
        await self._kill(self._pick(broker_names(self._cluster)))

    async def broker_in_a_move(self) -> None:
        """The old or the new owner of a streamlet that moves is killed."""
        stream = self._moments.choice(list(self._loads))
        source = await self._owner()
        target = self._pick([name for name in broker_names(self._cluster) if name != source])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._move(stream, source, target))
            await self._moment(0.05)
            await self._kill(self._pick((source, target)))

    # -- drains --------------------------------------------------------------------------------------------------

    async def new_owner_in_a_drain(self) -> None:
        """A broker that streamlets have just moved to, before or while it takes over their older groups."""
        async with self._draining() as (source, begun_us):
            moving = await self._streamlets_of(source)
            await self._client.admin.drain_broker(source_id := broker_id_of(self._cluster, source))
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                while not (owners := await self._owners_of(moving) - {source_id}):
                    await asyncio.sleep(0.005)
            owner = self._pick([broker_name(self._cluster, owner_id) for owner_id in sorted(owners)])
            await self._note(owner)
            if self._moments.random() < 0.5:
                await self._until_owned(source_id, 1)
            else:
                await self._until_recovery_of_drain(source, begun_us)
            await self._moment(self._moments.choice((0, 0, 0.1)))
            await self._kill(owner, noted=False)

    async def broker_in_its_drain(self) -> None:
        """It is gone before it is empty: while streamlets move, or after, when others read its older groups."""
        async with self._draining() as (source, begun_us):
            broker_id = broker_id_of(self._cluster, source)
            moving = self._moments.random() < 0.5
            most = sum(map(len, (await self._streamlets_of(source)).values()))
            await self._client.admin.drain_broker(broker_id)
            if moving:
                await self._until_owned(broker_id, most - 1)
            else:
                await self._until_recovery_of_drain(source, begun_us)
                await self._moment(self._moments.choice((0, 0.1, 0.5)))
            await self._kill(source)

    async def backup_in_a_drain(self) -> None:
        """Others read a broker's older groups from it; without other replicas they wait until it is back."""
        async with self._draining() as (source, begun_us):
            await self._client.admin.drain_broker(broker_id_of(self._cluster, source))
            await self._until_recovery_of_drain(source, begun_us)
            await self._moment(self._moments.choice((0, 0.1, 0.5)))
            await self._kill(backup := self._pick(backup_names(self._cluster)))
            await self._go_on()
            await self._cluster.restart(backup)

    async def backup_in_its_drain(self) -> None:
        """Its replicas are being made anew elsewhere, by brokers that have all of it."""
        backup = self._pick(backup_names(self._cluster))
        backup_id = int(self._cluster.ready[backup]["backup_id"])
        most = (await self._client.admin.drain_backup(backup_id)).replicas
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while (await self._client.admin.drain_backup(backup_id, ask=True)).replicas >= most > 0:
                await asyncio.sleep(0.005)
        await self._kill(backup)
        await self._go_on()
        await self._client.admin.drain_backup(backup_id, undo=True)

    @contextlib.asynccontextmanager
    async def _draining(self) -> AsyncIterator[tuple[str, int]]:
        """A broker to drain, and the time; it is taken back when it is empty, or gone, and others have what it had."""
        source, begun_us = await self._owner(), now_us()
        status: DrainStatus | None = None
        broker_id = broker_id_of(self._cluster, source)
        yield source, begun_us
        with saying(lambda: f"{source} is not empty after {ROUND_TIMEOUT_S} s: {status}"):
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                while not (status := await self._client.admin.drain_broker(broker_id, ask=True)).done:
                    await asyncio.sleep(0.05)
        await self._client.admin.drain_broker(broker_id, undo=True)

    async def _until_owned(self, broker_id: int, most: int) -> None:
        """A broker that is being drained has no more streamlets left than that."""
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while (await self._client.admin.drain_broker(broker_id, ask=True)).streamlets_owned > most:
                await asyncio.sleep(0.005)

    async def _until_recovery_of_drain(self, source: str, begun_us: int) -> None:
        """Its streamlets have all moved, and what they had written there is on its way, too."""
        broker_id = broker_id_of(self._cluster, source)
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while not any(
                (info.broker_id, info.cause) == (broker_id, "drained")
                for info in await recoveries_since(self._client, begun_us)
            ):
                await asyncio.sleep(0.005)

    async def _owners_of(self, streamlets: Mapping[str, Sequence[int]]) -> set[int]:
        """Who has these streamlets of streams now."""
        owners = set()
        for stream, numbers in streamlets.items():
            assignments = (await self._client.admin.describe_stream(stream)).assignments
            owners |= {assignments[number].broker_id for number in numbers}
        return owners

    async def coordinator_in_a_move(self) -> None:
        """The next one ends it, or takes it back."""
        stream = self._moments.choice(list(self._loads))
        names = broker_names(self._cluster)
        self._moments.shuffle(names)
        leader = await self._leader()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._move(stream, names[0], names[1]))
            await self._moment(0.05)
            await self._kill(leader)
            if not self._zookeeper:
                await self._cluster.restart(leader)

    async def _move(self, stream: str, source: str, target: str) -> None:
        """Move all; what cannot be moved is what happens when brokers die."""
        for streamlet_id in await streamlets_of(self._client, stream, broker_id_of(self._cluster, source)):
            with contextlib.suppress(KeraError):
                target_id = broker_id_of(self._cluster, target)
                await self._client.admin.move_streamlet(stream, streamlet_id, target_id)

    async def frozen_broker(self) -> None:
        """It wakes when others have its streamlets, and may acknowledge nothing of what was sent to it meanwhile."""
        name = await self._owner()
        await self._note(name)
        broker_id = broker_id_of(self._cluster, name)
        begun_us = self._killed_us[broker_id] = now_us()
        await self._cluster.pause(name)
        try:
            await until_recovered(self._client, [broker_id], begun_us, ROUND_TIMEOUT_S)
        finally:
            await self._cluster.resume(name)
        try:
            await until(lambda: name not in self._cluster.processes, ROUND_TIMEOUT_S)
        except TimeoutError:
            raise Wrong(f"{name} woke after others had taken over, and did not end") from None

    async def frozen_backup(self) -> None:
        """Brokers go on without it; when it wakes, nothing that it has is taken for more than it is."""
        await self._freeze(self._pick(backup_names(self._cluster)))

    async def frozen_coordinator(self) -> None:
        """Of two, the other one leads, and the first one does not know it when it wakes."""
        name = await self._leader()
        if not self._zookeeper:
            await self._freeze(name)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._create_streams())
            await self._freeze(name)

    async def _freeze(self, name: str) -> None:
        await self._cluster.pause(name)
        try:
            await asyncio.sleep(FREEZE_S)  # sleep: what passes is the time after which others count it as dead
        finally:
            await self._cluster.resume(name)

    # -- coordinators --------------------------------------------------------------------------------------------

    @property
    def _zookeeper(self) -> bool:
        return "coordinator" not in self._cluster.ready

    async def _leader(self) -> str:
        """The coordinator that leads."""
        if not self._zookeeper:
            return "coordinator"
        address = (await self._client.admin.describe_cluster()).coordinators[0]
        return next(name for name, ready in self._cluster.ready.items() if ready.get("grpc_address") == address)

    async def _create_streams(self) -> None:
        """All that are created are there, once."""
        names = [f"created-{self._created + at}" for at in range(CREATED)]
        self._created += CREATED
        made = [await self._client.admin.create_stream(name, replication=self._replication) for name in names]
        streams = await self._client.admin.list_streams()
        found = {stream.name: stream.stream_id for stream in streams if stream.name in names}
        if found != {stream.name: stream.stream_id for stream in made} or len(set(found.values())) != CREATED:
            raise Wrong(f"created were {[(each.name, each.stream_id) for each in made]}, there are {found}")
        if len({stream.name for stream in streams}) != len(streams):
            raise Wrong("a stream is there twice")
        for name in names:
            await self._client.admin.delete_stream(name)


@dataclass(frozen=True)
class Scenario:
    """What is done in a round."""

    do: Callable[[Chaos], Awaitable[None]]
    replication_min: int = 1
    """With fewer copies it may lose something."""


SCENARIOS = {
    "broker": Scenario(Chaos.broker),
    "backup": Scenario(Chaos.backup),
    "coordinator": Scenario(Chaos.coordinator),
    "broker+backup": Scenario(Chaos.broker_and_backup, 2),
    "broker+coordinator": Scenario(Chaos.broker_and_coordinator),
    "broker+owner": Scenario(Chaos.broker_and_its_new_owner),
    "broker+broker": Scenario(Chaos.two_brokers),
    "broker-back": Scenario(Chaos.broker_that_comes_back),
    "broker-memory": Scenario(Chaos.broker_without_memory),
    "move+broker": Scenario(Chaos.broker_in_a_move),
    "move+coordinator": Scenario(Chaos.coordinator_in_a_move),
    "drain+owner": Scenario(Chaos.new_owner_in_a_drain),
    "drain+broker": Scenario(Chaos.broker_in_its_drain),
    "drain+backup": Scenario(Chaos.backup_in_a_drain),
    "drained-backup": Scenario(Chaos.backup_in_its_drain),
    "frozen-broker": Scenario(Chaos.frozen_broker),
    "frozen-backup": Scenario(Chaos.frozen_backup),
    "frozen-coordinator": Scenario(Chaos.frozen_coordinator),
}


def in_turn(names: Sequence[str], moments: random.Random) -> Iterator[str]:
    """Each, in an order of its own every time."""
    while True:
        shuffled = list(names)
        moments.shuffle(shuffled)
        yield from shuffled


async def run(arguments: argparse.Namespace, totals: Totals) -> None:
    """All rounds, a few with each cluster."""
    moments = random.Random(arguments.seed)
    turns = {
        replication: in_turn(
            [name for name in arguments.scenarios if SCENARIOS[name].replication_min <= replication], moments
        )
        for replication in arguments.replication
    }
    left, number = arguments.rounds, 0
    while left:
        replication = arguments.replication[number % len(arguments.replication)]
        number += 1
        with tempfile.TemporaryDirectory(prefix="kera-chaos-") as directory:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    cluster = await stack.enter_async_context(clusters(arguments, Path(directory)))
                    try:
                        rate = HEAVY_RATE if moments.random() < arguments.heavy else LIGHT_RATE
                        async with Chaos(
                            cluster,
                            moments,
                            replication=replication,
                            rate=rate,
                            copies=arguments.copies,
                            streamlets=arguments.streamlets,
                        ) as chaos:
                            for _ in range(min(left, arguments.rounds_per_cluster)):
                                name = next(turns[replication])
                                try:
                                    await chaos.round(name, totals)
                                except BaseException:
                                    print(f"in a round of {name}, R={replication}:", flush=True)
                                    raise
                                left -= 1
                    except BaseException:
                        tell(cluster)
                        raise
            except BaseException:
                if arguments.keep:
                    Path(directory).rename(arguments.keep)
                    Path(directory).mkdir()
                raise


@contextlib.asynccontextmanager
async def clusters(arguments: argparse.Namespace, directory: Path) -> AsyncIterator[LocalCluster]:
    """A cluster, with its own ZooKeeper if that is wanted."""
    brokers = arguments.brokers
    if not arguments.zookeeper:
        async with control_cluster(directory / "cluster", brokers=brokers) as cluster:
            yield cluster
        return
    from tests.integration.zookeeper import ZooKeeper

    with ZooKeeper(directory / "zookeeper") as server:
        async with control_cluster(
            directory / "cluster", brokers=brokers, coordinators=2, zookeeper=server.address
        ) as cluster:
            yield cluster


def tell(cluster: LocalCluster) -> None:
    """Print the last of each log."""
    for path in sorted(cluster.log_dir.glob("*.log")):
        print(f"-- {path.stem}\n{path.read_text(errors='replace')[-3000:]}")


def main() -> int:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=len(SCENARIOS))
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the moments; printed")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="what is done")
    parser.add_argument("--replication", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2])
    parser.add_argument("--brokers", type=int, default=4)
    parser.add_argument("--copies", type=int, default=1, help="of each stream, which share the load")
    parser.add_argument("--streamlets", type=int, default=0, help="of each stream; 0: 3 and 4")
    parser.add_argument("--rounds-per-cluster", type=int, default=7)
    parser.add_argument("--heavy", type=float, default=0.5, metavar="P", help="clusters under heavy load, from 0 to 1")
    parser.add_argument("--zookeeper", action="store_true", help="two coordinators, and a ZooKeeper")
    parser.add_argument("--keep", type=Path, help="where the data of a cluster goes with which a round failed")
    arguments = parser.parse_args()
    configure_logging("critical", daemon="chaos")  # that clients try again is wanted
    again = f"--seed {arguments.seed} --rounds-per-cluster {arguments.rounds_per_cluster} --heavy {arguments.heavy:g}"
    again += f" --brokers {arguments.brokers} --copies {arguments.copies} --streamlets {arguments.streamlets}"
    again += f" --replication {' '.join(map(str, arguments.replication))}{' --zookeeper' * arguments.zookeeper}"
    if arguments.scenarios != list(SCENARIOS):
        again += f" --scenarios {' '.join(arguments.scenarios)}"
    print(f"{arguments.rounds} rounds, {again}", flush=True)
    totals = Totals()
    failures: list[Exception] = []
    try:
        asyncio.run(run(arguments, totals))
    except* Exception as errors:  # noqa: BLE001 - whatever it is, it is the verdict
        failures = list(leaves(errors))
    for failure in failures:
        print(f"FAILED in round {totals.rounds + 1}: {failure!r}")
    print(f"{totals.rounds} rounds, {len(totals.timelines)} recoveries; {totals.records:,} records acknowledged")
    if failures:
        print(f"again: python -m tests.chaos.control --rounds {arguments.rounds} {again}")
        return 1
    print("PASSED: every acknowledged record is there, once, in its producer's order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
