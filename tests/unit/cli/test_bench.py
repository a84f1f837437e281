"""The parts of `kera bench` that need no cluster."""

import json
import os
import time
from typing import Any

import pytest

from kera.cli.bench import _report
from kera.cli.bench._cpu import cpu_model, cpu_seconds
from kera.cli.bench._latency import Latencies
from kera.cli.bench._payload import make_batch, make_value, records_per_chunk
from kera.cli.bench._rounds import MeasuredCluster, Round
from kera.cli.bench._settings import BenchSettings, E2eSettings, arena_bytes_of, backup_memory_bytes_of
from kera.client import StreamConfig
from kera.core.base.settings import MIB, InvalidSettings
from kera.core.format.chunk import chunk_bytes_of
from kera.core.format.schema import DEFAULT_SCHEMA


def settings(kind: type[BenchSettings] = BenchSettings, **fields: Any) -> BenchSettings:
    return kind(**fields)


@pytest.mark.parametrize("record_bytes", [1, 7, 100, 1000])
def test_values_have_exactly_the_requested_length(record_bytes: int) -> None:
    batch = make_batch(record_bytes, 13)

    batch.validate(full=True)
    assert batch.schema == DEFAULT_SCHEMA
    values = batch.column("value").to_pylist()
    assert [len(value) for value in values] == [record_bytes] * 13
    assert record_bytes < 7 or len(set(values)) == 13
    assert len(make_value(record_bytes)) == record_bytes


@pytest.mark.parametrize(("record_bytes", "chunk_bytes"), [(100, 262_144), (1000, 16_384), (10, 1024), (5000, 1024)])
def test_a_full_chunk_takes_as_many_records_as_fit(record_bytes: int, chunk_bytes: int) -> None:
    count = records_per_chunk(record_bytes, chunk_bytes)

    assert count == 1 or chunk_bytes_of(make_batch(record_bytes, count)) <= chunk_bytes
    assert chunk_bytes_of(make_batch(record_bytes, count + 1)) > chunk_bytes


def test_a_slice_of_a_batch_counts_only_its_own_bytes() -> None:
    batch = make_batch(100, 10_000)
    assert chunk_bytes_of(batch.slice(0, 100)) < 100 * 150


def test_encoded_latencies_of_several_processes_add_up() -> None:
    first, second, both = Latencies(), Latencies(), Latencies()
    for time_us in range(1, 101):
        first.add(time_us * 1000)
    second.add(10**9, count=100)
    second.add(200)

    both.add_encoded(first.encode(), second.encode())

    summary = both.summary()
    assert summary is not None
    assert (summary["p50"], summary["samples"]) == (100, 201)
    assert summary["p95"] == summary["max"] == pytest.approx(1_000_000, rel=1e-3)
    assert Latencies().summary() is None


def test_the_processor_time_of_a_process_grows_with_its_work() -> None:
    before = cpu_seconds([os.getpid()])
    deadline = time.process_time() + 0.1
    while time.process_time() < deadline:
        pass
    assert 0.05 < cpu_seconds([os.getpid()]) - before < 10
    assert cpu_seconds([]) == cpu_seconds([2**22 + 1]) == 0, "nobody, and one who has gone"
    assert cpu_model()


@pytest.mark.parametrize(
    ("fields", "records"),
    [
        ({}, 10_000_000),
        ({"bytes": "1MB"}, 10_000),
        ({"records": 5}, 5),
        ({"seconds": 2.0}, 10_000_000),
        ({"seconds": 2.0, "rate": 1000}, 2000),
        ({"seconds": 2.0, "rate": 1000, "bytes": "1MB"}, 10_000),
    ],
)
def test_the_settings_determine_the_number_of_records_of_a_round(fields: dict[str, Any], records: int) -> None:
    assert settings(**fields).records_of(100) == records


def test_the_arenas_hold_a_round_and_brokers_share_it() -> None:
    segment_bytes = 8 * MIB
    one = arena_bytes_of(settings(), segment_bytes)
    assert one > chunk_bytes_of(make_batch(100, 10_000)) * 1000
    assert one % segment_bytes == 0
    assert one / 2 < arena_bytes_of(settings(brokers=2), segment_bytes) < one * 0.6
    assert arena_bytes_of(settings(record_bytes=("100", "1000")), segment_bytes) == one
    assert arena_bytes_of(settings(arena_bytes="1GiB"), segment_bytes) == 1 << 30
    # At a fixed rate, each chunk may have only one record.
    assert arena_bytes_of(settings(E2eSettings), segment_bytes) > 5000 * 1100


def test_the_backups_together_have_memory_for_all_replicas_of_a_round() -> None:
    segment_bytes = 8 * MIB
    one = backup_memory_bytes_of(settings(backups=1, replication=1), segment_bytes)
    assert one % segment_bytes == 0
    assert one >= arena_bytes_of(settings(), segment_bytes) - 2 * segment_bytes
    spread = settings(backups=4, replication=2, brokers=2, streamlets=8, virtual_logs=8)
    assert one / 2 < backup_memory_bytes_of(spread, segment_bytes) < one
    assert backup_memory_bytes_of(settings(backups=1, backup_memory_bytes="1GiB"), segment_bytes) == 1 << 30


def test_replication_needs_backups_unless_the_benchmark_uses_an_external_cluster() -> None:
    with pytest.raises(InvalidSettings, match="replication 2 needs as many backups, and there are 1"):
        BenchSettings.load(replication=2, backups=1)
    assert BenchSettings.load(replication=2, bootstrap="x:1").replication == 2


def rounds(*seconds: float, **more: Any) -> list[Round]:
    latencies = Latencies()
    latencies.add(500_000, 10)
    return [Round(1_000_000, 100_000_000, s, 0.5, 0.0, 0.25, 0, [latencies.encode()], **more) for s in seconds]


def test_a_report_shows_the_replication_of_the_stream() -> None:
    config = StreamConfig(1, 0, 1, 16, "replicated", "none", replication=2, virtual_logs=1)
    place = MeasuredCluster("x:1", [1], own=True, backup_pids=[2, 3])
    one = _report.make("produce", settings(backups=2), place, 100, rounds(0.5, config=config, backups_cpu_s=0.125))

    assert (one["backups"], one["replication"], one["virtual_logs"], one["durability"]) == (2, 2, 1, "replicated")
    assert one["backups_cpu_s"]["median"] == 0.125
    title, *_, row = _report.to_table([one]).split("\n")
    assert title.endswith(
        "time to acknowledgement; level replicated, replication on 2 backups (of 2) through 1 virtual log"
    )
    assert row.endswith("producers 5.00 s/GB, brokers 2.50 s/GB, backups 1.25 s/GB")


def test_processor_time_is_measured_for_brokers_and_backups_separately() -> None:
    place = MeasuredCluster("x:1", [os.getpid()], own=True, backup_pids=[])
    brokers_s, backups_s = place.cpu_seconds()
    assert brokers_s > backups_s == 0


def test_a_report_has_median_minimum_and_maximum() -> None:
    report = _report.make("produce", settings(), MeasuredCluster("x:1", [1], own=True), 100, rounds(0.25, 1.0, 0.5))

    assert json.loads(_report.to_line(report)) == report
    assert report["mb_per_s"] == {"median": 200, "min": 100, "max": 400}
    assert report["m_records_per_s"] == {"median": 2, "min": 1, "max": 4}
    assert report["records"] == {"median": 1_000_000, "min": 1_000_000, "max": 1_000_000}
    assert report["latency_us"] == {"p50": 500, "p95": 500, "p99": 500, "max": 500, "samples": 30}
    assert report["latency_of"] == "acknowledgement"
    assert report["brokers_cpu_s"]["median"] == 0.25
    assert report["consumers_cpu_s"] is report["records_per_chunk"] is report["read"] is None
    assert report["cores"] == os.cpu_count()
    assert report["versions"].keys() >= {"kera", "python", "pyarrow", "grpcio"}


def test_the_table_has_a_row_per_result() -> None:
    place = MeasuredCluster("x:1", [1], own=True)
    reports = [_report.make("produce", settings(), place, size, rounds(0.5)) for size in (100, 1000)]

    title, _, heading, *rows = _report.to_table(reports).split("\n")

    assert title == "kera bench produce: median of 1 round; time to acknowledgement"
    assert " ".join(heading.split()) == "RECORD CHUNK MB/s (MIN-MAX) M REC/s p50 µs p95 p99 MAX CPU"
    assert [row.split()[0] for row in rows] == ["100", "1000"]
    assert rows[0].endswith("500  500  500  500  producers 5.00 s/GB, brokers 2.50 s/GB")


def test_processor_time_at_a_fixed_rate_is_a_share_of_a_core() -> None:
    one = _report.make("e2e", settings(E2eSettings), MeasuredCluster("x:1", [], own=False), 100, rounds(1.0))
    one["brokers_cpu_s"] = None
    assert _report.to_table([one]).endswith("producers 50%, consumers 0%")
