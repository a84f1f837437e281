"""Short forms of what ``make fuzz-wire`` does with real daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import consumers, daemons, greedy, sessions
from tests.fuzz.daemons import ports_of
from tests.fuzz.secured import STRANGER, secured_cluster

SEED = 7


@pytest.mark.timeout(180)
async def test_whatever_comes_to_their_ports_daemons_live_and_others_lose_nothing(
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
async def test_whatever_strangers_and_users_send_daemons_that_ask_who_they_are_live_and_take_little_for_them(
    tmp_path: Path,
) -> None:
    report = await daemons.run(tmp_path, SEED, 10.0, idle_s=1.0, security=True)
    assert report.defects == []
    assert report.verdict == "kept"
    assert len(report.inputs) == 42, "each port over TCP, for who speaks no TLS, a stranger and a user"
    assert len(report.taken_bytes) == 14


@pytest.mark.timeout(180)
async def test_what_strangers_say_is_to_come_takes_no_memory_of_a_daemon(tmp_path: Path) -> None:
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
async def test_a_poisoned_chunk_is_read_or_refused_with_its_place_by_each_kind_of_consumer(tmp_path: Path) -> None:
    reports = await consumers.run(tmp_path, SEED, 2.0, commands=1)
    assert [report.defects for report in reports] == [[], [], []]
    for report in reports[:2]:
        assert report.outcomes["corrupt_chunk"] > 0
        assert report.outcomes["read"] > 0


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_client_whose_peers_lie_ends_with_an_error_of_keras_or_with_what_it_has_asked_for(
    tmp_path: Path,
) -> None:
    report = await sessions.run(tmp_path, SEED, 20.0)
    assert report.defects == []
    assert report.outcomes["done"] > 0
    assert report.outcomes["protocol"] > 0
