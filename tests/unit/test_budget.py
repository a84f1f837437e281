"""The table that tests/budget.py prints about a run."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.budget import Budget
from tests.order import record, recorded


def report(name: str, seconds: float, *, when: str = "call", marks: Iterable[str] = ()) -> pytest.TestReport:
    """The report of one phase of a test."""
    return pytest.TestReport(
        nodeid=name,
        location=(name, 0, name),
        keywords=dict.fromkeys(marks, 1),
        outcome="passed",
        longrepr=None,
        when=when,  # type: ignore[arg-type]
        duration=seconds,
    )


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    budget = Budget(tmp_path)
    for each in (
        report("tests/unit/core/test_a.py::test_x", 1.0),
        report("tests/spark/test_b.py::test_y", 20.0, when="setup"),
        report("tests/spark/test_b.py::test_y", 3.0),
        report("tests/spark/test_b.py::test_z", 40.0, marks=("slow",)),
    ):
        budget.pytest_runtest_logreport(each)
    return budget


def test_the_table_has_the_sums_of_folders_and_tiers(budget: Budget) -> None:
    rows = {line.split()[0]: line.split()[1:] for line in budget.lines() if line.startswith("tests")}
    assert rows == {
        "tests/spark": ["1", "tests", "23", "s", "1", "tests", "40", "s"],
        "tests/unit": ["1", "tests", "1", "s", "-"],
        "tests": ["2", "tests", "24", "s", "1", "tests", "40", "s"],
    }


def test_the_slowest_tests_come_first_with_the_time_of_their_fixtures(budget: Budget) -> None:
    lines = list(budget.lines())
    assert lines[-3:] == [
        "    40.0 s  tests/spark/test_b.py::test_z",
        "    23.0 s  tests/spark/test_b.py::test_y",
        "     1.0 s  tests/unit/core/test_a.py::test_x",
    ]


def test_the_table_has_the_sums_of_workers(budget: Budget) -> None:
    other = report("tests/unit/core/test_a.py::test_w", 7.0)
    other.worker_id = "gw1"  # type: ignore[attr-defined]  # set by pytest-xdist
    budget.pytest_runtest_logreport(other)
    assert any(line.startswith("workers: ") and "gw1 7 s" in line for line in budget.lines())


def test_the_durations_of_groups_are_recorded_with_the_longest_first(tmp_path: Path) -> None:
    budget = Budget(tmp_path)
    for name, seconds in (("a.py::x[@]@one", 2.0), ("a.py::y@one", 4.4), ("b.py::z@two", 9.0), ("b.py::z@three", 1.0)):
        budget.pytest_runtest_logreport(report(f"tests/unit/{name}", seconds))
    record(budget.groups(), tmp_path / "durations")
    assert (tmp_path / "durations").read_text() == "9 two\n6 one\n"


def test_recorded_durations_belong_to_existing_modules(request: pytest.FixtureRequest) -> None:
    root = request.config.rootpath
    modules = [name for name in recorded() if name.startswith("tests.")]
    assert modules
    gone = [name for name in modules if not root.joinpath(*name.split(".")).with_suffix(".py").exists()]
    assert gone == []
