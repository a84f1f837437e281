"""The share of lines and branches that tests run, per package: ``python -m scripts.coverage_table REPORT [OTHER]``.

``make coverage`` writes the reports. With a second report, its shares are shown beside those of the first, and the exit
code is 1 if a package has fallen by more than ``--points-max`` points, or has less than ``--share-min`` percent of what
it had.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any


@dataclass(slots=True)
class Covered:
    """The numbers of lines and branches of a package, and how many of them were run."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def add(self, summary: Mapping[str, int]) -> None:
        """Add the numbers of a file."""
        self.lines += summary["num_statements"]
        self.lines_run += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_run += summary["covered_branches"]

    @property
    def percent(self) -> float:
        """Percentage of lines and branches together."""
        return _percent(self.lines_run + self.branches_run, self.lines + self.branches)

    def __str__(self) -> str:
        lines, branches = _percent(self.lines_run, self.lines), _percent(self.branches_run, self.branches)
        return f"{lines:6.1f} {branches:6.1f} {self.percent:6.1f}"


def per_package(report: Mapping[str, Any]) -> dict[str, Covered]:
    """Return the coverage of each package in a report, and the total last."""
    found: defaultdict[str, Covered] = defaultdict(Covered)
    for name, file in sorted(report["files"].items()):
        for package in (package_of(PurePath(name)), "total"):
            found[package].add(file["summary"])
    found["total"] = found.pop("total")  # to the end
    return dict(found)


def package_of(path: PurePath) -> str:
    """Return the package of a file: ``kera.broker`` for ``broker/kera/broker/log/arena.py``."""
    parts = path.parts
    if "kera" in parts:
        at = parts.index("kera")
        return ".".join(parts[at : at + 2])
    return path.parent.name


def table(one: Mapping[str, Covered], other: Mapping[str, Covered] | None) -> list[str]:
    """Return the table as lines of text."""
    heading = f"{'lines':>6} {'branch':>6} {'both':>6}"
    lines = [f"{'%':<22}{heading}" + (f"   {heading}   {'change':>6}" if other else "")]
    for package, covered in one.items():
        line = f"{package:<22}{covered}"
        if other and package in other:
            line += f"   {other[package]}   {other[package].percent - covered.percent:+6.1f}"
        lines.append(line)
    return lines


def fallen(
    one: Mapping[str, Covered], other: Mapping[str, Covered], *, points_max: float | None, share_min: float | None
) -> list[str]:
    """Return the packages whose coverage has fallen too far."""
    lowest = {
        package: max(
            covered.percent - points_max if points_max is not None else 0.0,
            covered.percent * share_min / 100 if share_min is not None else 0.0,
        )
        for package, covered in one.items()
        if package in other
    }
    return [package for package, least in lowest.items() if other[package].percent < least]


def _percent(some: int, of: int) -> float:
    return 100.0 * some / of if of else 100.0


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="one, or two to compare")
    parser.add_argument("--points-max", type=float, help="so many points may a package fall")
    parser.add_argument("--share-min", type=float, help="such a part of what it had, in percent, has a package to keep")
    arguments = parser.parse_args()
    reports = [per_package(json.loads(path.read_text())) for path in arguments.reports[:2]]
    one, other = reports[0], reports[1] if len(reports) > 1 else None
    sys.stdout.write("\n".join(table(one, other)) + "\n")
    if other is None:
        return 0
    less = fallen(one, other, points_max=arguments.points_max, share_min=arguments.share_min)
    for package in less:
        sys.stderr.write(f"{package} has fallen too far\n")
    return 1 if less else 0


if __name__ == "__main__":
    sys.exit(main())
