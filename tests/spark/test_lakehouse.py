"""The recipe for Delta Lake with the real library, which `make test-lakehouse` installs."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

from tests.spark.support import Kera

EXAMPLE = Path(__file__).parents[2] / "examples" / "lakehouse.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("deltalake") is None, reason="needs deltalake: make test-lakehouse"),
]


def test_a_repeated_micro_batch_is_in_the_table_once(
    kera: Kera, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--bootstrap", kera.bootstrap])

    runpy.run_path(str(EXAMPLE), run_name="__main__")

    assert capsys.readouterr().out.splitlines() == [
        "micro-batch 0 is appended",
        "micro-batch 0 is there already",
        "micro-batch 1 is appended",
        "cart",
        "help",
        "home",
        "home",
    ]
