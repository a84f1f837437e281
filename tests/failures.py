"""Which tests failed, for those who run them again: `make test-again`, see docs/testing.md.

Told of a run that went to its end, and of few failures: what was cut short may hide others, and of many none is chance.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FAILED = Path("build/failed-tests")
"""Below the root: an argument of pytest a line, to be given as ``@build/failed-tests``."""
FAILED_MAX = 3


class Failures:
    """A plugin of pytest, for the process that reports."""

    def __init__(self, root: Path) -> None:
        self._file = root / FAILED
        self._failed: dict[str, None] = {}
        self._whole = True

    def pytest_sessionstart(self) -> None:
        """What failed in earlier runs is forgotten."""
        self._file.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take down a test that failed, or one of its fixtures."""
        if report.failed:
            self._failed[without_group(report.nodeid)] = None

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, error: object | None) -> None:
        """A worker that has died leaves tests that nobody has run."""
        self._whole = self._whole and error is None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write it, if it was the tests that failed, and nothing else."""
        whole = self._whole and exitstatus == pytest.ExitCode.TESTS_FAILED
        if whole and 0 < len(self._failed) <= FAILED_MAX:
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text("".join(f"{test}\n" for test in self._failed))


def without_group(test: str) -> str:
    """``tests/unit/test_it.py::test_it[a@b]`` of what pytest-xdist says, which has ``@group`` behind it."""
    head, at, group = test.rpartition("@")
    return head if at and "]" not in group and "::" in head else test
