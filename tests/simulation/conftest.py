"""A process that runs simulations for tests: it imports everything once, and forks a child for each run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Simulate = Callable[..., str]


@pytest.fixture(scope="session")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulate]:
    """Run a simulation that must succeed with these arguments; return its output."""
    output = tmp_path_factory.mktemp("simulation") / "output"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.simulation", "--serve"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(*arguments: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([str(output), *arguments]) + "\n")
            process.stdin.flush()
            code = process.stdout.readline()
            printed = output.read_text(encoding="utf-8")
            assert code == "0\n", printed
            return printed

        yield run
        process.stdin.close()
