"""Whoever has to do with push is killed, mid-batch: the short form of ``make chaos-push``, without Spark."""

import random
from pathlib import Path

import pytest

from tests.chaos import push

ROUNDS = 6
"""Two of each kind."""


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_killed_and_frozen_consumers_and_brokers_leave_no_lease_and_give_no_wrong_byte(tmp_path: Path) -> None:
    kinds = ["consumer", "broker", "frozen"]
    with push.cluster_of(tmp_path, push.SMALL) as cluster:
        seen = await push.run(cluster, ROUNDS, random.Random(6), kinds)
    assert seen["pushed"] > ROUNDS * push.CHUNKS_MIN, "consumers were pushed to, before and after"
    assert seen["changed"], "memory of a consumer that slept was used again, and it knew"
