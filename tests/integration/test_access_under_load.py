"""A short run of the chaos program `access`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.access import ACCESS


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_refused_operations_end_within_two_seconds_despite_a_lost_leader(tmp_path: Path) -> None:
    """The program checks it, and raises `Wrong` if one goes on."""
    run = await ACCESS.short(tmp_path, rounds=2, seed=1)
    assert run.seen["rounds"] == 2
    assert run.seen["written"] > 20
    assert run.seen["read"] > 20
