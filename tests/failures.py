"""A list of the failed tests for a rerun: `make test-again`, see docs/testing.md.

Only a complete run with few failures has a list: an interrupted run may hide others, and many are not a coincidence.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FAILED = Path("build/failed-tests")
"""Below the root: an argument of pytest per line, for the command line as ``@build/failed-tests``."""
FAILED_MAX = 3


class Failures:
    """A plugin of pytest, for the reporting process."""

    def __init__(self, root: Path) -> None:
        self._file = root / FAILED
        self._failed: dict[str, None] = {}
        self._whole = True

    def pytest_sessionstart(self) -> None:
        """Forget the failures of earlier runs."""
        self._file.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed, or one of its fixtures."""
        if report.failed:
            self._failed[without_group(report.nodeid)] = None

    @pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
    def pytest_testnodedown(self, error: object | None) -> None:
        """A worker that has died leaves tests that did not run."""
        self._whole = self._whole and error is None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the list, if tests failed and nothing else went wrong."""
        whole = self._whole and exitstatus == pytest.ExitCode.TESTS_FAILED
        if whole and 0 < len(self._failed) <= FAILED_MAX:
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text("".join(f"{test}\n" for test in self._failed))


def without_group(test: str) -> str:
    """``tests/unit/test_it.py::test_it[a@b]``, for the id of pytest-xdist that ends with ``@group``."""
    head, at, group = test.rpartition("@")
    return head if at and "]" not in group and "::" in head else test
