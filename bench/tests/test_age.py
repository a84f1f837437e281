"""The age of recorded results, with a fake history."""

import json
from pathlib import Path

import pytest

from bench import age as module
from bench.age import COMMITS_MAX, DAY_S, Age, age_of

HISTORY = {"old": 250, "new": 3}
"""Commits, and how many commits came after them."""


def ask(*arguments: str) -> str | None:
    """Git's answers for that history; the commit `new` recorded the file."""
    match arguments:
        case ("merge-base", _, commit, _):
            return "" if commit in HISTORY else None
        case ("rev-list", _, commits, "--", *folders):
            assert "broker" in folders
            assert "tests" not in folders
            return str(HISTORY[commits.partition("..")[0]])
        case ("show", *_, commit):
            return str(-DAY_S * HISTORY.get(commit, 0))
        case _:
            return "new"


def result(folder: Path, *documents: object) -> Path:
    path = folder / "some.json"
    path.write_text("\n".join(map(json.dumps, documents)))
    return path


def commits_of(path: Path) -> int | None:
    age = age_of(path, ask)
    return None if age is None else age.commits


def test_the_age_is_that_of_the_measured_commit(tmp_path: Path) -> None:
    age = age_of(result(tmp_path, {"machine": {"commit": "old+"}}), ask)
    assert age == Age(250, 250)
    assert str(age) == "250 commits of the product and 250 days ago"


def test_the_oldest_of_several_runs_decides_the_age(tmp_path: Path) -> None:
    runs = [{"machine": {"commit": commit}} for commit in ("new", "old")]
    assert commits_of(result(tmp_path, {"runs": runs})) == 250
    assert commits_of(result(tmp_path, *runs)) == 250


@pytest.mark.parametrize("document", [{"machine": {"commit": "lost"}}, {"machine": {}}, {}])
def test_without_a_known_commit_the_age_is_that_of_the_recording_commit(tmp_path: Path, document: object) -> None:
    assert commits_of(result(tmp_path, document)) == 3


def test_without_git_there_is_no_age(tmp_path: Path) -> None:
    assert age_of(result(tmp_path, {"machine": {"commit": "old"}}), lambda *_: None) is None


@pytest.mark.parametrize(("commits", "warnings"), [(COMMITS_MAX, 0), (COMMITS_MAX + 1, 1)])
def test_only_an_old_result_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commits: int, warnings: int
) -> None:
    result(tmp_path, {})
    monkeypatch.setattr(module, "age_of", lambda _: Age(commits, 1))
    monkeypatch.setattr("sys.argv", ["age", "--old", "--results", str(tmp_path)])
    assert module.main() == 0
    assert capsys.readouterr().out.count("warning: more than 200 commits: bench/results/some.json") == warnings
