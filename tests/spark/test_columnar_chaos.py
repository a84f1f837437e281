"""Executors of the columnar engine die, stall and run out of memory: a short form of the chaos program `columnar`."""

from pathlib import Path

import pytest

from tests.chaos.columnar import COLUMNAR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_failures_of_executors_and_a_broker_leave_results_exact_and_no_slot_leased(tmp_path: Path) -> None:
    kinds = ["executor", "memory", "stalled", "early", "reused", "broker"]
    run = await COLUMNAR.short(tmp_path, rounds=len(kinds), seed=9, kinds=kinds)
    assert run.seen["batches"] >= len(kinds)
    assert run.seen["killed"] == 1
    assert run.seen["out of memory"] == 1
    assert run.seen["slots used again"], "executors that slept had nothing in their hands"
