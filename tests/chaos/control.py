"""Kill, freeze and restart daemons under load, and leave the rest to the survivors: `KILL`, `CONTROL` and `RESTART`.

The load and the verdict are those of `kera check`, one for each stream. A round does one of `SCENARIOS` to a cluster,
and its `Shape` describes the cluster, its streams, and the scenarios:

* `CONTROL`: four brokers and three backups. A round kills a broker, a backup or the coordinator, or two of them, or
  stops one with SIGSTOP for longer than it takes to count as dead; or it kills one in the middle of a drain, which
  ends all the same. A killed broker is started again only after the others have taken over its streamlets; it comes
  back as an empty member. With ``--zookeeper`` there are two coordinators, and the leader is killed or stopped, while
  streams are created.
* `KILL`: one broker without replicas, which is killed and started again at once. With ``--kinds again emptied`` its
  memory is deleted in every other round, as when the host crashes; then there is no stream of durability ``leader``,
  which may lose records.
* `RESTART`: each daemon in turn is stopped with SIGTERM and started again, as an operator does. The longest time
  without an acknowledgement is measured for each producer, over all its streamlets, and compared with a time without
  a restart: it depends on the machine, and is a promise only with ``--stall-ms-max``.

Promised, and checked: no record fails; after each round every streamlet takes records, readers have all records
written by then, and all data has its replicas; and at the end of each cluster all checks of `kera check` pass. A broker
that wakes too late shuts down. A restart causes no recovery, and each broker ends with the streamlets that it had. A
timeline of each recovery is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from kera.cli.check._options import Options
from kera.client import DrainStatus
from kera.core.errors import KeraError
from kera.local.cluster import LocalCluster
from tests.chaos.checked import LOAD_S_MAX, WITHIN_S, Load, under_check
from tests.chaos.running import Program, Run, positive
from tests.chaos.verdict import Wrong
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
from tests.integration.replication_support import backup_names, samples
from tests.integration.support import until

ROUND_TIMEOUT_S = 60.0
LIGHT_RATE, HEAVY_RATE = 100.0, 1000.0
"""Records a second, of each streamlet. The heavy load always has requests in flight, so that some arrive and their
answers do not."""
FREEZE_S = 2 * DETECTION_S
CREATED = 20
"""Streams that are created while a leader is lost."""
AS_BY_DEFAULT = {"heartbeat_interval_ms": 1_000, "report_grace_ms": 1_000, "zookeeper_session_timeout_ms": 4_000}
"""Settings of coordinators in clusters where every daemon should count as alive."""


class Stream(NamedTuple):
    """A stream that is written to and read."""

    streamlets: int
    entries: int = 1
    virtual_logs: int = 1
    durability: str | None = None


@dataclass(frozen=True)
class Shape:
    """A cluster, its load, and the scenarios of its rounds."""

    streams: Mapping[str, Stream]
    kinds: tuple[str, ...]
    """The scenarios that are run by default, from `SCENARIOS`."""
    rounds: int
    rounds_per_cluster: int
    brokers: int = 4
    backups: int = 3
    replication: tuple[int, ...] = (1, 2)
    """Replication of the clusters, in turn."""
    heavy: float = 0.5
    """The share of clusters that are under heavy load."""
    clients: tuple[int, int, int] = (2, 2, 2)
    """Producers, readers, and members of a group, of each stream."""
    moment_s: float = 0.1
    """A round begins at a random moment within this time."""
    settings: Mapping[str, int] | None = None
    """Settings of the coordinators."""
    quiet_s: float = 5.0
    """Length of the quiet time that restarts are compared with."""


class Turn(NamedTuple):
    """The result of restarting one daemon."""

    name: str
    away_s: float
    """From SIGTERM until the daemon serves again."""
    back_s: float
    """From SIGTERM until all streamlets are back at their brokers."""
    stall_s: float
    """The longest time without an acknowledgement of any producer; each stream has one."""
    streamlet_stall_s: float
    """The same, of any streamlet."""

    def __str__(self) -> str:
        return (
            f"  {self.name:<14} away {self.away_s:.2f} s, all back {self.back_s:.2f} s; without acknowledgement"
            f" {1000 * self.stall_s:.0f} ms (a producer), {1000 * self.streamlet_stall_s:.0f} ms (a streamlet)"
        )


class Chaos:
    """The rounds with one cluster."""

    def __init__(
        self,
        cluster: LocalCluster,
        moments: random.Random,
        *,
        replication: int,
        shape: Shape | None = None,
        rate: float = LIGHT_RATE,
        copies: int = 1,
        streamlets: int = 0,
    ) -> None:
        """`copies`: of each stream, which share the load; `rate`: records a second to each streamlet, of all
        copies together; `streamlets`: of each stream, 0: as many as the shape says.
        """
        self._rate = rate / copies
        self._copies = copies
        self._streamlets = streamlets
        self._cluster = cluster
        self._moments = moments
        self._replication = replication
        self._shape = shape or CONTROL_SHAPE
        self._loads: dict[str, Load] = {}
        """The running loads, by stream."""
        self._stack = contextlib.AsyncExitStack()
        self._killed_us: dict[int, int] = {}
        """When each broker was killed or stopped in this round, by its id."""
        self._had: dict[int, dict[str, list[int]]] = {}
        """The streamlets that each broker owned then, by stream."""
        self._created = 0
        self.moves = 0
        """Moves of streamlets, in scenarios about moves."""
        self.turns: list[Turn] = []
        """All restarts."""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(await connect(self._cluster))
            for copy, kind in itertools.product(range(self._copies), self._shape.streams):
                name, stream = f"{kind}-{copy}", self._shape.streams[kind]
                streamlets = self._streamlets or stream.streamlets
                await self._client.admin.create_stream(
                    name,
                    streamlets=streamlets,
                    entries=stream.entries,
                    group_segments=2,
                    replication=self._replication,
                    virtual_logs=stream.virtual_logs if self._replication else 1,
                    durability=stream.durability,
                )
                producers, readers, members = self._shape.clients
                options = Options(
                    LOAD_S_MAX,
                    stream=name,
                    streamlets=streamlets,
                    producers=producers,
                    readers=readers,
                    members=members,
                    rate=self._rate * streamlets,
                    within_s=WITHIN_S,
                    seed=self._moments.getrandbits(32),
                )
                self._loads[name] = await stack.enter_async_context(under_check(self._cluster.bootstrap, options))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.__aexit__(*exc)  # type: ignore[arg-type]  # the arguments that the interpreter gives

    @property
    def records(self) -> int:
        """Records that were acknowledged so far."""
        return sum(load.acknowledged for load in self._loads.values())

    # -- a round -------------------------------------------------------------------------------------------------

    async def round(self, name: str) -> list[Timeline]:
        """Do one of `SCENARIOS`, and check everything; returns the recoveries that happened. Raises `Wrong`."""
        begun_us = now_us()
        self._killed_us, self._had = {}, {}
        await self._go_on()
        await self._moment(self._shape.moment_s)
        self._begin_period()
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
        for timeline in timelines:
            note = "" if timeline.info.broker_id in self._killed_us else " (it was alive)"
            print(f"  {timeline}{note}", flush=True)
        return timelines

    def _begin_period(self) -> None:
        """Measure pauses from now on."""
        for load in self._loads.values():
            load.begin_period()

    async def _go_on(self) -> None:
        """Wait until every streamlet takes records again, and readers receive them."""
        with saying(lambda: f"not all goes on within {ROUND_TIMEOUT_S:g} s"):
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                await asyncio.gather(*(load.goes_on() for load in self._loads.values()))

    async def _all_back(self) -> None:
        """Start every daemon again that does not run."""
        for name in self._cluster.ready:
            if name not in self._cluster.processes:
                await self._cluster.restart(name)
        for name in broker_names(self._cluster):
            await until_registered(self._client, broker_id_of(self._cluster, name))

    def _pause_s(self, broker_id: int) -> float | None:
        """The longest time without an acknowledgement of a streamlet that a broker owned; None: it owned none."""
        had = self._had.get(broker_id, {})
        return max((self._loads[stream].pause_s(streamlets) for stream, streamlets in had.items()), default=None)

    async def _moment(self, most_s: float) -> None:
        await asyncio.sleep(self._moments.random() * most_s)  # sleep: a random moment

    # -- scenarios -----------------------------------------------------------------------------------------------

    def _pick(self, names: Sequence[str]) -> str:
        return self._moments.choice([name for name in names if name in self._cluster.processes])

    async def _owner(self, *streams: str) -> str:
        """A running broker that owns a streamlet, of any stream or of these."""
        owners = set()
        for stream in streams or self._loads:
            assignments = (await self._client.admin.describe_stream(stream)).assignments
            owners |= {assignment.broker_id for assignment in assignments.values()}
        return self._pick([broker_name(self._cluster, broker_id) for broker_id in sorted(owners)])

    async def _note(self, name: str) -> None:
        """Remember the streamlets of a broker that is about to be killed."""
        broker_id = broker_id_of(self._cluster, name)
        self._had[broker_id] = await self._streamlets_of(name)

    async def _streamlets_of(self, name: str) -> dict[str, list[int]]:
        """The streamlets that a broker owns, by stream."""
        broker_id = broker_id_of(self._cluster, name)
        owned = {stream: await streamlets_of(self._client, stream, broker_id) for stream in self._loads}
        return {stream: streamlets for stream, streamlets in owned.items() if streamlets}

    async def _kill(self, name: str, *, noted: bool = True) -> None:
        """`noted`: the coordinator can be asked for the broker's streamlets."""
        if name.startswith("broker"):
            if noted:
                await self._note(name)
            self._killed_us[broker_id_of(self._cluster, name)] = now_us()
        await self._cluster.kill(name)

    async def broker(self) -> None:
        """Kill a broker; the others take over."""
        await self._kill(await self._owner())

    async def broker_that_comes_back(self) -> None:
        """Restart a broker at once, with its memory: a recovery is not needed, but allowed."""
        name = self._pick(broker_names(self._cluster))
        await self._cluster.kill(name)
        await self._moment(DETECTION_S)
        await self._cluster.restart(name)

    async def broker_without_memory(self) -> None:
        """Restart a broker without its memory, as after a crash of its host: backups have the lost data."""
        name = await self._owner()
        await self._kill(name)
        Path(self._cluster.ready[name]["arena_path"]).unlink()
        await self._cluster.restart(name)

    async def again(self) -> None:
        """Kill and restart a broker at once, with its memory and its disk."""
        await self._again(emptied=False)

    async def emptied(self) -> None:
        """Kill and restart a broker at once, with its disk only."""
        await self._again(emptied=True)

    async def _again(self, *, emptied: bool) -> None:
        name = self._pick(broker_names(self._cluster))
        await self._cluster.kill(name)
        if emptied:
            Path(self._cluster.ready[name]["arena_path"]).unlink()
        await self._cluster.restart(name)
        found = await asyncio.to_thread(samples, self._cluster, name)
        print(f"  {name} has found {found['start_segments_in_memory']:.0f} segments in memory", flush=True)

    async def backup(self) -> None:
        """Kill a backup; its replicas are restored elsewhere."""
        await self._kill(self._pick(backup_names(self._cluster)))
        await self._go_on()

    async def coordinator(self) -> None:
        """Kill the leading coordinator: no coordinator leads for a while, or the other one does; all else goes on."""
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
        """Kill a broker and a backup; another backup has each chunk, too."""
        await self._note(broker := await self._owner())
        both = [broker, self._pick(backup_names(self._cluster))]
        self._moments.shuffle(both)
        await self._kill(both[0], noted=False)
        await self._moment(self._moments.choice((0, DETECTION_S, 2 * DETECTION_S)))
        await self._kill(both[1], noted=False)

    async def broker_and_coordinator(self) -> None:
        """Kill a broker and the leader: the next leader finds the broker gone, or its recovery unfinished."""
        await self._note(broker := await self._owner())
        leader = await self._leader()
        await self._kill(broker, noted=False)
        await self._moment(self._moments.choice((0, 2 * DETECTION_S)))
        await self._kill(leader)
        if not self._zookeeper:
            await self._moment(1.5 * DETECTION_S)
            await self._cluster.restart(leader)

    async def broker_and_its_new_owner(self) -> None:
        """Kill a broker, and then a broker that recovers its streamlets."""
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
        """Kill two brokers, one after the other; the others take over everything."""
        await self._kill(await self._owner())
        await self._moment(self._moments.choice((0, DETECTION_S, 2 * DETECTION_S)))
        await self._kill(self._pick(broker_names(self._cluster)))

    async def broker_in_a_move(self) -> None:
        """Kill the old or the new owner of a moving streamlet."""
        async with self._moving() as both:
            await self._kill(self._pick(both))

    # -- drains --------------------------------------------------------------------------------------------------

    async def new_owner_in_a_drain(self) -> None:
        """Kill a broker that has just received drained streamlets, before or while it takes over their older groups."""
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
        """Kill a broker before its drain ends: while streamlets move, or later, when others read its older groups."""
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
        """Kill a backup that others read the older groups from; without other replicas they wait until it is back."""
        async with self._draining() as (source, begun_us):
            await self._client.admin.drain_broker(broker_id_of(self._cluster, source))
            await self._until_recovery_of_drain(source, begun_us)
            await self._moment(self._moments.choice((0, 0.1, 0.5)))
            await self._kill(backup := self._pick(backup_names(self._cluster)))
            await self._go_on()
            await self._cluster.restart(backup)

    async def backup_in_its_drain(self) -> None:
        """Kill a backup in its drain: brokers that have all of its data restore its replicas elsewhere."""
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
        """Give a broker to drain, and the time; undo the drain once it is empty or gone, and others have its data."""
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
        """Wait until a draining broker owns at most this many streamlets."""
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while (await self._client.admin.drain_broker(broker_id, ask=True)).streamlets_owned > most:
                await asyncio.sleep(0.005)

    async def _until_recovery_of_drain(self, source: str, begun_us: int) -> None:
        """Wait until all streamlets have left a draining broker, and others recover its older data."""
        broker_id = broker_id_of(self._cluster, source)
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while not any(
                (info.broker_id, info.cause) == (broker_id, "drained")
                for info in await recoveries_since(self._client, begun_us)
            ):
                await asyncio.sleep(0.005)

    async def _owners_of(self, streamlets: Mapping[str, Sequence[int]]) -> set[int]:
        """The brokers that own these streamlets now."""
        owners = set()
        for stream, numbers in streamlets.items():
            assignments = (await self._client.admin.describe_stream(stream)).assignments
            owners |= {assignments[number].broker_id for number in numbers}
        return owners

    async def coordinator_in_a_move(self) -> None:
        """Kill the leader during a move: the next leader completes the move, or takes it back."""
        leader = await self._leader()
        async with self._moving():
            await self._kill(leader)
            if not self._zookeeper:
                await self._cluster.restart(leader)

    @contextlib.asynccontextmanager
    async def _moving(self) -> AsyncIterator[tuple[str, str]]:
        """Move a broker's streamlets of one stream to another broker and back during the block; gives both brokers."""
        stream = self._moments.choice(list(self._loads))
        source = await self._owner(stream)
        target = self._pick([name for name in broker_names(self._cluster) if name != source])
        streamlets = await streamlets_of(self._client, stream, broker_id_of(self._cluster, source))
        moved, over = asyncio.Event(), asyncio.Event()

        async def move() -> None:
            for name, streamlet_id in itertools.cycle(itertools.product((target, source), streamlets)):
                with contextlib.suppress(KeraError):  # expected when brokers die
                    await self._client.admin.move_streamlet(stream, streamlet_id, broker_id_of(self._cluster, name))
                    self.moves += 1
                    moved.set()
                if over.is_set():
                    return
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(move())
            with saying(lambda: f"no streamlet of {source} was moved within {ROUND_TIMEOUT_S:g} s"):
                async with asyncio.timeout(ROUND_TIMEOUT_S):
                    await moved.wait()
            await self._moment(0.05)
            yield source, target
            over.set()

    async def frozen_broker(self) -> None:
        """Freeze a broker until others own its streamlets; then it must not acknowledge records sent meanwhile."""
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
        """Freeze a backup: brokers go on without it; later its outdated replicas are not taken for complete."""
        await self._freeze(self._pick(backup_names(self._cluster)), self._go_on)

    async def frozen_coordinator(self) -> None:
        """Freeze the leader; with two coordinators the other one leads, and the first wakes without knowing that."""
        name = await self._leader()
        if not self._zookeeper:
            await self._freeze(name)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._create_streams())
            await self._freeze(name)

    async def _freeze(self, name: str, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        await self._cluster.pause(name)
        try:
            await asyncio.sleep(FREEZE_S)  # sleep: until others count it as dead
            if meanwhile is not None:
                await meanwhile()
        finally:
            await self._cluster.resume(name)

    # -- planned restarts ------------------------------------------------------------------------------------------

    async def each_in_turn(self) -> None:
        """Restart every daemon once, each when all streamlets are back; measure a quiet time before."""
        before = await self._owners()
        await asyncio.sleep(self._shape.quiet_s)  # sleep: the time that is measured
        print(Turn("(none)", 0, 0, *self._pauses_s()), flush=True)
        coordinators = [name for name in self._cluster.ready if name.startswith("coordinator")]
        for name in [*backup_names(self._cluster), *broker_names(self._cluster), *coordinators]:
            self._begin_period()
            begun_s = time.monotonic()
            await self._cluster.restart(name)
            away_s = time.monotonic() - begun_s
            if name.startswith("broker"):
                await until_registered(self._client, broker_id_of(self._cluster, name))
                await self._until_owners_are(before)
            back_s = time.monotonic() - begun_s
            await self._go_on()
            self.turns.append(Turn(name, away_s, back_s, *self._pauses_s()))
            print(self.turns[-1], flush=True)
            check_no_recovery(name, await self._client.admin.recoveries())

    async def _owners(self) -> dict[str, dict[int, int]]:
        """The broker of each streamlet, by stream."""
        found = {name: await self._client.admin.describe_stream(name) for name in self._loads}
        return {
            name: {number: one.broker_id for number, one in stream.assignments.items()}
            for name, stream in found.items()
        }

    async def _until_owners_are(self, before: Mapping[str, Mapping[int, int]]) -> None:
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                while await self._owners() != before:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise Wrong(f"streamlets were at {before}, and are at {await self._owners()}") from None

    def _pauses_s(self) -> tuple[float, float]:
        """The longest time of this period without an acknowledgement: of a producer, and of a streamlet."""
        loads = self._loads.values()
        return max(load.pause_s() for load in loads), max(load.pause_s(range(load.streamlets)) for load in loads)

    def made_anew_bytes(self) -> int:
        """The number of bytes that brokers have replicated again."""
        name = "replication_bytes_repaired_total"
        return int(sum(samples(self._cluster, broker).get(name, 0) for broker in broker_names(self._cluster)))

    # -- coordinators --------------------------------------------------------------------------------------------

    @property
    def _zookeeper(self) -> bool:
        return "coordinator" not in self._cluster.ready

    async def _leader(self) -> str:
        """The leading coordinator."""
        if not self._zookeeper:
            return "coordinator"
        address = (await self._client.admin.describe_cluster()).coordinators[0]
        return next(name for name, ready in self._cluster.ready.items() if ready.get("grpc_address") == address)

    async def _create_streams(self) -> None:
        """Create streams, and check that all of them exist, once."""
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
    """The action of a round."""

    do: Callable[[Chaos], Awaitable[None]]
    replication_min: int = 1
    """With fewer copies the scenario may lose data."""


def check_no_recovery(name: str, recoveries: Sequence[object]) -> None:
    """Check that a restart caused no recovery. Raises `Wrong`."""
    if recoveries:
        raise Wrong(f"after the restart of {name}: {recoveries}")


def check_stall(turns: Sequence[Turn], stall_ms_max: float) -> None:
    """Check that no producer waited longer than this; 0: any time is allowed. Raises `Wrong`."""
    worst = max(turns, key=lambda turn: turn.stall_s)
    if stall_ms_max and worst.stall_s * 1000 > stall_ms_max:
        raise Wrong(f"{worst.name}: a producer was without an acknowledgement for {worst.stall_s:.3f} s")


SCENARIOS = {
    "broker": Scenario(Chaos.broker),
    "backup": Scenario(Chaos.backup),
    "coordinator": Scenario(Chaos.coordinator),
    "broker+backup": Scenario(Chaos.broker_and_backup, 2),
    "broker+coordinator": Scenario(Chaos.broker_and_coordinator),
    "broker+owner": Scenario(Chaos.broker_and_its_new_owner),
    "broker+broker": Scenario(Chaos.two_brokers),
    "again": Scenario(Chaos.again, 0),
    "emptied": Scenario(Chaos.emptied, 0),
    "each-in-turn": Scenario(Chaos.each_in_turn, 0),
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


CONTROL_SHAPE = Shape(
    {"one-log": Stream(3), "lanes": Stream(4, 2, 2)},
    tuple(name for name, scenario in SCENARIOS.items() if scenario.replication_min),
    rounds=18,
    rounds_per_cluster=7,
)
KILL_SHAPE = Shape(
    {"leader": Stream(2, durability="leader"), "persisted": Stream(2, durability="persisted")},
    ("again",),
    rounds=200,
    rounds_per_cluster=200,
    brokers=1,
    backups=0,
    replication=(0,),
    heavy=1.0,
    clients=(1, 1, 0),
    moment_s=0.5,
    settings=AS_BY_DEFAULT,
)
RESTART_SHAPE = Shape(
    {"one-log": Stream(12), "lanes": Stream(6, 2, 2)},
    ("each-in-turn",),
    rounds=1,
    rounds_per_cluster=1,
    brokers=3,
    replication=(1,),
    heavy=0.0,
    clients=(1, 1, 1),
    settings=AS_BY_DEFAULT,
)


def in_turn(names: Sequence[str], moments: random.Random) -> Iterator[str]:
    """All names, in a new random order each time, without end; nothing if `names` is empty."""
    while names:
        yield from moments.sample(names, len(names))


async def work(run: Run, shape: Shape) -> None:
    """Run all rounds, a few with each cluster."""
    arguments, moments = run.arguments, run.moments
    turns = {
        replication: in_turn(
            [name for name in arguments.kinds if SCENARIOS[name].replication_min <= replication], moments
        )
        for replication in arguments.replication
    }
    if "emptied" in arguments.kinds:
        kept = {name: stream for name, stream in shape.streams.items() if stream.durability != "leader"}
        shape = dataclasses.replace(shape, streams=kept)
    replications = itertools.cycle(arguments.replication)
    while left := arguments.rounds - run.seen["rounds"]:
        replication = next(replications)
        with run.cluster_folder() as folder:
            async with contextlib.AsyncExitStack() as stack:
                cluster = await stack.enter_async_context(cluster_of(arguments, folder, shape))
                chaos = await stack.enter_async_context(
                    Chaos(
                        cluster,
                        moments,
                        replication=replication,
                        shape=shape,
                        rate=HEAVY_RATE if moments.random() < arguments.heavy else LIGHT_RATE,
                        copies=arguments.copies,
                        streamlets=arguments.streamlets,
                    )
                )
                for _ in range(min(left, arguments.rounds_per_cluster)):
                    await _round(run, chaos, next(turns[replication]), replication)
                run.seen["moves"] += chaos.moves
                if chaos.turns:
                    check_stall(chaos.turns, arguments.stall_ms_max)
                    print(f"  {await asyncio.to_thread(chaos.made_anew_bytes):,} bytes were replicated again")


async def _round(run: Run, chaos: Chaos, name: str, replication: int) -> None:
    before = chaos.records
    try:
        run.seen["recoveries"] += len(await chaos.round(name))
    except BaseException:
        print(f"in a round of {name}, R={replication}:", flush=True)
        raise
    run.seen["records"] += chaos.records - before
    run.tell(f"{name}, R={replication}; {chaos.records - before:,} records")


@contextlib.asynccontextmanager
async def cluster_of(arguments: argparse.Namespace, folder: Path, shape: Shape) -> AsyncIterator[LocalCluster]:
    """A cluster of a shape, with its own ZooKeeper if wanted."""
    async with contextlib.AsyncExitStack() as stack:
        coordinators: dict[str, Any] = {}
        if arguments.zookeeper:
            from tests.integration.zookeeper import ZooKeeper

            server = stack.enter_context(ZooKeeper(folder / "zookeeper"))
            coordinators = {"coordinators": 2, "zookeeper": server.address}
        yield await stack.enter_async_context(
            control_cluster(
                folder / "cluster",
                brokers=arguments.brokers,
                backups=shape.backups,
                coordinator_settings=shape.settings,
                **coordinators,
            )
        )


def program(shape: Shape, promise: str) -> Program:
    """The program that runs the rounds of a shape."""

    def options(parser: argparse.ArgumentParser) -> None:
        choices, default = (0, 1, 2, 3), list(shape.replication)
        parser.add_argument("--replication", type=int, nargs="+", choices=choices, default=default)
        parser.add_argument("--brokers", type=positive, default=shape.brokers)
        parser.add_argument("--copies", type=positive, default=1, help="of each stream, which share the load")
        parser.add_argument("--streamlets", type=int, default=0, help="of each stream; 0: as ever")
        parser.add_argument("--rounds-per-cluster", type=positive, default=shape.rounds_per_cluster)
        parser.add_argument("--heavy", type=float, default=shape.heavy, help="clusters under heavy load, from 0 to 1")
        parser.add_argument("--stall-ms-max", type=float, default=0, help="of producers in restarts; 0: any")
        parser.add_argument("--zookeeper", action="store_true", help="two coordinators, and a ZooKeeper")

    return Program(
        __doc__ or "", promise, lambda run: work(run, shape), shape.rounds, tuple(SCENARIOS), options, shape.kinds
    )


KILL = program(KILL_SHAPE, "every acknowledged record is there, once, in order")
CONTROL = program(CONTROL_SHAPE, "every acknowledged record is there, once, in its producer's order")
RESTART = program(RESTART_SHAPE, "no recovery, every broker has its streamlets, every record is there once, in order")
