"""Short runs of ``make fuzz-wire`` with real daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import consumers, daemons, greedy, sessions
from tests.fuzz.daemons import ports_of
from tests.fuzz.secured import STRANGER, secured_cluster

SEED = 7


@pytest.mark.timeout(180)
async def test_daemons_survive_random_input_and_other_clients_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "BATCH", daemons.BATCH_SLOW)
    report = await daemons.run(tmp_path, SEED, 2.0, idle_s=0.5)
    assert report.defects == []
    assert report.verdict == "kept"
    assert report.acknowledged > 0
    assert len(report.inputs) == 20, "each port of a coordinator, two brokers and two backups"
    assert min(report.inputs.values()) >= daemons.BATCH_SLOW


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_secured_daemons_survive_random_input_and_take_little_memory_for_it(
    tmp_path: Path,
) -> None:
    report = await daemons.run(tmp_path, SEED, 10.0, idle_s=1.0, security=True)
    assert report.defects == []
    assert report.verdict == "kept"
    assert len(report.inputs) == 42, "each port over TCP, for who speaks no TLS, a stranger and a user"
    assert len(report.taken_bytes) == 14


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_sizes_announced_by_strangers_take_no_memory_of_a_broker(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "brokers": 1,
        "backups": 1,
        "arena_bytes": 16 << 20,
        "segment_bytes": 1 << 18,
        "replication": 1,
    }
    async with secured_cluster(tmp_path, **sizes) as (cluster, door):
        for port in ports_of(cluster, [STRANGER]):
            if port.role == "broker":
                found = await greedy.taken(port, door.access[STRANGER], cluster.processes[port.daemon])
                assert max(found.values()) < greedy.limit(port), (port, found)


@pytest.mark.timeout(180)
async def test_each_kind_of_consumer_reads_a_poisoned_chunk_or_refuses_it_with_its_place(tmp_path: Path) -> None:
    reports = await consumers.run(tmp_path, SEED, 2.0, commands=1)
    assert [report.defects for report in reports] == [[], [], []]
    for report in reports[:2]:
        assert report.outcomes["corrupt_chunk"] > 0
        assert report.outcomes["read"] > 0


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_client_of_lying_peers_gets_its_answer_or_an_error_of_kera(
    tmp_path: Path,
) -> None:
    report = await sessions.run(tmp_path, SEED, 20.0)
    assert report.defects == []
    assert report.outcomes["done"] > 0
    assert report.outcomes["protocol"] > 0
