"""A short version of the program `crowd` of chaos."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.crowd import CROWD

ATTACKS = (
    "idle, frames",
    "idle, gRPC",
    "known, take no answers",
    "unknown, send much over gRPC",
    "wrong passwords, gRPC",
)


@pytest.mark.timeout(180)
async def test_those_who_mean_harm_are_in_the_way_of_nobody(tmp_path: Path) -> None:
    run = await CROWD.short(tmp_path, seconds=1, before=0.5, connections=300, kinds=ATTACKS, tls="on")
    assert run.seen["attacks"] == len(ATTACKS)
