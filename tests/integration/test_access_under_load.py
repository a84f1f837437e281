"""A short version of ``make chaos-access``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import access


@pytest.mark.timeout(180)
async def test_nothing_is_done_two_seconds_after_it_was_refused_though_a_leader_is_lost(tmp_path: Path) -> None:
    await access.run(rounds=2, seed=1, root=tmp_path)
