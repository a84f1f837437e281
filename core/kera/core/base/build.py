"""Which program this is: version, commit, native core."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from kera.core.native import describe as describe_core
from kera.core.native import native

COMMIT_VARIABLE = "KERA_COMMIT"
"""Environment variable that overrides the commit that was written down when the package was built."""
_WRITTEN = Path(__file__).parents[1] / "COMMIT"
"""Exists only in a package: hatch_build.py writes it."""
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SHOWN = 12


class Build(NamedTuple):
    """The version, commit and native core of this program."""

    version: str
    commit: str
    """Its first digits; empty if unknown."""
    native: bool
    python: str


@functools.cache
def this_build() -> Build:
    """The build of this process."""
    try:
        number = version("kera")
    except PackageNotFoundError:  # run from a tree that is not installed
        number = "unknown"
    commit = os.environ.get(COMMIT_VARIABLE, "") or _written() or commit_of(Path(__file__))
    return Build(number, commit[:_SHOWN], native is not None, platform.python_version())


def _written() -> str:
    with contextlib.suppress(OSError):
        return _WRITTEN.read_text(encoding="utf-8").strip()
    return ""


def commit_of(path: Path) -> str:
    """The commit of the source tree that `path` is in; empty if it is in none."""
    tree = next((each for each in path.resolve().parents if (each / "pyproject.toml").is_file()), None)
    try:
        git = (tree or path) / ".git"
        if git.is_file():  # a further work tree of a repository
            git = (git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if head.startswith("ref:"):
            head = _resolved(git, head.removeprefix("ref:").strip())
    except OSError:
        return ""
    return head if _COMMIT.fullmatch(head) else ""


def describe() -> str:
    """This program in one line, for people: ``kera 0.1.0 (commit 1f2e3d4c5b6a, native core)``."""
    build = this_build()
    commit = f"commit {build.commit}" if build.commit else "commit unknown"
    return f"kera {build.version} ({commit}, {describe_core()})"


def _resolved(git: Path, name: str) -> str:
    common = git / "commondir"
    root = (git / common.read_text(encoding="utf-8").strip()).resolve() if common.is_file() else git
    if (root / name).is_file():
        return (root / name).read_text(encoding="utf-8").strip()
    lines = (root / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")
