"""One run: a cluster and its clients under the faults of a seed, until it has recovered; and its outcome."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from kera.client.checking.history import Place, Value
from kera.client.checking.verdict import EVIDENCE_MAX, violations
from kera.client.cluster.retry import PAUSES
from kera.core.errors import ProducerFenced, Uncertain
from kera.core.runtime import Runtime
from tests.simulation.engine.loop import ProcessLoop
from tests.simulation.engine.scheduler import Scheduler
from tests.simulation.engine.trace import Trace
from tests.simulation.world import disk_faults, others
from tests.simulation.world.cluster import Cluster
from tests.simulation.world.faults import Faults
from tests.simulation.world.impostors import Impostor
from tests.simulation.world.plan import Plan, draw
from tests.simulation.world.workload import GROUP, STREAM, Workload, fenced_too_late, programs_of

START_S = 30.0
"""The time in which a cluster without faults starts and creates its stream."""
CALM_S = 120.0
"""The time after the faults in which everything must be acknowledged, and read by all readers."""
END_S = 5.0
"""The time in which closed clients must leave no connection."""
HERE = Path("/proc/self/cwd")
"""The directory of a run; its name is the same in each run, because daemons exchange the names of theirs."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Outcome:
    """The outcome of a run."""

    plan: Plan
    digest: str = ""
    """The digest of the trace."""
    problems: list[str] = field(default_factory=list)
    """Broken promises; empty after a good run."""
    lines: list[str] = field(default_factory=list)
    """The lines of the trace."""
    faults: Counter[str] = field(default_factory=Counter)
    records: int = 0
    """The number of acknowledged records."""
    repeats: int = 0
    """The number of records that were sent again although they had arrived."""
    told_removed: int = 0
    """The number of times that a reader found its next records removed."""
    virtual_s: float = 0.0
    real_s: float = 0.0
    cpu_s: float = 0.0
    events: int = 0


def run(seed: int) -> Outcome:
    """Run a seed."""
    return carry_out(draw(seed))


def carry_out(plan: Plan) -> Outcome:
    """Run a plan."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="kera-simulation-", dir=SHARED_MEMORY, ignore_cleanup_errors=True) as root:
        os.chdir(root)
        try:
            with _alone(plan.seed):
                return _simulated(plan, HERE)
        finally:
            os.chdir(before)


def _simulated(plan: Plan, root: Path) -> Outcome:
    outcome = Outcome(plan)
    scheduler = Scheduler(plan.seed)
    trace = Trace(lambda: scheduler.now_s)
    for line in plan.lines():
        trace.note("PLAN", line)
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    with _logged(trace, outcome):
        _Run(Cluster(plan, scheduler, trace, root), outcome).go()
    outcome.real_s, outcome.cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    outcome.virtual_s, outcome.events = scheduler.now_s, scheduler.events
    outcome.digest, outcome.lines = trace.digest, list(trace.lines)
    return outcome


class _Run:
    def __init__(self, cluster: Cluster, outcome: Outcome) -> None:
        self._cluster = cluster
        self._outcome = outcome
        self._workload = Workload(cluster)
        self._impostor = Impostor(cluster, self._workload, STREAM) if cluster.plan.impostor else None
        self._faults = Faults(cluster, self._workload.history)

    def go(self) -> None:
        """Carry out the run."""
        cluster, outcome, scheduler = self._cluster, self._outcome, self._cluster.scheduler
        cluster.start()
        if not self._reach("the cluster has started", lambda: cluster.serves, START_S):
            return
        if not self._do("the stream was made", self._workload.create, START_S):
            return
        for name, program in programs_of(self._workload, cluster.plan).items():
            cluster.run_client(name, program)
        if self._impostor is not None:
            cluster.run_client("operator", self._impostor.main)
        self._faults.schedule(scheduler.now_s)
        scheduler.run_until(lambda: bool(cluster.defects), scheduler.now_s + cluster.plan.load_s)
        self._faults.end_all()
        self._calm()
        outcome.faults = self._faults.counts
        outcome.records = len(self._workload.history.acknowledged)
        outcome.repeats = self._workload.repeats
        outcome.told_removed = self._workload.told_removed
        outcome.problems += cluster.defects

    def _calm(self) -> None:
        history, plan = self._workload.history, self._cluster.plan
        producers = set(plan.producer_names)

        def sent() -> bool:
            busy = any(each.alive and each.name in producers for each in self._cluster.processes)
            is_over = self._impostor is None or self._impostor.is_over
            return self._workload.produced == producers and not busy and is_over

        readers = [name for name in plan.client_names if name.startswith("reader")]
        if not (
            self._reach("all daemons are back", lambda: self._cluster.serves, CALM_S)
            and self._reach("everything is acknowledged", sent, CALM_S)
            and self._do("everything was read back", self._workload.read_back, CALM_S)
        ):
            return
        ends = _ends(history.stored)
        wanted = [
            (
                "readers have everything",
                lambda: all(_reaches(_ends(history.read[name]), ends, history.removed) for name in readers),
            )
        ]
        if plan.members:
            wanted.append(
                (
                    "the consumer group has everything",
                    lambda: all(map(history.may_be_removed, history.acknowledged.keys() - history.processed[GROUP])),
                )
            )
        for what, reached in wanted:
            if not self._reach(what, reached, CALM_S):
                break
        if others.KIND in plan.kinds:
            self._do("nothing is left of other streams", self._faults.others.settle, CALM_S)
            self._outcome.problems += self._faults.others.problems
        self._do("owners alone take chunks", self._workload.taken_by_owners, CALM_S)
        if plan.replication and disk_faults.BITS not in plan.kinds:
            self._do("everything has its replicas", self._workload.replicated, CALM_S)
        self._outcome.problems += [*violations(history), *islice(fenced_too_late(history.stored), EVIDENCE_MAX)]
        self._end_clients()

    def _end_clients(self) -> None:
        plan = self._cluster.plan
        self._faults.go_home()
        names = plan.client_names
        for name in names:
            process = self._cluster.clients[name]
            # A fenced instance does not learn the fate of its last records.
            if process.error is not None and not (plan.named and isinstance(process.error, ProducerFenced | Uncertain)):
                self._outcome.problems.append(f"{name} ended with {process.error!r}")
        for process in self._cluster.processes:
            if process.name in names and process.alive:
                process.cancel()

        def gone() -> bool:
            return not any(self._cluster.machines[name].transports for name in names)

        self._reach("clients that were closed have left no connection", gone, END_S)

    def _reach(self, what: str, reached: Callable[[], bool], within_s: float) -> bool:
        cluster = self._cluster
        scheduler = cluster.scheduler
        scheduler.run_until(lambda: bool(cluster.defects) or reached(), scheduler.now_s + within_s)
        if cluster.defects:
            return False
        if not reached():
            self._outcome.problems.append(f"not within {within_s:g} s: {what}")
            cluster.trace.note("PROBLEM", f"not within {within_s:g} s: {what}")
            return False
        cluster.trace.note("WORLD", what)
        return True

    def _do(self, what: str, task: Callable[[Runtime], Any], within_s: float) -> bool:
        process = self._cluster.run_client("operator", task)
        if not self._reach(what, lambda: process.ended, within_s):
            return False
        if process.error is not None:
            self._outcome.problems.append(f"{what}: {process.error!r}")
        return process.error is None


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    """Keep outside influences away: global randomness, and the times of garbage collection."""
    before, hook = random.getstate(), sys.unraisablehook
    random.seed(seed)
    PAUSES.seed(seed)
    gc.collect()
    gc.freeze()  # so that later collections skip older objects
    gc.disable()
    try:
        yield
    finally:
        random.setstate(before)
        # Killed programs cannot end any more, and their complaints are irrelevant.
        sys.unraisablehook = lambda _: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.enable()
            while gc.collect():
                pass  # each collection may make more objects collectable
        gc.unfreeze()
        sys.unraisablehook = hook


def _ends(read: Iterable[tuple[Place, Value]]) -> dict[tuple[int, int], int]:
    """The last record, by streamlet and entry."""
    return {place[:2]: place.record for place, _ in read}


def _reaches(
    seen: Mapping[tuple[int, int], int], ends: Mapping[tuple[int, int], int], removed: Mapping[tuple[int, int], int]
) -> bool:
    return all(max(seen.get(entry, -1), removed.get(entry, 0) - 1) >= record for entry, record in ends.items())


@contextmanager
def _logged(trace: Trace, outcome: Outcome) -> Iterator[None]:
    """Put the daemons' logs into the trace; a logged exception is a problem."""

    def note(_logger: Any, level: str, event: MutableMapping[str, Any]) -> Any:
        what, error = event.pop("event"), event.pop("exc_info", None)
        for name in ("after_s", "for_s"):  # kera.core.base.repeated uses the real machine's clock
            event.pop(name, None)
        loop = asyncio._get_running_loop()
        who = loop.process_name if isinstance(loop, ProcessLoop) else "thread"
        told = " ".join(f"{name}={value}" for name, value in event.items())
        trace.note(who, f"{level}: {what} {told}{f' {error!r}' if error else ''}")
        if error:
            outcome.problems.append(f"{who} logged {what}: {error!r}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[note], wrapper_class=structlog.make_filtering_bound_logger(20), cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**before)
