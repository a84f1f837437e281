"""A short version of ``make chaos-crowd``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import crowd

ATTACKS = (
    "idle, frames",
    "idle, gRPC",
    "known, take no answers",
    "unknown, send much over gRPC",
    "wrong passwords, gRPC",
)


@pytest.mark.timeout(180)
async def test_those_who_mean_harm_are_in_the_way_of_nobody(tmp_path: Path) -> None:
    arguments = crowd.parse(["--seconds", "1", "--before", "0.5", "--connections", "300", "--attacks", *ATTACKS])
    rows = await crowd.run(arguments, tmp_path, encrypted=True)
    assert [row.name for row in rows] == list(ATTACKS)
    assert [row.wrong for row in rows] == [[]] * len(ATTACKS)
