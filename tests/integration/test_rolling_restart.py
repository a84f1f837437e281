"""Planned restarts under load: the short form of the chaos program `restart`, and cases beyond it."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.control import RESTART_SHAPE, Chaos
from tests.integration.control_support import (
    broker_id_of,
    check_log,
    connect,
    control_cluster,
    settle,
    until_registered,
    writer,
)


@pytest.mark.slow
async def test_a_rolling_restart_starts_no_recovery_and_leaves_streamlets_in_place(tmp_path: Path) -> None:
    shape = replace(RESTART_SHAPE, quiet_s=0.0)
    async with (
        control_cluster(tmp_path, brokers=2, backups=2) as cluster,
        Chaos(cluster, random.Random(7), replication=1, shape=shape, rate=20.0) as chaos,
    ):
        # Raises `Wrong` if a recovery has begun, or a streamlet has another owner.
        assert await chaos.round("each-in-turn") == []
        names = [turn.name for turn in chaos.turns]
        assert names == ["backup-1", "backup-2", "broker-1", "broker-2", "coordinator"]
        assert chaos.made_anew_bytes() == 0
        assert chaos.records > 0


async def test_producers_continue_when_the_only_broker_restarts(tmp_path: Path) -> None:
    async with control_cluster(tmp_path, brokers=1, backups=1) as cluster, await connect(cluster) as client:
        await client.admin.create_stream("s", streamlets=2, replication=1)
        async with writer(client, "s") as writing:
            await writing.go_on()
            await cluster.restart("broker-1")
            await until_registered(client, broker_id_of(cluster, "broker-1"))
            await writing.go_on()
            await settle([writing])
            assert await check_log(client, "s", [writing]) == writing.acknowledged


async def test_a_broker_that_stops_without_a_coordinator_keeps_its_data(tmp_path: Path) -> None:
    async with control_cluster(tmp_path, brokers=1, backups=1) as cluster, await connect(cluster) as client:
        await client.admin.create_stream("s", replication=1)
        async with writer(client, "s") as writing:
            await writing.go_on()
            await cluster.kill("coordinator")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(cluster.restart("broker-1"))
                tasks.create_task(cluster.restart("coordinator"))
            await writing.go_on()
            await settle([writing])
            assert await check_log(client, "s", [writing]) == writing.acknowledged
