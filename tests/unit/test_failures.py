"""The file of failed tests: pytest accepts its names, and it exists only if a rerun makes sense."""

import pytest

from tests.failures import FAILED, FAILED_MAX, without_group

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
MANY = f"""
import pytest

@pytest.mark.parametrize("number", range({FAILED_MAX + 1}))
def test_that_fails(number):
    assert False
"""
PLUGIN = """
from tests.failures import Failures

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config.rootpath))
"""
WORKERS = ["-n", "2", "--dist", "loadgroup", "--max-worker-restart", "0"]


@pytest.fixture(autouse=True)
def plugin(pytester: pytest.Pytester, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    pytester.makeconftest(PLUGIN)


@pytest.mark.parametrize("workers", [[], WORKERS])
def test_only_failed_tests_are_run_again(pytester: pytest.Pytester, workers: list[str]) -> None:
    pytester.makepyfile(TESTS)
    first = pytester.runpytest_subprocess(*workers, timeout=60)
    first.assert_outcomes(passed=2, failed=2, errors=1)
    again = pytester.runpytest_subprocess(f"@{FAILED}", timeout=60)
    again.assert_outcomes(failed=2, errors=1)


@pytest.mark.parametrize("workers", [[], WORKERS])
def test_many_failures_are_not_listed_for_a_rerun(pytester: pytest.Pytester, workers: list[str]) -> None:
    pytester.makepyfile(MANY)
    pytester.runpytest_subprocess(*workers, timeout=60).assert_outcomes(failed=FAILED_MAX + 1)
    assert not (pytester.path / FAILED).exists()


def test_an_interrupted_run_lists_no_failures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import os\ndef test_that_ends_its_worker():\n    os._exit(3)\n")
    result = pytester.runpytest_subprocess(*WORKERS, timeout=60)
    assert result.ret != 0
    assert not (pytester.path / FAILED).exists()


def test_failures_of_an_earlier_run_are_forgotten(pytester: pytest.Pytester) -> None:
    file = pytester.path / FAILED
    file.parent.mkdir()
    file.write_text("test_of_yesterday\n")
    pytester.makepyfile("def test_that_is_fine():\n    pass\n")
    pytester.runpytest_subprocess(timeout=60).assert_outcomes(passed=1)
    assert not file.exists()


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
