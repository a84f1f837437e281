"""Some seeds of the simulation, their reproducibility, and plans that once failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import first_quick
from tests.simulation.conftest import ROOT, Simulate

SEEDS = 200
SEEDS_QUICK = 40
"""The seeds in `make test`; `make test-all` runs the others."""
SEEDS_TOGETHER = 10
SEEDS_TWICE = 1
PLANS = sorted((Path(__file__).parent / "plans").glob("*.json"))
PLANS_QUICK = 4


@pytest.mark.parametrize("first", first_quick(range(1, 1 + SEEDS, SEEDS_TOGETHER), SEEDS_QUICK // SEEDS_TOGETHER))
def test_the_cluster_keeps_its_promises_under_faults(simulate: Simulate, first: int) -> None:
    printed = simulate("--seed", str(first), "--seeds", str(SEEDS_TOGETHER), "--jobs", "1")
    assert f"{SEEDS_TOGETHER} seeds from {first}: 0 failed" in printed


def test_a_seed_gives_the_same_run_in_every_process(simulate: Simulate) -> None:
    """A fork of the helper and a separate process give the same digests."""
    arguments = ("--digests", "--seed", "101", "--seeds", str(SEEDS_TWICE))
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    alone = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    )
    assert len(alone.stdout.splitlines()) == SEEDS_TWICE
    assert simulate(*arguments) == alone.stdout


@pytest.mark.parametrize("plan", first_quick(PLANS, PLANS_QUICK), ids=lambda path: path.stem)
def test_a_plan_that_failed_once_succeeds(simulate: Simulate, plan: Path) -> None:
    assert "0 failed" in simulate("--plan", str(plan))
