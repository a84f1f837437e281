"""Figures from recorded results: the report and the plots show them for a contestant's rounds. Pure.

A `Spread` is a median with the least and the most of the rounds. Failed rounds have no figures, and are reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kera.cli.bench._latency import Latencies

BASE = "kera"
"""Others are compared with it, if it took part; otherwise with the first."""
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)
MB, GB = 1e6, 1e9


@dataclass(frozen=True)
class Spread:
    """The figures of some rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """The least of all rounds."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The most of all rounds."""
        return max(self.values)

    def over(self, other: Spread) -> tuple[float, float, float] | None:
        """The ratio of the medians, with the extreme ratios of any two rounds; None without a ratio."""
        if min(other.values) <= 0:
            return None
        return self.median / other.median, self.least / other.most, self.most / other.least


class Entry:
    """One contestant in one workload."""

    def __init__(self, name: str, record: dict[str, Any], workload: dict[str, Any]) -> None:
        self.name = name
        self.title: str = record["title"]
        self.versions: dict[str, str] = record["versions"]
        self.durability: str = record["durability"]
        self.reason: str | None = record["reason"]
        """The reason why it took no part, or no further part."""
        self.workload = workload
        self.rounds: list[dict[str, Any]] = [each for each in record["rounds"] if not each["errors"]]
        self.failures: list[str] = [
            f"round {each['number']}: {error}" for each in record["rounds"] for error in each["errors"]
        ]

    def __bool__(self) -> bool:
        return bool(self.rounds)

    def spread(self, of: Callable[[dict[str, Any]], float | None]) -> Spread | None:
        """The spread of `of` over the rounds; None if it finds nothing."""
        values = tuple(value for each in self.rounds if (value := of(each)) is not None)
        return Spread(values) if values else None

    def mb_per_s(self, side: str) -> Spread | None:
        """10⁶ bytes of values per second, ``produced`` or ``consumed``."""
        return self.spread(lambda played: _per_s(played[side], "bytes", MB))

    def m_records_per_s(self, side: str) -> Spread | None:
        """10⁶ records per second."""
        return self.spread(lambda played: _per_s(played[side], "records", 1e6))

    def histogram(self, name: str) -> Latencies | None:
        """The histogram of all rounds together."""
        found = Latencies()
        for played in self.rounds:
            if name in played["latencies"]:
                found.add_encoded(played["latencies"][name])
        return found if found.count else None

    def latency_ms(self, name: str, percentile: float) -> Spread | None:
        """A percentile of each round."""

        def of(played: dict[str, Any]) -> float | None:
            if name not in played["latencies"]:
                return None
            found = Latencies()
            found.add_encoded(played["latencies"][name])
            return found.ms(percentile)

        return self.spread(of)

    @property
    def processes(self) -> list[str]:
        """Servers first, then all producers as one, then all consumers."""
        if not self.rounds:
            return []
        servers = list(self.rounds[-1]["servers"])
        workers = {_role(name) for each in self.rounds for name in each["memory"] if name not in servers}
        return [*servers, *sorted(workers, reverse=True)]  # producers, consumers

    def cpu(self, process: str) -> Spread | None:
        """Processor seconds per GB of values that have gone all the way; at a fixed rate, per second: a part of a core.

        None if the process took part only before the measurement.
        """

        def of(played: dict[str, Any]) -> float | None:
            counted = played["produced"] or played["consumed"]
            used = [value for name, value in played["cpu_s"].items() if process in {name, _role(name)}]
            through = counted["seconds"] if self.workload["rate"] else counted["bytes"] / GB
            return sum(used) / through if used and through else None

        return self.spread(of)

    def memory_bytes(self, process: str) -> Spread | None:
        """The peak in RAM; the workers of a role count together."""
        return self._memory(process, "peak")

    def shared_bytes(self, process: str) -> Spread | None:
        """Shared memory of a process, at the end."""
        return self._memory(process, "shared")

    def _memory(self, process: str, what: str) -> Spread | None:
        def of(played: dict[str, Any]) -> float:
            return float(sum(each[what] for name, each in played["memory"].items() if process in {name, _role(name)}))

        return self.spread(of)

    def total(self, of: Callable[[str], Spread | None], processes: Iterable[str]) -> float | None:
        """The sum of medians."""
        found = [spread.median for process in processes if (spread := of(process)) is not None]
        return sum(found) if found else None

    @property
    def servers(self) -> list[str]:
        """Processes that are not workers."""
        return [name for name in self.processes if name not in {"producers", "consumers"}]

    @property
    def clients(self) -> list[str]:
        """The worker processes."""
        return [name for name in self.processes if name in {"producers", "consumers"}]


def short(value: float) -> str:
    """Three digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def entries(recorded: dict[str, Any]) -> list[Entry]:
    """The entries of a workload's record; the entry that the others are compared with comes first."""
    made = [Entry(name, record, recorded["workload"]) for name, record in recorded["contestants"].items()]
    return sorted(made, key=lambda entry: entry.name != BASE)


def kind_of(workload: dict[str, Any]) -> str:
    """As `bench.compare.workload.Workload.kind`."""
    if workload["backlog_bytes"]:
        return "backlog"
    return "latency" if workload["rate"] else "throughput"


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge several recorded results. Rounds of the same contestant in the same workload are put together."""
    if len(results) == 1:
        return results[0]
    workloads: dict[str, dict[str, Any]] = {}
    for result in results:
        for recorded in result["workloads"]:
            name = recorded["workload"]["name"]
            known = workloads.setdefault(name, {"workload": recorded["workload"], "contestants": {}})
            if known["workload"] != recorded["workload"]:
                raise ValueError(f"the results have different workloads of the name {name}")
            for contestant, record in recorded["contestants"].items():
                known["contestants"][contestant] = _together(known["contestants"].get(contestant), record)
    runs = [run for result in results for run in result["runs"]]
    return {"format": results[0]["format"], "runs": runs, "workloads": list(workloads.values())}


def _together(known: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    if known is None or not known["rounds"]:
        return record
    if not record["rounds"]:
        return known
    return {**known, **record, "rounds": known["rounds"] + record["rounds"]}


def _per_s(counted: dict[str, float] | None, what: str, unit: float) -> float | None:
    return counted[what] / counted["seconds"] / unit if counted and counted["seconds"] else None


def _role(name: str) -> str:
    return {"producer": "producers", "consumer": "consumers"}.get(name.partition("-")[0], name)
