"""A coordinator that reaches ZooKeeper over a network with delay and loss is elected, and keeps leading.

With ``KERA_SLOW_NETWORK=1``: it takes the better part of a minute.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from tests.integration import zookeeper
from tests.integration.slow_network import SlowNetwork

ELECTED_S_MAX = 90.0
LEADS_S = 20.0
SESSION_TIMEOUT_MS = 12_000


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("KERA_SLOW_NETWORK"), reason="KERA_SLOW_NETWORK")
@pytest.mark.timeout(180)
async def test_a_coordinator_is_elected_and_leads_with_200_ms_delay_and_ten_percent_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper, "TICK_MS", 2000)  # ZooKeeper's default: sessions take up to 20 ticks
    with zookeeper.ZooKeeper(tmp_path / "zookeeper") as server:
        await elect_and_lead(server.address, tmp_path)


async def elect_and_lead(address: str, data_dir: Path) -> None:
    host, port = address.rsplit(":", 1)
    async with SlowNetwork((host, int(port)), delay_s=0.2, loss=0.1, seed=7) as network:
        environment = {
            **os.environ,
            DIE_WITH_PARENT_VARIABLE: "1",
            "KERA_COORDINATOR_ZOOKEEPER": f"127.0.0.1:{network.port}/slow",
            "KERA_COORDINATOR_ZOOKEEPER_SESSION_TIMEOUT_MS": str(SESSION_TIMEOUT_MS),
            "KERA_COORDINATOR_DATA_DIR": str(data_dir),
            "KERA_COORDINATOR_PORT": "0",
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kera.coordinator"), env=environment, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        try:
            await asyncio.wait_for(until_event(process.stderr, "leading"), ELECTED_S_MAX)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(until_event(process.stderr, "no longer leading"), LEADS_S)
        finally:
            process.kill()
            await process.wait()


async def until_event(log: asyncio.StreamReader, wanted: str) -> None:
    """Read the log of a daemon up to this event."""
    event = ""
    while event != wanted:
        line = await log.readline()
        assert line, "the coordinator has ended"
        event = str(json.loads(line).get("event", "")) if line.startswith(b"{") else ""
