"""The cost of a run of tests: its slowest tests, and the time of each folder and tier, printed at its end.

Times are those of the tests with their fixtures, added up over all workers; a shared fixture counts for the first test
that uses it. A short run prints nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failures import without_group
from tests.order import record

SLOWEST = 20
DURATIONS = Path("build/durations.txt")
"""Below the root: the time of each group, a replacement for `tests/durations.txt`."""
LEAST_S = 60.0
"""A shorter run is not worth a table."""


class Budget:
    """A plugin of pytest, for the reporting process."""

    def __init__(self, root: Path) -> None:
        self._file = root / DURATIONS
        self._tests: defaultdict[str, float] = defaultdict(float)
        """Seconds of each test, by name."""
        self._workers: defaultdict[str, float] = defaultdict(float)
        """Seconds of each worker of pytest-xdist, by name."""
        self._slow: set[str] = set()
        """Names of tests that `make test` leaves out."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the time of a test, or of one of its fixtures."""
        self._tests[report.nodeid] += report.duration
        self._workers[getattr(report, "worker_id", "")] += report.duration
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        if sum(self._tests.values()) >= LEAST_S:
            record(self.groups(), self._file)
            terminalreporter.section("what the tests cost")
            for line in self.lines():
                terminalreporter.line(line)

    def groups(self) -> dict[str, float]:
        """Seconds of each group of tests that pytest-xdist gave to a worker."""
        found: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self._tests.items():
            test = without_group(name)
            if test != name:
                found[name[len(test) + 1 :]] += seconds
        return found

    def lines(self) -> Iterator[str]:
        """The table: sums first, then the slowest tests."""
        yield f"{'':<24}{'quick tier':^20}{'only in make test-all':^24}"
        for folder in [*sorted({_folder(name) for name in self._tests}), "tests"]:
            tests = [name for name in self._tests if name.startswith(f"{folder}/")]
            slow = [name for name in tests if name in self._slow]
            quick = [name for name in tests if name not in self._slow]
            yield f"{folder:<24}{self._sum(quick):^20}{self._sum(slow):^24}"
        if len(self._workers) > 1:
            yield "workers: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sorted(self._workers.items()))
        yield f"slowest {SLOWEST}:"
        for name, seconds in sorted(self._tests.items(), key=lambda item: -item[1])[:SLOWEST]:
            yield f"{seconds:8.1f} s  {name}"

    def _sum(self, names: list[str]) -> str:
        return f"{len(names):>5} tests {sum(self._tests[name] for name in names):>5.0f} s" if names else "-"


def _folder(name: str) -> str:
    """``tests/unit`` for ``tests/unit/core/format/test_chunk.py::test_it``."""
    return "/".join(name.split("/")[:2])
