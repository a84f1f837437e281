"""The order of tests: the longest groups first, so that no worker is left with a long one at the end.

A group runs on one worker: the tests with the same marker ``xdist_group``, else the tests of a module. `RECORDED` has
the times of the longer ones, measured by `tests.budget` in a run of `make test`; others come after them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDERS = ("spark", "integration", "simulation", "property", "unit")
"""Folders of tests; those with the longest groups come first."""
RECORDED = Path(__file__).with_name("durations.txt")
"""Lines with the seconds and the name of a group. They only decide the order: old ones do no harm."""
WORTH_S = 3.0
"""Faster groups are not recorded."""


def group_of(item: pytest.Item) -> str:
    """The group of a test; a test without a group gets that of its module."""
    marker = item.get_closest_marker("xdist_group")
    if marker is not None:
        return str(marker.args[0])
    group = ".".join(_parts(item.path, item.config.rootpath))
    item.add_marker(pytest.mark.xdist_group(group))
    return group


@functools.cache
def _parts(module: Path, root: Path) -> tuple[str, ...]:
    return module.relative_to(root).with_suffix("").parts


def put_in_order(items: list[pytest.Item], recorded: Mapping[str, float]) -> None:
    """Sort tests by the times of their groups."""
    places = {name: number for number, name in enumerate(FOLDERS)}

    def place(item: pytest.Item) -> tuple[float, int]:
        folder = _parts(item.path, item.config.rootpath)[1]
        return -recorded.get(group_of(item), 0.0), places.get(folder, len(FOLDERS))

    items.sort(key=place)


def recorded() -> dict[str, float]:
    """Seconds of each recorded group."""
    pairs = (line.split() for line in RECORDED.read_text().splitlines())
    return {name: float(seconds) for seconds, name in pairs}


def record(seconds: Mapping[str, float], file: Path) -> None:
    """Write the times of groups to `file`, in the form of `RECORDED`."""
    long = sorted((-each, name) for name, each in seconds.items() if each >= WORTH_S)
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{-each:.0f} {name}\n" for each, name in long))
