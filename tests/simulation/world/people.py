"""People's actions during faults: operators move, alter, drain, truncate and restore, and clients are restarted.

Their requests may be refused or get no answer; no acknowledged record may be lost by them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from kera.client import Client
from kera.client.admin.locating import ChunkQuery
from kera.client.checking.history import History
from kera.core.base.ids import Position
from kera.core.errors import KeraError
from kera.core.runtime import Runtime
from tests.simulation.wiring import programs
from tests.simulation.world import disk_faults
from tests.simulation.world.workload import STREAM

if TYPE_CHECKING:
    from tests.simulation.engine.process import Process
    from tests.simulation.world.cluster import Cluster
    from tests.simulation.world.plan import Fault, Plan

MOVE, LEAVE, TAKE_THE_NAME, ALTER, DRAIN, OLD_METADATA, TRUNCATE = (
    "move",
    "leave",
    "take the name",
    "alter",
    "drain",
    "old metadata",
    "truncate",
)
UNHEARD = "move unheard"
"""A move after brokers' answers were cut off: producers send again to the new owner."""
KINDS = (MOVE, LEAVE, TAKE_THE_NAME, ALTER, DRAIN, OLD_METADATA, TRUNCATE)
_CALM = frozenset({"stop", "slow way", "reset", "slow disk", MOVE, LEAVE, ALTER, TRUNCATE})
"""Kinds that lose no broker."""
ONLY_WITH = {
    OLD_METADATA: _CALM | {OLD_METADATA, disk_faults.BITS},
    disk_faults.BITS: _CALM | {OLD_METADATA, disk_faults.BITS, DRAIN, TAKE_THE_NAME, "set clock"},
}
"""The kinds that may come together with these. Metadata are restored only in a healthy cluster: streams in recovery, as
during a drain, would wait for an operator, and numbers need a clock that does not go back. Bits are flipped only when
all records have several copies: an unacknowledged record of a lost broker may have a single one, and would be reported
as damaged."""
LEAVING_S = 0.5
"""The time between checks whether a leaving client has ended."""
CAUGHT_UP_S = 12.0
"""The time in which the cluster catches up after a restore of metadata."""


class Doing(NamedTuple):
    """The targets and the amount of an action."""

    targets: tuple[str, ...]
    amount: float = 0.0
    takes_time: bool = True
    """Whether it is undone later."""


def draw(plan: Plan, random: Random, kind: str) -> Doing | None:
    """An action of a kind; None when it is impossible in this plan."""
    found: Doing | None = None
    match kind:
        case "move" if plan.brokers > 1:
            streamlet = random.randrange(plan.streamlets)
            found = Doing((random.choice(plan.broker_names),), streamlet + 1, takes_time=False)
        case "leave":
            readers = [name for name in plan.client_names if not name.startswith("producer")]
            found = Doing((random.choice(readers),))
        case "take the name" if plan.named:
            found = Doing((random.choice(plan.producer_names),))
        case "alter":
            found = Doing(("operator",), random.randint(1, 4), takes_time=False)
        case "drain" if plan.brokers > 1:
            found = Doing((random.choice(plan.broker_names),))
        case "truncate":
            streamlet, share = random.randint(1, plan.streamlets), random.choice((0.0, 0.25, 0.5, 0.75))
            behind = random.sample(plan.client_names, 1)  # if it is a reader, it misses the removed records
            found = Doing(("operator", *(name for name in behind if name.startswith("reader"))), streamlet + share)
        case "old metadata" if plan.coordinators == 1:
            found = Doing(tuple(plan.coordinator_names))
    return found


def is_early(fault: Fault, before: Iterable[Fault]) -> bool:
    """Whether metadata would be restored before the cluster has caught up with the last restore."""
    last_s = max((one.at_s + one.lasts_s + CAUGHT_UP_S for one in before if one.kind == OLD_METADATA), default=0.0)
    return fault.kind == OLD_METADATA and fault.at_s < last_s


def draw_unheard(plan: Plan) -> Iterator[tuple[float, float, str, int]]:
    """Start, duration, target broker and streamlet (from 1) of each such move; drawn separately."""
    random = Random(f"unheard {plan.seed}")
    at_s = random.uniform(1.0, plan.load_s / 2)
    while plan.brokers > 1 and MOVE in plan.kinds and at_s < plan.load_s:
        lasts_s = random.choice((0.1, 0.5, 2.0)) * (0.5 + random.random())
        yield at_s, lasts_s, random.choice(plan.broker_names), random.randint(1, plan.streamlets)
        at_s += random.expovariate(1 / 8.0)


class People:
    """Begins and ends people's actions."""

    def __init__(self, cluster: Cluster, history: History) -> None:
        self._cluster = cluster
        self._history = history
        self._late: list[Process] = []
        """Producers that are paused while another one has their name."""
        self._behind: list[Process] = []
        """Readers that are paused while their next records are removed."""
        self._left: set[str] = set()
        """Members that have left the consumer group, and readers that have stopped."""
        self._drained: set[str] = set()
        self._copies: dict[Fault, bytes] = {}
        """Copies of the metadata."""

    def begin(self, fault: Fault) -> None:
        """Begin the action of a fault, if it is one."""
        cluster, name = self._cluster, fault.targets[0]
        match fault.kind:
            case "move" | "move unheard":
                self._move(name, int(fault.amount) - 1)
            case "leave" if cluster.clients[name].alive:
                cluster.clients[name].cancel()
                self._left.add(name)
            case "take the name" if cluster.clients[name].alive:
                self._late.append(cluster.clients[name])
                cluster.clients[name].pause()
                cluster.again(name)
            case "alter":
                virtual_logs = int(fault.amount)
                self._operate("alter the stream", lambda one: one.admin.alter_stream(STREAM, virtual_logs=virtual_logs))
            case "truncate":
                for reader in fault.targets[1:]:
                    self._behind.append(cluster.clients[reader])
                    cluster.clients[reader].pause()
            case "drain":
                self._drained.add(name)
                self._drain(name)
            case "old metadata":
                self._copy_metadata(fault)

    def end(self, fault: Fault) -> None:
        """Undo the action."""
        name = fault.targets[0]
        match fault.kind:
            case "leave":
                self._join(name)
            case "take the name":
                self._wake(self._late)
            case "drain":
                self._undrain(name)
            case "truncate":
                self._truncate(int(fault.amount) - 1, fault.amount % 1)
                self._wake(self._behind)
            case "old metadata" if fault in self._copies:
                self._cluster.daemons[name].put_back(self._copies.pop(fault))
                self._cluster.back(name)

    def end_all(self) -> None:
        """Undo all actions."""
        for name in sorted(self._left):
            self._join(name)
        for name in sorted(self._drained):
            self._undrain(name)
        self._wake(self._late)
        self._wake(self._behind)
        self._copies.clear()

    def go_home(self) -> None:
        """Let no client join again."""
        self._left.clear()

    def _join(self, name: str) -> None:
        if name not in self._left:
            return
        if self._cluster.clients[name].ended:
            self._left.remove(name)
            self._cluster.again(name)
        else:
            self._cluster.scheduler.after(LEAVING_S, self._join, name)

    @staticmethod
    def _wake(processes: list[Process]) -> None:
        for process in processes:
            if process.alive:
                process.resume()
        processes.clear()

    def _move(self, to: str, streamlet: int) -> None:
        ready = self._cluster.daemons[to].ready
        if ready is not None:
            broker_id = int(ready["broker_id"])
            what = f"move streamlet {streamlet} to {to}"
            self._operate(what, lambda one: one.admin.move_streamlet(STREAM, streamlet, broker_id))

    def _drain(self, name: str, *, undo: bool = False) -> None:
        ready = self._cluster.daemons[name].ready
        if ready is not None:
            broker_id = int(ready["broker_id"])
            self._operate(f"drain {name}, undo: {undo}", lambda one: one.admin.drain_broker(broker_id, undo=undo))

    def _undrain(self, name: str) -> None:
        if name in self._drained:
            self._drained.remove(name)
            self._drain(name, undo=True)

    def _truncate(self, streamlet: int, share: float) -> None:
        """Remove a share of a streamlet's records; 0: all of them."""
        removed = self._history.removed

        async def truncate(client: Client) -> None:
            to: list[Position] = []
            for entry, bounds in enumerate((await client.bounds(STREAM))[streamlet]):
                position, record = bounds.end, bounds.next_record
                records = int((record - bounds.first_record) * share)
                if share and records:
                    query = ChunkQuery(streamlet, entry, bounds.start, bounds.end, records_max=records)
                    ((position, record, *_),) = await client.locate(STREAM, [query])
                to.append(position)
                removed[streamlet, entry] = max(record, removed.get((streamlet, entry), 0))
            await client.admin.truncate_stream(STREAM, {streamlet: to})

        self._operate(f"truncate streamlet {streamlet}", truncate)

    def _copy_metadata(self, fault: Fault) -> None:
        async def copy(client: Client) -> None:
            self._copies[fault] = await client.admin.backup_metadata()

        self._operate("copy the metadata", copy)

    def _operate(self, what: str, call: Callable[[Client], Awaitable[object]]) -> None:
        """Let an operator make a request, which may be refused or get no answer."""
        cluster = self._cluster

        async def main(runtime: Runtime) -> None:
            async with programs.client_on(cluster.coordinators, runtime, retry_timeout_ms=3000) as client:
                try:
                    await call(client)
                except KeraError as error:
                    cluster.trace.note("operator", f"could not {what}: {error!r}")

        cluster.run_client("operator", main)
