"""Records that another program changes in the store while a coordinator leads: it restores them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kera.coordinator.operations import rereading
from kera.coordinator.store.leadership import LEADER, TermStore, _Term
from kera.coordinator.store.ledger import Ledger
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import StoredRecord, VersionConflict, Write
from tests.unit.coordinator.fake_cluster import Cluster, until


@pytest.fixture
async def led(cluster: Cluster) -> Cluster:
    """A cluster with three streams."""
    await cluster.register("a")
    for name in ("one", "two", "three"):
        await cluster.create(name)
    return cluster


async def go_round(cluster: Cluster) -> None:
    """Have the coordinator read all records again."""
    again = cluster.coordinator.rereading
    for _ in range(1 + len(cluster.store.records) // rereading.RECORDS_PER_TURN_MIN):
        await again.turn()


def spoil(cluster: Cluster, key: str, record: StoredRecord | None) -> None:
    """Put a record into the store as another program would; None deletes it."""
    if record is None:
        del cluster.store._records[key]
    else:
        cluster.store._records[key] = record


def keys(cluster: Cluster, prefix: str) -> list[str]:
    return sorted(key for key in cluster.store.records if key.startswith(prefix))


async def test_a_record_that_another_program_deletes_or_changes_is_put_back(
    led: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(rereading.log, "error", lambda _, **fields: logged.append(fields))
    before = {key: record.value for key, record in led.store.records.items()}
    first, second, third = keys(led, "streams/")
    spoil(led, first, None)
    spoil(led, second, StoredRecord(b"spoilt", led.store.records[second].version + 1))
    spoil(led, third, led.store.records[third]._replace(version=1000))
    spoil(led, "census/streams", None)
    assert led.coordinator.rereading.problem == ""

    await go_round(led)

    assert {key: record.value for key, record in led.store.records.items()} == before
    assert sorted(key for fields in logged for key in fields["deleted"]) == ["census/streams", first]
    assert sorted(key for fields in logged for key in fields["changed"]) == [second, third]
    assert "in the store, and the coordinator put it back" in led.coordinator.rereading.problem
    await led.create("four")
    await led.alter("one", retention_ms=1000)
    await led.restart()
    assert len(led.coordinator.state.catalog) == 4


async def test_a_record_that_another_program_adds_is_deleted(led: Cluster) -> None:
    before = led.store.records
    spoil(led, "streams/0000000000009999", StoredRecord(b"foreign", 3))
    await go_round(led)
    assert led.store.records == before
    assert led.coordinator.rereading.problem == (
        "another program added record streams/0000000000009999 in the store, and the coordinator deleted it; find the"
        " other writer: only coordinators may write"
    )
    await led.restart()
    assert len(led.coordinator.state.catalog) == 3


async def test_health_shows_a_foreign_change_for_a_while(led: Cluster) -> None:
    (first, *_) = keys(led, "streams/")
    spoil(led, first, None)
    await go_round(led)
    assert led.coordinator.rereading.problem == (
        f"another program deleted record {first} in the store, and the coordinator put it back; find the other writer:"
        " only coordinators may write"
    )
    led.clock.advance(rereading.SHOWN_S + 1)
    assert led.coordinator.rereading.problem == ""


async def test_concurrent_writes_of_the_coordinator_are_left_alone(led: Cluster) -> None:
    writing = asyncio.create_task(led.coordinator.state.change(slow_write(led)))
    await until(lambda: "some/key" in led.store.records, "the first record is written")
    await go_round(led)
    await writing
    assert led.coordinator.rereading.problem == ""
    assert led.store.records["some/key"].value == b"2"


async def slow_write(cluster: Cluster) -> None:
    """Write a record twice, with pauses in which other tasks run."""
    for value in (b"1", b"2"):
        await cluster.coordinator.state.write({"some/key": value})
        for _ in range(20):
            await asyncio.sleep(0)


async def test_each_turn_rereads_a_limited_number_of_records(led: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "RECORDS_PER_TURN_MIN", 2)
    asked: list[str] = []
    get = led.store.get

    async def noted(key: str) -> StoredRecord | None:
        asked.append(key)
        return await get(key)

    monkeypatch.setattr(led.store, "get", noted)
    await led.coordinator.rereading.turn()
    assert len(asked) == 2
    while len(asked) < len(led.store.records):
        await led.coordinator.rereading.turn()
    assert set(asked) == led.store.records.keys() - {LEADER}


async def test_a_coordinator_that_no_longer_leads_puts_no_record_back() -> None:
    store = MemoryStore({LEADER: StoredRecord(b"one", 1), "a": StoredRecord(b"1", 1)})
    ledger = await Ledger.load(TermStore(store, _Term(1, 1, lambda: 0.0)))
    await store.write(Write(LEADER, b"other", 1), Write("a", b"2", 1))
    changed = await ledger.changed_by_others(["a"])
    assert changed == {"a": 2}
    with pytest.raises(VersionConflict):
        await ledger.restore(changed)
    assert (await store.get("a")) == StoredRecord(b"2", 2)
