"""Rounds of a comparison: contestants take turns, round by round, and each round is played by fresh workers.

Servers are started once for a workload and stay, idle, while others have their turn; their processor time meanwhile is
recorded (``others_cpu_s``). Before a round its streams are created again, and the last round's data in the page cache
are written, so that they do not burden others. Round 0 warms up the servers, and is not recorded.

In a round producers, and consumers beside them, begin together; their work and processor time count between two common
points in time. A backlog is written first; then consumers begin, and the round ends when they have seen all of it.

A contestant that is missing, cannot do the workload, loses records or fails otherwise is recorded with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.common import say
from bench.compare.contestant import SEVERAL_CLIENTS, Contestant, Failed, Role, Running, contestant
from bench.compare.processes import Process, cpu_s, forget_peak, memory
from bench.compare.worker import Result, Task
from bench.compare.workload import Workload
from kera.cli.bench._latency import Latencies

READY_S = 60.0
FLUSH_S = 60.0
"""The time limit for producers to get the last acknowledgements."""
CATCH_UP_S = 30.0
"""How long consumers may continue after the producers. A consumer that makes progress and has not seen everything is
only slow.
"""
STALLED_S = 5.0
"""A consumer that sees nothing for this long will not see the rest either: the rest is lost."""
LEAD_S = 0.02
"""The time from the order to begin until the measurement begins, besides the warm-up."""
FAILED_MAX = 2
"""After this many failed rounds, a contestant is not run any more."""
WARM_UP_ROUND_S = 5.0
"""Warm-up at the workload's full load, even if its rounds are shorter: a JVM takes a while to compile frequent code."""
OTHERS = "others_cpu_s"

Record = dict[str, Any]
"""The record of a round or of a contestant, for JSON; see "Fields" in bench/notes/comparison.md."""


class Stage:
    """The place where a contestant plays its rounds of a workload."""

    def __init__(self, running: Running, folder: Path) -> None:
        self._running = running
        self._folder = folder
        self._processes: list[Process] = []

    def play(self, workload: Workload, number: int, others: Sequence[int] = ()) -> Record:
        """Play round `number` while servers with the ids `others` are idle. Raises `Failed`."""
        self._running.prepare(number)
        settle()
        for pid in self.pids:
            forget_peak(pid)
        before = os.getloadavg()[0]
        try:
            return (self._backlog if workload.backlog_bytes else self._together)(workload, others) | {"load": before}
        finally:
            self._end()

    @property
    def pids(self) -> list[int]:
        """Ids of the servers' processes."""
        return list(self._running.processes().values())

    def _together(self, workload: Workload, others: Sequence[int]) -> Record:
        consumers = self._start(workload, "consume", workload.consumers)
        producers = self._start(workload, "produce", workload.producers)
        start_ns = time.monotonic_ns() + int((workload.warm_up_seconds + LEAD_S) * 1e9)
        for process in (*consumers, *producers):
            process.tell(f"go {start_ns}")
        _sleep_until(start_ns)
        before = self._cpu_s(others)
        _sleep_until(start_ns + int(workload.seconds * 1e9))
        cost = _difference(before, self._cpu_s(others))
        produced = _results(producers, FLUSH_S)
        stalled = until_seen(consumers, _acknowledged(produced), CATCH_UP_S)
        return self._record(cost, produced, _stopped(consumers), stalled=stalled) | {"produced": _counted(produced)}

    def _backlog(self, workload: Workload, others: Sequence[int]) -> Record:
        producers = self._start(workload, "produce", workload.producers)
        for process in producers:
            process.tell(f"go {time.monotonic_ns()}")
        produced = _results(producers, FLUSH_S + workload.seconds)
        self._end()
        settle()
        consumers = self._start(workload, "consume", workload.consumers)
        before = self._cpu_s(others)
        start_ns = time.monotonic_ns()
        for process in consumers:
            process.tell(f"go {start_ns}")
        stalled = until_seen(consumers, _acknowledged(produced), workload.seconds)
        cost = _difference(before, self._cpu_s(others))
        return self._record(cost, produced, _stopped(consumers), stalled=stalled) | {"produced": None, "latencies": {}}

    def _start(self, workload: Workload, role: Role, count: int) -> list[Process]:
        started = []
        for index in range(count):
            command = self._running.worker(role, index)
            task = Task(role=role, index=index, workload=workload, settings=command.settings)
            started.append(Process(task, command, self._folder / f"{role}-{index}.log"))
            self._processes.append(started[-1])
        for process in started:
            process.answer(READY_S)
        return started

    def _end(self) -> None:
        for process in self._processes:
            process.end()
        self._processes.clear()

    def _cpu_s(self, others: Sequence[int]) -> dict[str, float]:
        servers = {name: cpu_s(pid) for name, pid in self._running.processes().items()}
        workers = {process.name: cpu_s(process.pid) for process in self._processes}
        return {**servers, **workers, OTHERS: sum(map(cpu_s, others))}

    def _record(
        self, cost: dict[str, float], produced: Sequence[Result], consumed: Sequence[Result], *, stalled: bool
    ) -> Record:
        kept = {name: memory(pid) for name, pid in self._running.processes().items()}
        kept |= {process.name: memory(process.pid) for process in self._processes}
        errors = []
        for role, results in (("producer", produced), ("consumer", consumed)):
            for index, result in enumerate(results):
                name = f"{role}-{index}"
                errors += [
                    f"{name}: {error}" + (f" ({times} times)" if times > 1 else "")
                    for error, times in Counter(result.errors).items()
                ]
                known = kept.setdefault(name, {"peak": 0, "shared": 0})
                known["peak"] = max(known["peak"], result.peak_rss_bytes)
                if result.cpu_s is not None:
                    cost[name] = result.cpu_s
        return {
            "servers": list(self._running.processes()),
            "consumed": _counted(consumed),
            "behind": _acknowledged(produced) - sum(each.seen for each in consumed) if consumed else 0,
            "latencies": _merged([*produced, *consumed]),
            OTHERS: cost.pop(OTHERS),
            "cpu_s": cost,
            "memory": kept,
            "errors": errors + losses(produced, consumed, stalled=stalled),
        }


def losses(produced: Sequence[Result], consumed: Sequence[Result], *, stalled: bool) -> list[str]:
    """Lost records, in words. Slow consumers have lost nothing."""
    found = []
    sent, acknowledged = sum(result.sent for result in produced), _acknowledged(produced)
    seen = sum(result.seen for result in consumed)
    if acknowledged != sent:
        found.append(f"{sent} records were sent, and {acknowledged} acknowledged")
    if consumed and seen > acknowledged:
        found.append(f"{seen - acknowledged} records were seen more than once")
    if consumed and seen < acknowledged and stalled:
        found.append(f"{acknowledged - seen} of {acknowledged} records were never seen")
    return found


def _acknowledged(produced: Sequence[Result]) -> int:
    return sum(result.acknowledged for result in produced)


def until_seen(consumers: Sequence[Process], total: int, wait_s: float) -> bool:
    """Wait until consumers have seen everything, or their time is over; returns whether they make no more progress."""
    moved_s = time.monotonic()
    end_s, last = moved_s + wait_s, -1
    while consumers and (seen := sum(process.seen for process in consumers)) < total:
        now_s = time.monotonic()
        if seen > last:
            moved_s, last = now_s, seen
        if now_s > moved_s + STALLED_S:
            return True
        if now_s > end_s:
            break
        time.sleep(0.005)
    return False


def _stopped(consumers: Sequence[Process]) -> list[Result]:
    for process in consumers:
        process.tell("stop")
    return _results(consumers, READY_S)


def _results(processes: Sequence[Process], timeout_s: float) -> list[Result]:
    end_s = time.monotonic() + timeout_s
    return [Result(**process.answer(end_s - time.monotonic())) for process in processes]


def _counted(results: Sequence[Result]) -> dict[str, float] | None:
    if not results:
        return None
    seconds = (max(each.end_ns for each in results) - min(each.start_ns for each in results)) / 1e9
    return {"records": sum(each.records for each in results), "bytes": sum(each.bytes for each in results)} | {
        "seconds": seconds
    }


def _merged(results: Sequence[Result]) -> dict[str, str]:
    merged: dict[str, Latencies] = {}
    for result in results:
        for name, text in result.latencies.items():
            merged.setdefault(name, Latencies()).add_encoded(text)
    return {name: each.encode() for name, each in merged.items()}


def _difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after if name in before}


def _sleep_until(due_ns: int) -> None:
    time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)


def settle() -> None:
    """Write the content of the page cache now: it belongs to the round before."""
    os.sync()


# -- all rounds of a workload ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Entrant:
    """A contestant in a workload, and its record."""

    name: str
    record: Record
    contestant: Contestant | None = None
    stage: Stage | None = None
    """None: it takes no part, or no further part."""
    failed: int = 0

    def leave(self, reason: str) -> None:
        """Take no further part."""
        say(f"  {self.name}: {reason}")
        self.record["reason"] = reason
        self.stage = None


def run_workload(workload: Workload, names: Sequence[str], rounds: int, folder: Path) -> Record:
    """Run all rounds of all contestants; returns their record. Their files are below `folder`."""
    entrants = [_entrant(name, workload) for name in names]
    with contextlib.ExitStack() as stack:
        for entrant in entrants:
            _start_servers(entrant, workload, folder / workload.name / entrant.name, stack)
        for number in range(rounds + 1):
            turn = number % len(entrants)  # so that no contestant always follows the same one
            for entrant in entrants[turn:] + entrants[:turn]:
                if entrant.stage is not None:
                    others = [pid for each in entrants if each.stage and each is not entrant for pid in each.stage.pids]
                    _play(entrant, entrant.stage, workload, number, others)
    return {"workload": workload.model_dump(mode="json"), "contestants": {each.name: each.record for each in entrants}}


def _entrant(name: str, workload: Workload) -> Entrant:
    entrant = Entrant(name, {"title": name, "versions": {}, "durability": "", "reason": None, "rounds": []})
    try:
        made = contestant(name)
        entrant.record["title"] = made.title
        one_only = "its worker is one client" if workload.clients > 1 and name not in SEVERAL_CLIENTS else None
        reason = one_only or made.missing() or made.supports(workload)
        if reason is None:
            known = {"title": made.title, "versions": made.versions(), "durability": made.durability(workload)}
            entrant.record |= known
            entrant.contestant = made
    except Exception as error:  # noqa: BLE001 - whatever happens to one contestant, the others continue
        reason = _told(error)
    if reason is not None:
        entrant.leave(reason)
    return entrant


def _start_servers(entrant: Entrant, workload: Workload, folder: Path, stack: contextlib.ExitStack) -> None:
    if entrant.contestant is None:
        return
    say(f"  starting {entrant.record['title']}")
    folder.mkdir(parents=True)
    servers = entrant.contestant.start(workload, folder)
    try:
        running = servers.__enter__()
    except Exception as error:  # noqa: BLE001 - whatever happens to one contestant, the others continue
        entrant.leave(f"it could not be started: {_told(error)}")
        return
    stack.callback(_stop_servers, entrant, servers)
    entrant.stage = Stage(running, folder)


def _stop_servers(entrant: Entrant, servers: AbstractContextManager[Running]) -> None:
    try:
        servers.__exit__(None, None, None)
    except Exception as error:  # noqa: BLE001 - its rounds are played, and other servers have to stop, too
        say(f"  {entrant.name} did not stop as it should: {_told(error)}")


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"


def _play(entrant: Entrant, stage: Stage, workload: Workload, number: int, others: Sequence[int]) -> None:
    if number == 0:
        workload = workload.model_copy(update={"seconds": WARM_UP_ROUND_S, "warm_up_seconds": 0.0})
    try:
        played = stage.play(workload, number, others)
    except Exception as error:  # noqa: BLE001 - whatever happens to one contestant, the others continue
        played = {"errors": [_told(error)]}
    errors = played["errors"]
    say(f"  round {number}: {entrant.name}: {'; '.join(errors) if errors else _brief(played)}")
    if errors:
        entrant.failed += 1
        if entrant.failed == FAILED_MAX:
            entrant.leave(f"{FAILED_MAX} rounds failed, the last one with: {'; '.join(errors)}")
    if number:
        entrant.record["rounds"].append({"number": number, **played})


def _brief(played: Record) -> str:
    words = [
        f"{name} {counted['bytes'] / counted['seconds'] / 1e6:,.1f} MB/s"
        for name in ("produced", "consumed")
        if (counted := played[name])
    ]
    for name, text in played["latencies"].items():
        found = Latencies()
        found.add_encoded(text)
        words.append(f"{name} p50 {found.ms(50):.3f}, p99 {found.ms(99):.3f} ms")
    return "; ".join(words)
