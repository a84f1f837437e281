"""The last log lines of daemons in the report of a failed test: a shared cluster is gone when a person reads it."""

from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

LINES_MAX = 15
"""The last lines of each daemon's log."""
LINE_CHARS_MAX = 2000
REPLICAS = "replicas.log"
"""The data of a backup, which are not a log in spite of the suffix."""
QUIET = ('"level": "info"', '"level": "debug"')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of each daemon's log to the report of a test that failed."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for log in sorted(set(_logs(item.funcargs.values()))):
            if said := _last_lines(log):
                report.sections.append((f"the end of {log.name}", said))
    return report


def _logs(arguments: Iterable[object]) -> Iterable[Path]:
    """The logs of clusters that are arguments of a test, belong to an argument, or are in its directory."""
    for one in arguments:
        cluster = getattr(one, "cluster", one)
        directory = cluster if isinstance(cluster, Path) else getattr(cluster, "log_dir", None)
        if isinstance(directory, Path):
            yield from (log for log in directory.rglob("*.log") if log.name != REPLICAS)


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    loud = [line[:LINE_CHARS_MAX] for line in lines if not any(quiet in line for quiet in QUIET)]
    return "\n".join(loud[-LINES_MAX:])
