"""A latency constraint during faults: the short form of the chaos program `latency`, and proof that it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.latency import LATENCY, hold

SHORT = ("--rounds", "1", "--seconds", "14", "--window-s", "2", "--seed", "6", "--all-each", "--kinds")


@pytest.mark.slow
async def test_a_constraint_is_held_after_a_kill_and_measured_right_while_a_clock_jumps(tmp_path: Path) -> None:
    run = LATENCY.run_of(tmp_path, *SHORT, "kill", "writer")
    path = await hold(run)
    assert path.wrong == [], run.told()
    assert [part.what.split()[0] for part in path.parts] == ["load", "kill", "writer's"]
    assert run.seen["chunks beyond their deadlines"] == 0


@pytest.mark.slow
async def test_the_program_notices_slow_work_and_a_late_timer(tmp_path: Path) -> None:
    run = LATENCY.run_of(tmp_path, *SHORT, "move", "--slow-work-ms", "400", "--late-timer-ms", "80")
    wrong = (await hold(run)).wrong
    assert any("the constraint is" in each and " a to g" in each for each in wrong), wrong
    assert any("beyond their deadlines" in each for each in wrong), wrong
