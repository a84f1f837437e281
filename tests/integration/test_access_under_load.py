"""A short version of the program `access` of chaos."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.access import ACCESS


@pytest.mark.timeout(180)
async def test_nothing_is_done_two_seconds_after_it_was_refused_though_a_leader_is_lost(tmp_path: Path) -> None:
    run = await ACCESS.short(tmp_path, rounds=2, seed=1)
    assert run.seen["written"] > 0
