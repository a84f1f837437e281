"""The tables that scripts/coverage_table.py makes from reports."""

from pathlib import PurePath
from typing import Any

import pytest
from scripts.coverage_table import fallen, package_of, per_package, table


def file(lines_run: int, branches_run: int) -> dict[str, Any]:
    """The summary of a file with ten lines and ten branches, and of those that ran."""
    counts = {"num_statements": 10, "covered_lines": lines_run, "num_branches": 10, "covered_branches": branches_run}
    return {"summary": counts}


BEFORE = {"files": {"core/kera/core/a.py": file(10, 8), "core/kera/core/b.py": file(6, 4), "x/y/z.py": file(10, 10)}}
AFTER = {"files": {"core/kera/core/b.py": file(8, 5), "x/kera/new/z.py": file(0, 0)}}


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("broker/kera/broker/log/arena.py", "kera.broker"),
        ("client/kera/cli/__main__.py", "kera.cli"),
        ("spark_connector/pyspark_kera/__init__.py", "pyspark_kera"),
    ],
)
def test_a_file_counts_for_its_package(path: str, package: str) -> None:
    assert package_of(PurePath(path)) == package


def test_a_table_has_lines_branches_and_both_for_each_package_and_in_total() -> None:
    assert table(per_package(BEFORE), None) == [
        "%                      lines branch   both",
        "kera.core               80.0   60.0   70.0",
        "y                      100.0  100.0  100.0",
        "total                   86.7   73.3   80.0",
    ]


def test_two_reports_are_shown_side_by_side() -> None:
    lines = table(per_package(BEFORE), per_package(AFTER))
    assert lines[1] == "kera.core               80.0   60.0   70.0     80.0   50.0   65.0     -5.0"
    assert lines[2].rstrip() == "y                      100.0  100.0  100.0", "which the other does not have"


@pytest.mark.parametrize(
    ("points_max", "share_min", "expected"),
    [
        (None, None, []),
        (4.9, None, ["kera.core", "total"]),
        (5.1, None, ["total"]),
        (50.0, 93.0, ["kera.core", "total"]),
        (50.0, 92.0, ["total"]),
        (50.0, 40.0, []),
    ],
)
def test_packages_whose_coverage_fell_too_far_are_named(
    points_max: float | None, share_min: float | None, expected: list[str]
) -> None:
    before, after = per_package(BEFORE), per_package(AFTER)
    assert fallen(before, after, points_max=points_max, share_min=share_min) == expected
