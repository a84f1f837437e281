"""Executors of the columnar engine die, stall and run out of memory: the short form of `columnar` of chaos."""

from pathlib import Path

import pytest

from tests.chaos.columnar import COLUMNAR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_results_are_exact_and_no_slot_stays_leased_whatever_happens_to_executors_and_their_broker(
    tmp_path: Path,
) -> None:
    kinds = ["executor", "memory", "stalled", "early", "reused", "broker"]
    run = await COLUMNAR.short(tmp_path, rounds=len(kinds), seed=9, kinds=kinds)
    assert run.seen["batches"] >= len(kinds)
    assert run.seen["killed"] == 1
    assert run.seen["out of memory"] == 1
    assert run.seen["slots used again"], "executors that slept had nothing in their hands"
