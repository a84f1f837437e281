"""The age of recorded results, in commits and days; a warning for those that are older than 200 commits.

Only commits that change the product count: tests, pages and other results change nothing that was measured. The age is
that of the commit that was measured. If a result names no commit, or history lacks it, the age is that of the commit
that recorded the result.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.common import ROOT, git, parser

RESULTS = ROOT / "bench" / "results"
PRODUCT = ("proto", "core", "broker", "coordinator", "backup", "client", "spark_connector")
COMMITS_MAX = 200
DAY_S = 86_400

Git = Callable[..., str | None]
"""As `bench.common.git`."""


@dataclasses.dataclass(frozen=True)
class Age:
    """The distance from a commit to the one that is checked out."""

    commits: int
    days: float

    def __str__(self) -> str:
        return f"{self.commits:,} commits of the product and {self.days:.0f} days ago"


def machines(path: Path) -> Iterator[dict[str, Any]]:
    """All machines that a recorded result names: one, or that of each of its runs, or of each line."""
    text = path.read_text(encoding="utf-8")
    try:
        documents = [json.loads(text)]
    except json.JSONDecodeError:
        documents = [json.loads(line) for line in text.splitlines()]
    for document in documents:
        for head in (document, *document.get("runs", ())):
            if isinstance(head.get("machine"), dict):
                yield head["machine"]


def age_of(path: Path, ask: Git = git) -> Age | None:
    """The age of a result, by its oldest run; None if git does not know it."""
    named = [str(machine.get("commit") or "").rstrip("+") for machine in machines(path)] or [""]
    ages = [_age(commit, ask) if commit else None for commit in named]
    if any(age is None for age in ages):
        ages.append(_age(ask("log", "-1", "--format=%H", "--", str(path)) or "", ask))
    known = [age for age in ages if age is not None]
    return max(known, key=lambda age: age.commits) if known else None


def _age(commit: str, ask: Git) -> Age | None:
    if not commit or ask("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    commits = ask("rev-list", "--count", f"{commit}..HEAD", "--", *PRODUCT)
    then_s, now_s = (ask("show", "-s", "--format=%ct", each) for each in (commit, "HEAD"))
    if commits is None or then_s is None or now_s is None:
        return None
    return Age(int(commits), (int(now_s) - int(then_s)) / DAY_S)


def main() -> int:
    """List all ages, or with ``--old`` warn only about the old ones. The exit code is always 0."""
    made = parser(__doc__)
    made.add_argument("--old", action="store_true", help="only a line for each that is too old")
    made.add_argument("--results", type=Path, default=RESULTS, help="their folder")
    arguments = made.parse_args()
    for path in sorted(arguments.results.rglob("*.json")):
        age = age_of(path)
        old = age is not None and age.commits > COMMITS_MAX
        if old or not arguments.old:
            name = path.relative_to(arguments.results)
            warning = f"warning: more than {COMMITS_MAX} commits: " if old else ""
            print(f"{warning}bench/results/{name}: measured {age or 'at a time that git does not know'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
