"""Consumers and brokers are killed or frozen while batches are pushed: the short form of chaos `push`, without
Spark.
"""

from pathlib import Path

import pytest

from tests.chaos.push import CHUNKS_MIN, PUSH

ROUNDS = 6
"""Two of each kind."""


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_killed_and_frozen_participants_of_push_leave_no_lease_and_no_wrong_byte(tmp_path: Path) -> None:
    run = await PUSH.short(tmp_path, rounds=ROUNDS, seed=6, kinds=["consumer", "broker", "frozen"])
    assert run.seen["pushed"] > ROUNDS * CHUNKS_MIN, "consumers were pushed to, before and after"
    assert run.seen["changed"], "memory of a consumer that slept was used again, and it knew"
