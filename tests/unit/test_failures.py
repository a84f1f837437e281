"""The file of failed tests: pytest accepts its names, and it exists only if a rerun makes sense."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.failures import FAILED, FAILED_MAX, Failures, without_group

TESTS = """
from pathlib import Path
import pytest

@pytest.fixture
def breaks():
    raise RuntimeError

@pytest.mark.xdist_group("some")
@pytest.mark.parametrize("text", ["a@b", "two words", "fine"])
def test_in_a_group(text):
    assert text == "fine"

def test_with_a_broken_fixture(breaks):
    pass

def test_that_is_fine():
    pass
"""
PLUGIN = """
from tests.failures import Failures

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config.rootpath))
"""
WORKERS = ["-n", "2", "--dist", "loadgroup", "--max-worker-restart", "0"]


@pytest.fixture
def plugin(pytester: pytest.Pytester, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    pytester.makeconftest(PLUGIN)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("workers", [pytest.param([], marks=pytest.mark.slow), WORKERS], ids=["alone", "workers"])
def test_only_failed_tests_are_run_again(pytester: pytest.Pytester, workers: list[str]) -> None:
    pytester.makepyfile(TESTS)
    first = pytester.runpytest_subprocess(*workers, timeout=60)
    first.assert_outcomes(passed=2, failed=2, errors=1)
    again = pytester.runpytest_subprocess(f"@{FAILED}", timeout=60)
    again.assert_outcomes(failed=2, errors=1)


def run(root: Path, failed: int, lost_worker: object = None) -> Path:
    """Report `failed` failures to the plugin; returns the path of the list that it writes."""
    failures = Failures(root)
    failures.pytest_sessionstart()
    for number in range(failed):
        failures.pytest_runtest_logreport(cast(Any, SimpleNamespace(failed=True, nodeid=f"test.py::test_{number}")))
    failures.pytest_testnodedown(lost_worker)
    failures.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK)
    return root / FAILED


def test_many_failures_are_not_listed_for_a_rerun(tmp_path: Path) -> None:
    assert len(run(tmp_path, FAILED_MAX).read_text().splitlines()) == FAILED_MAX
    assert not run(tmp_path, FAILED_MAX + 1).exists()


def test_a_run_that_lost_a_worker_lists_no_failures(tmp_path: Path) -> None:
    assert not run(tmp_path, 1, lost_worker="killed").exists()


def test_failures_of_an_earlier_run_are_forgotten(tmp_path: Path) -> None:
    assert run(tmp_path, 1).exists()
    assert not run(tmp_path, 0).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_an_interrupted_run_lists_no_failures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import os\ndef test_that_ends_its_worker():\n    os._exit(3)\n")
    result = pytester.runpytest_subprocess(*WORKERS, timeout=60)
    assert result.ret != 0
    assert not (pytester.path / FAILED).exists()


@pytest.mark.parametrize(
    ("said", "test"),
    [
        ("tests/a.py::test_it", "tests/a.py::test_it"),
        ("tests/a.py::test_it@group", "tests/a.py::test_it"),
        ("tests/a.py::test_it[x@y]", "tests/a.py::test_it[x@y]"),
        ("tests/a.py::test_it[x@y]@group", "tests/a.py::test_it[x@y]"),
        ("tests/at@home/a.py::test_it", "tests/at@home/a.py::test_it"),
    ],
)
def test_the_group_is_removed_from_the_name_of_a_test(said: str, test: str) -> None:
    assert without_group(said) == test
