"""Health: a broker names the slow backup whose answer it waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kera.backup.service import BackupService
from kera.broker.health import SLOW_MS, watch_log
from kera.core.base.health import Health, State
from tests.unit.broker.takeover_support import Cluster, owned_by


async def test_a_broker_names_the_backup_whose_answer_it_waits_for(
    world: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, held = world.nodes[1], asyncio.Event()
    info = owned_by(1, world.epoch(), entries=1, replication=3)
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    await node.write(*world.chunks(0, 1))
    health, replicate = Health(), BackupService.replicate
    watch_log(health, node.engine)

    def backups() -> tuple[State, str]:
        return next((each.state, each.text) for each in health.checks() if each.name == "backups")

    assert backups() == (State.OK, "3 can be used, and answer in time")

    def slow(service: BackupService, call: Any) -> Any:
        answer = replicate(service, call)
        if service._engine is not world.backups[1].engine:
            return answer

        async def later() -> Any:
            await held.wait()
            return answer if not asyncio.isfuture(answer) else await answer

        return later()

    with monkeypatch.context() as context:
        context.setattr(BackupService, "replicate", slow)
        for backup in world.backups:
            await backup.stop()
            await backup.start()
        node.told()
        await node.until(lambda: node.engine.replication.backups.up_count == 3)
        writing = asyncio.create_task(node.write(*world.chunks(0, 1)))
        await node.until(lambda: node.engine.replicator.answer_ms()[2] >= SLOW_MS)
        state, text = backups()
        assert state is State.WARNING
        assert text.startswith("writers wait for backup 2, which takes ")
        held.set()
        assert not any(status.error.code for status in await writing)
    await node.stop()
