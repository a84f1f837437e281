"""A latency constraint while things happen: the short form of ``make chaos-latency``, and that it can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.latency import Options, Totals, run

SHORT = Options(rounds=1, seconds=14.0, window_s=2.0, seed=6, kinds=("kill", "writer"), one_each=False)


@pytest.mark.slow
async def test_a_constraint_is_held_again_after_a_kill_and_right_while_a_clock_jumps(tmp_path: Path) -> None:
    totals = Totals()
    told = await run(SHORT, tmp_path, totals)
    assert totals.wrong == [], told
    assert [part.what.split()[0] for part in totals.parts] == ["load", "kill", "writer's"]
    assert "0 chunks beyond their deadlines" in told


@pytest.mark.slow
async def test_what_is_too_slow_and_a_timer_that_is_late_are_noticed(tmp_path: Path) -> None:
    totals = Totals()
    options = replace(SHORT, kinds=("move",), slow_work_ms=400, late_timer_ms=80)
    await run(options, tmp_path, totals)
    assert any("the constraint is" in wrong and " a to g" in wrong for wrong in totals.wrong), totals.wrong
    assert any("beyond their deadlines" in wrong for wrong in totals.wrong), totals.wrong
