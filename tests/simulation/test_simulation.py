"""Some seeds of the simulation, in a process of their own; and that a seed is a run, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import first_quick
from tests.forked_programs import started_alone

ROOT = Path(__file__).parents[2]
SEEDS = 200
SEEDS_QUICK = 20
"""In `make test`; the others are left to `make test-all`."""
SEEDS_TOGETHER = 20
SEEDS_TWICE = 2
PLANS = Path(__file__).parent / "plans"
PLANS_QUICK = 8


def simulate(*arguments: str) -> str:
    """What a run prints. What was killed in it must not be ended by the process of the tests."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("first", first_quick(range(1, 1 + SEEDS, SEEDS_TOGETHER), SEEDS_QUICK // SEEDS_TOGETHER))
def test_the_cluster_keeps_its_promises_whatever_befalls_it(first: int) -> None:
    printed = simulate("--seed", str(first), "--seeds", str(SEEDS_TOGETHER), "--jobs", "1")
    assert f"{SEEDS_TOGETHER} seeds from {first}: 0 failed" in printed


def test_a_seed_is_a_run_byte_for_byte() -> None:
    arguments = ("--digests", "--seed", "101", "--seeds", str(SEEDS_TWICE))
    with started_alone():  # each with hashes of its own
        first, second = simulate(*arguments), simulate(*arguments)
    assert len(first.splitlines()) == SEEDS_TWICE
    assert first == second


@pytest.mark.parametrize("plan", first_quick(sorted(path.stem for path in PLANS.glob("*.json")), PLANS_QUICK))
def test_what_has_failed_once_does_so_no_more(plan: str) -> None:
    assert "0 failed" in simulate("--plan", str(PLANS / f"{plan}.json"))
