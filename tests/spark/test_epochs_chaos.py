"""The same micro-batches live, as a backfill, and with kills: a short form of ``make chaos-epochs``."""

from pathlib import Path

import pytest

from tests.chaos.epochs import run_all


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_micro_batches_of_epochs_are_the_same_live_as_a_backfill_and_with_kills(tmp_path: Path) -> None:
    assert "3 rounds" in run_all(3, seed=7, folder=tmp_path)
