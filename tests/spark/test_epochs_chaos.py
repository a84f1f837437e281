"""Micro-batches live, in a backfill, and with kills: a short form of the chaos program `epochs`."""

from pathlib import Path

import pytest

from tests.chaos.epochs import EPOCHS_CHAOS


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_micro_batches_of_epochs_are_the_same_live_in_a_backfill_and_with_kills(tmp_path: Path) -> None:
    run = await EPOCHS_CHAOS.short(tmp_path, rounds=3, seed=7)
    assert run.seen["rounds"] == 3
