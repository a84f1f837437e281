import errno
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from kera.broker.counters import Counters, PushTotals
from kera.broker.metrics import (
    _FOUND_HELP,
    _HELP,
    _PUSH_HELP,
    _PUSH_NOW_HELP,
    _RECOVERY_HELP,
    _REPLICATION_HELP,
    _TOTALS_HELP,
    BrokerCollector,
)
from kera.broker.recovery.progress import RecoveryTotals
from kera.broker.replication.virtual_segment import ReplicationTotals
from kera.broker.storage.index_repair import StartFindings
from kera.broker.storage.jobs import RETRY_MS, DiskTotals
from tests.unit.broker.support import BROKER_ID, Broker, Engine, chunk, stream_info


def metrics(broker: Broker) -> dict[str, float]:
    engine: Any = SimpleNamespace(
        arena=broker.arena,
        memory=broker.engine.memory,
        replication=broker.engine.replication,
        restart=broker.engine.restart,
        streams=broker.streams,
        takeovers=SimpleNamespace(totals=RecoveryTotals(segments_to_come=3)),
    )
    registry = CollectorRegistry()
    registry.register(BrokerCollector(broker.counters, broker.pushed, engine))
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def test_every_counter_is_explained_and_none_else() -> None:
    assert set(_HELP) == {field.name for field in fields(Counters)}
    assert {*_PUSH_HELP, *_PUSH_NOW_HELP, "ends"} == {field.name for field in fields(PushTotals)}
    assert set(_TOTALS_HELP) == {field.name for field in fields(DiskTotals)}
    assert set(_REPLICATION_HELP) == {field.name for field in fields(ReplicationTotals)}
    assert {*_RECOVERY_HELP, "segments_to_come"} == {field.name for field in fields(RecoveryTotals)}
    assert set(_FOUND_HELP) == {field.name for field in fields(StartFindings)}


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


async def test_metrics_tell_of_now(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    broker.paused = True
    before = metrics(broker)
    broker.append(chunk(1, 0, record_count=5), chunk(1, 0), chunk(1, 9))
    broker.streams.open(stream_info(8), BROKER_ID)
    after = metrics(broker)

    assert after["kera_broker_recovery_segments_to_come"] == 3
    assert changes(before, after) == {
        "kera_broker_write_requests_total": 1,
        "kera_broker_chunks_appended_total": 1,
        "kera_broker_records_appended_total": 5,
        "kera_broker_bytes_appended_total": 1024,
        "kera_broker_chunks_duplicate_total": 1,
        "kera_broker_chunks_refused_total": 1,
        "kera_broker_arena_slots_free": -1,
        "kera_broker_streams": 1,
        'kera_broker_streamlets{state="owned"}': 1,
        'kera_broker_segments{state="head"}': 1,
    }
    assert (after["kera_broker_arena_slots"], after["kera_broker_arena_slot_bytes"]) == (8, 4096)


async def test_metrics_tell_what_the_disk_does(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    broker.paused = True
    broker.append(*(chunk(1, sequence) for sequence in range(5)))
    before = metrics(broker)
    engine.disk.write_error = errno.EIO
    engine.run()
    failing = metrics(broker)
    engine.disk.write_error = 0
    engine.memory.tick(RETRY_MS, idle_close_ms=60_000)
    engine.run()
    after = metrics(broker)

    assert changes(before, failing) == {"kera_broker_disk_errors_total": 1, "kera_broker_disk_failing": 1}
    assert changes(before, after) == {
        "kera_broker_disk_errors_total": 1,
        "kera_broker_segments_flushed_total": 1,
        "kera_broker_bytes_flushed_total": 4096,
    }


async def test_metrics_tell_what_the_start_has_found(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    engine.restart.found.torn_bytes = 17

    assert metrics(broker)["kera_broker_start_torn_bytes"] == 17
