"""Two coordinators on a ZooKeeper; the leader is killed or paused under load."""

import random
from pathlib import Path

import pytest

from tests.chaos.control import Chaos
from tests.integration.control_support import control_cluster
from tests.integration.zookeeper import ZooKeeper


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("broker+coordinator", id="in-a-recovery"),
        pytest.param("move+coordinator", id="in-a-move"),
        pytest.param("frozen-coordinator", id="and-wakes"),
    ],
)
async def test_a_lost_leader_leaves_nothing_half_done(
    tmp_path: Path,
    zookeeper: ZooKeeper,
    scenario: str,
) -> None:
    async with (
        control_cluster(
            tmp_path, backups=2, coordinators=2, zookeeper=f"{zookeeper.address}/{scenario.replace('+', '-')}"
        ) as cluster,
        Chaos(cluster, random.Random(7), replication=1) as chaos,
    ):
        await chaos.round(scenario)
