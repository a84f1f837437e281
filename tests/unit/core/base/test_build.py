"""The version and the commit of the program that runs."""

from pathlib import Path

import pytest

from kera.core.base.build import COMMIT_VARIABLE, commit_of, this_build

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "core").mkdir()
    return tmp_path


def test_a_branch_is_followed_to_its_commit(tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tree / ".git" / "refs" / "heads" / "main").write_text(COMMIT + "\n")
    assert commit_of(tree / "core" / "build.py") == COMMIT


def test_a_packed_branch_is_found(tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tree / ".git" / "packed-refs").write_text(f"# pack-refs\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n")
    assert commit_of(tree / "core" / "build.py") == COMMIT


def test_a_detached_head_is_the_commit(tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text(COMMIT + "\n")
    assert commit_of(tree / "core" / "build.py") == COMMIT


@pytest.mark.parametrize("head", ["", "ref: refs/heads/gone", "nonsense"])
def test_a_head_without_a_commit_gives_an_empty_commit(tree: Path, head: str) -> None:
    (tree / ".git" / "HEAD").write_text(head)
    assert not commit_of(tree / "core" / "build.py")


def test_a_directory_outside_a_git_tree_gives_an_empty_commit(tmp_path: Path) -> None:
    assert not commit_of(tmp_path / "build.py")


def test_an_environment_variable_can_name_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, COMMIT)
    this_build.cache_clear()
    try:
        assert this_build().commit == COMMIT[:12]
        assert this_build().version
    finally:
        this_build.cache_clear()
