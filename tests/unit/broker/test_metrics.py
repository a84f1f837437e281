from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest

from kera.broker.arena import Arena
from kera.broker.metrics import _HELP, BrokerCollector, Counters
from kera.broker.stream import Streams
from tests.unit.broker.support import BROKER_ID, Broker, chunk, stream_info


def metrics(counters: Counters, arena: Arena, streams: Streams) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(BrokerCollector(counters, arena, streams))
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def test_every_counter_is_explained_and_none_else() -> None:
    assert set(_HELP) == {field.name for field in fields(Counters)}


async def test_metrics_tell_of_now(arena: Arena) -> None:
    broker = Broker(arena, stream_info())
    before = metrics(broker.counters, arena, broker.streams)
    broker.append(chunk(1, 0, record_count=5), chunk(1, 0), chunk(1, 9))
    broker.streams.open(stream_info(8), BROKER_ID)
    after = metrics(broker.counters, arena, broker.streams)

    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "kera_broker_write_requests_total": 1,
        "kera_broker_chunks_appended_total": 1,
        "kera_broker_records_appended_total": 5,
        "kera_broker_bytes_appended_total": 256,
        "kera_broker_chunks_duplicate_total": 1,
        "kera_broker_chunks_refused_total": 1,
        "kera_broker_arena_slots_free": -1,
        "kera_broker_streams": 1,
    }
    assert (after["kera_broker_arena_slots"], after["kera_broker_arena_slot_bytes"]) == (8, 1024)
