"""Shrinking: a failing plan becomes the smallest plan that fails in the same way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.simulation.world.plan import Fault, Plan, draw
from tests.simulation.world.shrinking import Shrinking, kind_of, read, stored

FAULTS = tuple(Fault(float(at_s), "kill", 1.0, ("broker-1",)) for at_s in range(20))


def problems_of(plan: Plan) -> list[str]:
    """A plan fails with the faults at 3 s and 11 s, and otherwise without the fault at 5 s."""
    times = {fault.at_s for fault in plan.faults}
    if {3.0, 11.0} <= times and plan.records >= 17:
        return [f"record {len(times)} is lost"]
    return [] if 5.0 in times else ["it hangs"]


def test_shrinking_leaves_only_what_the_failure_needs() -> None:
    plan = dataclasses.replace(draw(1), faults=FAULTS, records=150, members=2, readers=2)
    found = Shrinking(plan, problems_of).go()
    assert [fault.at_s for fault in found.faults] == [3.0, 11.0]
    assert (found.records, found.members, found.readers, found.producers) == (17, 0, 0, 1)
    assert kind_of(problems_of(found)) == kind_of(problems_of(plan))


def test_shrinking_ends_after_the_maximal_number_of_runs() -> None:
    plan = dataclasses.replace(draw(1), faults=FAULTS, records=150)
    shrinking = Shrinking(plan, problems_of)
    assert problems_of(shrinking.go(runs_max=6))
    assert shrinking.runs <= 7


def test_a_plan_that_does_not_fail_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        Shrinking(draw(1), lambda _: []).go()


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    for seed in range(20):
        path = tmp_path / f"{seed}.json"
        path.write_text(stored(draw(seed)), encoding="utf-8")
        assert read(path) == draw(seed)
