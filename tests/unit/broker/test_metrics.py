import errno
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from kera.broker.counters import Counters, PushTotals
from kera.broker.figures import StreamFigures
from kera.broker.heartbeat import HeartbeatReport
from kera.broker.metrics import (
    _FOUND_HELP,
    _HELP,
    _PUSH_HELP,
    _PUSH_NOW_HELP,
    _RECOVERY_HELP,
    _REPLICATION_HELP,
    _TOTALS_HELP,
    BrokerCollector,
    SeriesLimits,
)
from kera.broker.recovery.progress import RecoveryTotals
from kera.broker.replication.virtual_segment import ReplicationTotals
from kera.broker.storage.index_repair import StartFindings
from kera.broker.storage.jobs import RETRY_MS, DiskTotals
from kera.core.base.turns import at_once
from kera.core.rpc import Call, api
from kera.v1 import common_pb2, coordinator_pb2
from tests.metrics import values
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Broker, Engine, chunk, read_range, stream_info


def metrics(broker: Broker, *, everything: bool = False, **limits: int) -> dict[str, float]:
    engine: Any = SimpleNamespace(
        arena=broker.arena,
        memory=broker.engine.memory,
        replication=broker.engine.replication,
        replicator=SimpleNamespace(answer_ms=lambda: {2: 7}),
        restart=broker.engine.restart,
        streams=broker.streams,
        takeovers=SimpleNamespace(totals=RecoveryTotals(segments_to_come=3)),
    )
    collector = BrokerCollector(
        broker.counters,
        broker.pushed,
        broker.broker.latencies,
        engine,
        may_promise=broker.broker.may_promise,
        clock_offset=broker.broker.clock_offset,
        limits=SeriesLimits(**limits),
    )
    return values(collector, everything=everything)


def test_exactly_the_existing_counters_have_help_texts() -> None:
    assert set(_HELP) == {field.name for field in fields(Counters)}
    assert {*_PUSH_HELP, *_PUSH_NOW_HELP, "ends"} == {field.name for field in fields(PushTotals)}
    assert set(_TOTALS_HELP) == {field.name for field in fields(DiskTotals)}
    assert set(_REPLICATION_HELP) == {field.name for field in fields(ReplicationTotals)}
    assert {*_RECOVERY_HELP, "segments_to_come"} == {field.name for field in fields(RecoveryTotals)}
    assert set(_FOUND_HELP) == {field.name for field in fields(StartFindings)}


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


async def test_metrics_show_the_current_counts_and_states(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    broker.paused = True
    before = metrics(broker)
    broker.append(chunk(1, 0, record_count=5), chunk(1, 0, record_count=5), chunk(1, 9))
    broker.streams.open(stream_info(8), BROKER_ID)
    after = metrics(broker)

    assert after["kera_broker_recovery_segments_to_come"] == 3
    assert after['kera_broker_backup_answer_ms{backup="2"}'] == 7
    told = {name: by for name, by in changes(before, after).items() if "_seconds_" not in name}
    assert told == {
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


async def test_metrics_show_flushes_and_errors_of_the_disk(engine: Engine) -> None:
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


async def test_metrics_show_the_findings_of_the_start(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    engine.restart.found.torn_bytes = 17

    assert metrics(broker)["kera_broker_start_torn_bytes"] == 17


async def test_requests_are_counted_by_their_duration(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    broker.append(chunk(1, 0))
    broker.append(chunk(1, 1))
    request = api.MULTI_READ_CHUNKS.request(ranges=[read_range()])
    broker.service[api.MULTI_READ_CHUNKS](Call(request, memoryview(b""), broker.peer))
    found = metrics(broker)

    assert found['kera_broker_append_seconds_count{answered="at_once"}'] == 2
    assert found['kera_broker_append_seconds_bucket{answered="at_once",le="+Inf"}'] == 2
    assert found['kera_broker_append_seconds_sum{answered="at_once"}'] > 0
    assert found['kera_broker_append_seconds_count{answered="later"}'] == 0
    assert found['kera_broker_fetch_seconds_count{answered="at_once"}'] == 1


async def test_each_stream_has_its_own_series_when_everything_is_requested(engine: Engine) -> None:
    broker = Broker(engine, stream_info(), stream_info(STREAM_ID + 1))
    first, second = (stream.name for stream in broker.streams)
    broker.append(chunk(1, 0, record_count=5), chunk(1, 1, record_count=5))
    HeartbeatReport(broker.streams).fill(coordinator_pb2.HeartbeatRequest())
    found = metrics(broker, everything=True)

    assert not any("stream=" in name for name in metrics(broker))
    assert found[f'kera_broker_stream_records_appended_total{{stream="{first}"}}'] == 10
    assert found[f'kera_broker_stream_records_appended_total{{stream="{second}"}}'] == 0
    assert found[f'kera_broker_stream_bytes_appended_total{{stream="{first}"}}'] == 2048
    assert found["kera_broker_streams_left_out"] == 0


async def test_records_of_several_heartbeats_are_added_up(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    (stream,) = broker.streams
    for sequence in range(3):
        broker.append(chunk(1, sequence, record_count=2))
        HeartbeatReport(broker.streams).fill(coordinator_pb2.HeartbeatRequest())

    assert metrics(broker, everything=True)[f'kera_broker_stream_records_appended_total{{stream="{stream.name}"}}'] == 6


async def test_series_are_limited_and_streams_without_series_are_counted(engine: Engine) -> None:
    infos = [stream_info(number) for number in range(1, 6)]
    for info in infos:
        info.name = f"stream-{info.stream_id}"
    broker = Broker(engine, *infos)
    found = metrics(broker, everything=True, streams_max=2)

    assert found["kera_broker_streams"] == 5
    assert found["kera_broker_streams_left_out"] == 3
    assert sorted(name for name in found if name.startswith("kera_broker_stream_streamlets")) == [
        'kera_broker_stream_streamlets{stream="stream-1"}',
        'kera_broker_stream_streamlets{stream="stream-2"}',
    ]


async def test_streams_with_epochs_have_a_lag_without_making_promises(engine: Engine) -> None:
    infos = [
        stream_info(STREAM_ID, epoch_ms=1000, epoch_grace_ms=250),
        stream_info(STREAM_ID + 1),
        stream_info(STREAM_ID + 2, epoch_ms=1000, punctuation=common_pb2.PUNCTUATION_PRODUCERS),
        stream_info(STREAM_ID + 3, epoch_ms=1000, punctuation=common_pb2.PUNCTUATION_PRODUCERS),
    ]
    broker = Broker(engine, *infos)
    engine.memory.tick(0, 9_000_000, idle_close_ms=1 << 40)
    by_clock, _, history, _ = (stream.name for stream in broker.streams)
    broker.append(chunk(1, 0, stream_id=STREAM_ID + 2, min_timestamp_us=2_000_000, max_timestamp_us=2_000_000))
    found = metrics(broker, everything=True)

    lags = {name: value for name, value in found.items() if name.startswith("kera_broker_stream_epoch_lag_ms")}
    assert lags == {
        f'kera_broker_stream_epoch_lag_ms{{stream="{by_clock}"}}': 250,
        f'kera_broker_stream_epoch_lag_ms{{stream="{history}"}}': 7000,
    }
    assert metrics(broker)["kera_broker_epochs_held_up_ms"] == 0, "a history is not behind, and a grace is one"
    assert found["kera_broker_promises_total"] == 0, "a look promises nothing"
    for stream_id in (STREAM_ID, STREAM_ID + 2):
        request = api.DESCRIBE_STREAMLETS.request(stream_id=stream_id, promise=True)
        await broker.ask(api.DESCRIBE_STREAMLETS, request)
    assert metrics(broker)["kera_broker_promises_total"] == len(broker.streams.streamlet(STREAM_ID, 0).entries)

    figures = StreamFigures(broker.streams, lambda: 0, now_us=lambda: 9_000_000, may_promise=broker.broker.may_promise)
    told = at_once(figures.of_streams(0, 10)).streams
    assert [each.epoch_lag_ms if each.HasField("epoch_lag_ms") else None for each in told] == [250, None, 7000, None]
    assert [each.epochs_held_up_ms for each in told] == [0, 0, 0, 0]
    engine.memory.tick(0, 12_000_000, idle_close_ms=1 << 40)
    late = StreamFigures(broker.streams, lambda: 0, now_us=lambda: 12_000_000, may_promise=lambda _: False)
    told_late = at_once(late.of_streams(0, 10)).streams
    assert [each.epochs_held_up_ms for each in told_late] == [12_000 - 8750 - 250, 0, 0, 0]
    assert (told[2].epoch_streamlet_id, told[2].epoch_entry) == (0, 1 % len(broker.streams.streamlet(7, 0).entries))


async def test_a_clock_offset_is_shown_and_holds_up_epochs(engine: Engine) -> None:
    broker = Broker(engine, stream_info(epoch_ms=1000, epoch_grace_ms=250))
    engine.memory.tick(0, 9_000_000, idle_close_ms=1 << 40)
    assert metrics(broker)["kera_broker_clock_offset_seconds"] == 0
    broker.broker.clock_offset.least_us = -2_000_000
    found = metrics(broker)
    assert (found["kera_broker_clock_offset_seconds"], found["kera_broker_epochs_held_up_ms"]) == (-2, 8750)


async def test_consumer_groups_with_commits_have_a_lag(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    (stream,) = broker.streams
    broker.append(*(chunk(1, sequence, record_count=4) for sequence in range(3)))
    entry = stream.streamlets[0].entries.made[0]
    for name, chunks in (("slow", 1), ("done", 3)):
        entry.committed[name] = entry.end._replace(offset=chunks * entry.end.offset // 3)
    found = metrics(broker, everything=True)

    assert found[f'kera_broker_consumer_group_lag_records{{consumer_group="slow",stream="{stream.name}"}}'] == 8
    assert found[f'kera_broker_consumer_group_lag_records{{consumer_group="done",stream="{stream.name}"}}'] == 0
    bounded = metrics(broker, everything=True, consumer_groups_max=1)
    assert sum(name.startswith("kera_broker_consumer_group_lag_records") for name in bounded) == 1
    assert bounded["kera_broker_consumer_group_lags_left_out"] == 1


async def test_figures_of_streams_are_current_and_not_of_the_last_heartbeat(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    broker.streams.open(stream_info(STREAM_ID + 1), BROKER_ID)
    figures = StreamFigures(broker.streams, lambda: 0, now_us=lambda: 0, may_promise=bool)

    def told() -> list[tuple[int, int, int, int]]:
        found = at_once(figures.of_streams(0, 10)).streams
        return [(each.stream_id, each.records_appended, each.bytes_appended, each.streamlets) for each in found]

    broker.append(chunk(1, 0, record_count=5))
    first = told()
    assert first == [(STREAM_ID, 5, 1024, first[0][3]), (STREAM_ID + 1, 0, 0, first[1][3])]
    assert all(streamlets for *_, streamlets in first)
    HeartbeatReport(broker.streams, list).fill(coordinator_pb2.HeartbeatRequest())
    assert told() == first
    broker.append(chunk(1, 1, record_count=2))
    assert told()[0][1:3] == (7, 2048)

    assert at_once(figures.of_streams(0, 1)).more
    rest = at_once(figures.of_streams(STREAM_ID, 1))
    assert ([each.stream_id for each in rest.streams], rest.more) == ([STREAM_ID + 1], False)
