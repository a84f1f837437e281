"""Executors of the columnar engine die, stall and run out of memory: the short form of ``make chaos-columnar``."""

import random
from pathlib import Path

import pytest

from tests.chaos import columnar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_results_are_exact_and_no_slot_stays_leased_whatever_happens_to_executors_and_their_broker(
    tmp_path: Path,
) -> None:
    kinds = ["executor", "memory", "stalled", "early", "reused", "broker"]
    seen = columnar.run_all(tmp_path, kinds, random.Random(9))
    assert seen["batches"] >= len(kinds)
    assert seen["killed"] == 1
    assert seen["out of memory"] == 1
    assert seen["slots used again"], "executors that slept had nothing in their hands"
