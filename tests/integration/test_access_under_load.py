"""A short run of the chaos program `access`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.access import ACCESS


@pytest.mark.timeout(180)
async def test_refused_operations_end_within_two_seconds_despite_a_lost_leader(tmp_path: Path) -> None:
    run = await ACCESS.short(tmp_path, rounds=2, seed=1)
    assert run.seen["written"] > 0
