"""Decisions of the experiments and the soak about figures; their measurements are not tested."""

import dataclasses
import itertools
import json
import os
import time
from pathlib import Path

import pytest

from bench.common import ROOT
from bench.experiments import kafka, locality, report
from bench.experiments.__main__ import OUT, chosen, wait_until_quiet
from bench.experiments.catalogue import EXPERIMENTS
from bench.experiments.checksum import ChecksumCost
from bench.experiments.measure import Measured, buffer_bytes_of, processes_of, sample_of, turns, workload_of
from bench.experiments.setup import Claim, Experiment, Metric, Place, Point, Sample, Setup, judge
from bench.soak import Process, Row, Thresholds, compare, cores_of, totals, windows
from kera.cli.bench._worker import Result
from kera.core.base.settings import KIB, MIB


def sample(produced: float, consumed: float | None = None) -> Sample:
    return Sample(produced, consumed, 0.3, 0.2, 0.1, 0.1)


# --- the tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_an_experiment_is_consistent(experiment: Experiment) -> None:
    keys = [(point.series, point.x) for point in experiment.points]
    assert len(set(keys)) == len(keys)
    for claim in experiment.claims:
        assert {claim.over, claim.under} <= set(keys), claim.text
        assert claim.least > 0 or claim.most < float("inf"), claim.text
    for point in experiment.points:
        setup = point.setup
        assert setup.replication <= setup.place.backups
        assert setup.virtual_logs <= setup.streamlets * setup.entries
        assert setup.chunk_bytes <= setup.place.segment_bytes
        open_bytes = setup.streams * setup.streamlets * setup.entries * setup.place.segment_bytes
        assert open_bytes <= setup.place.arena_bytes * setup.place.brokers / 2
        assert setup.place.arena_bytes % setup.place.segment_bytes == 0
        if "consumed" in (experiment.plotted, *(claim.metric for claim in experiment.claims)):
            assert setup.consumer is not None
        workload_of(setup, 1.0)  # the harness accepts the workload


def test_names_and_figures_choose_experiments() -> None:
    assert chosen([]) == list(EXPERIMENTS)
    assert [each.name for each in chosen(["locality", "8.16"])] == ["virtual_logs", "locality"]
    assert chosen([report.CHECKSUM]) == []
    with pytest.raises(SystemExit, match=r"8\.99"):
        chosen(["8.99"])


def test_every_figure_of_chapter_8_has_an_experiment() -> None:
    there = set(itertools.chain.from_iterable(each.figures.split(", ") for each in EXPERIMENTS))
    assert {f"8.{number}" for number in range(3, 18)} <= there


# --- claims --------------------------------------------------------------------------------------------------


def test_a_claim_compares_medians() -> None:
    samples = {("a", 1): [sample(1), sample(2), sample(30)], ("a", 2): [sample(4)]}
    verdict = judge(Claim("grows", ("a", 2), ("a", 1), least=1.5), samples, 2)
    assert verdict.ratio == 2
    assert verdict.words == "yes"
    assert verdict.bounds == "at least 1.5"
    assert judge(Claim("stays", ("a", 2), ("a", 1), least=0.8, most=1.2), samples, 2).words == "missed"


def test_a_claim_can_compare_consumption() -> None:
    samples = {("a", 1): [sample(9, 1)], ("a", 2): [sample(9, 3)]}
    assert judge(Claim("grows", ("a", 2), ("a", 1), metric="consumed"), samples, 2).ratio == 3


def test_a_claim_can_compare_the_work_per_second_of_processor_time() -> None:
    cheaper = dataclasses.replace(sample(100), producers_s_per_gb=0.05, brokers_s_per_gb=0.05)
    claim = Claim("costs less", ("a", 2), ("a", 1), least=2, metric="per_core")
    verdict = judge(claim, {("a", 1): [sample(100)], ("a", 2): [cheaper]}, 2)
    assert verdict.ratio == pytest.approx(0.7 / 0.3)
    assert verdict.ratios["produced"] == 1
    assert verdict.state == "yes"


def test_a_claim_about_an_unmeasured_point_has_no_ratio() -> None:
    verdict = judge(Claim("grows", ("a", 2), ("a", 1), most=5), {("a", 1): [sample(1)]}, 2)
    assert verdict.ratio is None
    assert verdict.state == "not measured"


def test_a_point_without_throughput_is_behind_every_other_point() -> None:
    samples = {("a", 1): [sample(0)], ("a", 2): [sample(1)]}
    assert judge(Claim("is ahead", ("a", 2), ("a", 1), least=1), samples, 2).state == "yes"
    assert judge(Claim("is ahead", ("a", 1), ("a", 2), least=1), samples, 2).state == "missed"


def test_a_claim_about_parallel_work_needs_eight_cores() -> None:
    claim = Claim("grows", ("a", 2), ("a", 1), least=1.5, parallel="brokers work side by side")
    samples = {("a", 1): [sample(1)], ("a", 2): [sample(1)]}
    assert judge(claim, samples, 8).words == "missed"
    assert judge(claim, samples, 7).words == (
        "cannot be shown here: brokers work side by side, which takes 8 cores; here are 7"
    )
    assert judge(claim, {}, 7).words == "not measured"


def test_the_claims_that_need_parallel_work_say_so() -> None:
    parallel = {each.figures for each in EXPERIMENTS for claim in each.claims if claim.parallel}
    assert parallel == {"8.10", "8.12, 8.16", "8.13"}


# --- rounds --------------------------------------------------------------------------------------------------


def test_many_producers_share_few_processes() -> None:
    assert [processes_of(Setup(producers=count)) for count in (1, 2, 64)] == [1, 2, 2]
    workload = workload_of(Setup(producers=64, replication=1, place=Place(backups=1)), 2.0)
    assert (workload.producers, workload.durability, workload.replicas) == (2, "replicated", 1)
    with pytest.raises(ValueError, match="5 producers cannot share 2 processes"):
        workload_of(Setup(producers=5), 2.0)


def test_points_take_turns_and_points_with_very_many_streams_come_last() -> None:
    one, many, two = (Point("a", count, Setup(streams=count)) for count in (1, 10_000, 2))
    assert turns([one, many, two], 2) == [one, two, one, two, many, many]


def test_a_producers_buffer_has_1000_chunks_or_at_least_the_requests_in_flight() -> None:
    assert buffer_bytes_of(Setup(chunk_bytes=16 * KIB)) == 1000 * 16 * KIB
    assert buffer_bytes_of(Setup(chunk_bytes=KIB, request_bytes=MIB)) == 6 * MIB
    assert buffer_bytes_of(Setup(chunk_bytes=MIB)) == 64 * MIB
    assert buffer_bytes_of(Setup(producers=64, request_bytes=128 * KIB)) == 4 * MIB


def test_a_round_becomes_figures_per_gb() -> None:
    played = {
        "produced": {"records": 10_000_000, "bytes": 10**9, "seconds": 2.0},
        "consumed": {"records": 5_000_000, "bytes": 5 * 10**8, "seconds": 2.0},
        "cpu_s": {"producer-0": 0.3, "producer-1": 0.2, "broker-1": 0.4, "backup-1": 0.1, "consumer-0": 0.1},
        "latencies": {},
        "load": 0.25,
    }
    assert sample_of(played) == Sample(500.0, 250.0, 0.5, 0.4, 0.1, 0.2, load=0.25)


def test_the_brokers_cost_of_a_backlog_is_per_gb_read() -> None:
    consumed = {"records": 5_000_000, "bytes": 5 * 10**8, "seconds": 1.0}
    played = {
        "produced": None,
        "consumed": consumed,
        "cpu_s": {"broker-1": 0.1, "consumer-0": 0.2},
        "latencies": {},
        "load": 0.0,
    }
    assert sample_of(played) == Sample(0.0, 500.0, 0.0, 0.2, 0.0, 0.4, load=0.0)


def test_kafka_is_measured_with_the_workloads_of_the_comparison() -> None:
    for experiment in kafka.EXPERIMENTS:
        for x, workload in kafka.workloads(experiment.name):
            assert workload.settings["kafka"]["batch.size"], x
    clients = {x: workload.producers * workload.clients for x, workload in kafka.workloads("kafka_clients")}
    assert clients == {4: 4, 16: 16, 64: 64}


def test_failures_of_a_contestant_are_recorded_at_its_point() -> None:
    measured = Measured()
    kafka.add(measured, ("a", 1), {"reason": None, "rounds": [{"errors": ["lost"]}, {"errors": ["late"]}]})
    kafka.add(measured, ("a", 2), {"reason": "it is not here", "rounds": []})
    assert measured.failures == {("a", 1): "lost; late", ("a", 2): "it is not here"}
    assert measured.samples == {}
    played: dict[str, object] = {"produced": None, "consumed": None, "cpu_s": {}, "latencies": {}, "load": 0}
    kafka.add(measured, ("a", 4), {"reason": None, "rounds": [played | {"errors": []}, {"errors": ["lost"]}]})
    assert (len(measured.samples["a", 4]), measured.failures["a", 4]) == (1, "lost")


def test_the_consumer_that_ends_last_decides_the_rate() -> None:
    producer = Result(10, 1000, 1, 0, 500_000, 0.5, "")
    consumers = [Result(10, 1000, 1, 100, end_ns, 0.25, "") for end_ns in (1_000_000, 2_000_000)]
    daemons_s = {"broker-1": 0.2, "backup-1": 0.1, "backup-2": 0.1, "coordinator": 9.0}
    found = locality.sample_of([producer], consumers, daemons_s)
    assert (found.produced_mb_per_s, found.consumed_mb_per_s) == pytest.approx((2.0, 0.5))
    assert found.consumers_s_per_gb == pytest.approx(0.5 / 1e-6)
    assert (found.brokers_s_per_gb, found.backups_s_per_gb) == pytest.approx((0.2 / 1e-6, 0.2 / 1e-6))


def test_an_experiment_waits_for_a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, times_s = [3.0, 0.4], [0.0, 1.0]
    monkeypatch.setattr(os, "getloadavg", lambda: (loads.pop(0), 0, 0))
    monkeypatch.setattr(time, "monotonic", lambda: times_s.pop(0))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    wait_until_quiet(0.5)
    assert loads == []


def test_a_machine_that_stays_busy_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = [0.0, 1e6]
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0, 0))
    monkeypatch.setattr(time, "monotonic", lambda: times_s.pop(0))
    with pytest.raises(SystemExit, match=r"its load average is 3\.0"):
        wait_until_quiet(0.5)


# --- the page ------------------------------------------------------------------------------------------------

TABLE = Experiment(
    name="table",
    figures="8.4, 8.99",
    title="A table",
    x_label="chunk size, KiB (of something)",
    points=(Point("a", 1, Setup(chunk_bytes=KIB)), Point("a", 64, Setup(chunk_bytes=64 * KIB))),
    thesis="It grows.",
    claims=(Claim("It grows", ("a", 64), ("a", 1), least=2),),
    note="So it does.",
)
MACHINE = {
    "cores": 2,
    "cpu": "a model",
    "memory_bytes": 2**34,
    "file_system": "ext4",
    "kernel": "6",
    "python": "3",
    "load": 0,
}


def found() -> report.Found:
    samples = {("a", 1): [sample(100), sample(120), sample(110)], ("a", 64): [sample(500)]}
    return report.Found(TABLE, MACHINE, 2.0, 3, samples, {})


def test_saved_results_are_loaded_unchanged(tmp_path: Path) -> None:
    report.save(found(), tmp_path)
    assert report.load(TABLE, tmp_path) == found()
    assert json.loads((tmp_path / "table.json").read_text())["claims"][0]["state"] == "yes"
    assert report.load(dataclasses.replace(TABLE, name="another"), tmp_path) is None


def test_results_of_removed_points_are_not_loaded(tmp_path: Path) -> None:
    report.save(found(), tmp_path)
    loaded = report.load(dataclasses.replace(TABLE, points=TABLE.points[:1]), tmp_path)
    assert loaded is not None
    assert list(loaded.samples) == [("a", 1)]


def test_results_of_points_with_a_changed_setup_are_not_loaded(tmp_path: Path) -> None:
    report.save(found(), tmp_path)
    changed = dataclasses.replace(TABLE.points[0], setup=Setup(chunk_bytes=KIB, batch_records=7))
    loaded = report.load(dataclasses.replace(TABLE, points=(changed, TABLE.points[1])), tmp_path)
    assert loaded is not None
    assert list(loaded.samples) == [("a", 64)]


def test_results_older_than_a_setting_have_its_default(tmp_path: Path) -> None:
    report.save(found(), tmp_path)
    path = tmp_path / "table.json"
    document = json.loads(path.read_text())
    for point in document["points"]:
        del point["setup"]["keys"]
    path.write_text(json.dumps(document))
    assert report.load(TABLE, tmp_path) == found()


def test_the_page_has_figures_verdicts_and_the_machine(tmp_path: Path) -> None:
    cost = ChecksumCost({16: 20.0}, {16: 1.0}, {16: 110})
    cost.save(tmp_path / "cost.json")
    assert ChecksumCost.load(tmp_path / "cost.json") == cost
    loaded = {("a", 1): [dataclasses.replace(sample(110), load=load) for load in (0.5, 2.5)]}
    aged = dataclasses.replace(found(), age="7 commits and 2 days ago")
    text = report.page([aged, dataclasses.replace(found(), samples=loaded)], cost)
    assert "| a | 1 | 110 (100-120) | 1.10 | 0.30 + 0.20 + 0.10 + 0.10 | 0.24 |" in text
    assert "| It grows | at least 2 | **4.55** | 1.00 | yes |" in text
    assert "| 8.4, 8.99 | [A table](#figures-84-899-a-table) | 1 yes |" in text
    assert "3 rounds of 2 s. 2 cores (a model), 16 GiB" in text
    assert "Measured 7 commits and 2 days ago." in text
    assert "before points, which come one upon the other: 0.5 to 2.5" in text
    assert "| 16 KiB | 110 | 20.0 | 1.00 | 5% | 5.5 | 5.8 |" in text


def test_the_page_says_why_a_point_failed() -> None:
    failed = dataclasses.replace(found(), samples={}, failures={("a", 1): "the broker is gone"})
    text = report.page([failed], None)
    assert "| a | 1 | the broker is gone |" in text
    assert "| It grows | at least 2 |  |  | not measured |" in text


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_every_claim_was_measured(experiment: Experiment) -> None:
    recorded = report.load(experiment, ROOT / OUT)
    assert recorded is not None, f"make bench RUN='experiments --only {experiment.name}'"
    assert [each.claim.text for each in recorded.verdicts if each.state == "not measured"] == []


@pytest.mark.parametrize(("plotted", "figure"), [("produced", "500 (500-500)"), ("latency", "0 (0-0)")])
def test_the_page_says_how_many_rounds_of_a_point_failed_and_why(plotted: Metric, figure: str) -> None:
    table = dataclasses.replace(TABLE, plotted=plotted)
    failed = dataclasses.replace(found(), experiment=table, failures={("a", 64): "5 records were never seen"})
    text = report.page([failed], None)
    assert f"| a | 64 | {figure}; 2 of 3 rounds have no figure: 5 records were never seen |" in text


def test_the_cost_of_a_call_is_shown_only_for_kera() -> None:
    text = report.page([dataclasses.replace(found(), experiment=dataclasses.replace(TABLE, others=("a",)))], None)
    assert "| a | 1 | 110 (100-120) | 1.10 | 0.30 + 0.20 + 0.10 + 0.10 |  |" in text


# --- the soak ------------------------------------------------------------------------------------------------


def row(number: int, *, p99: float = 2.0, anon: int = 100 * MIB, cpu_s: float | None = None, handles: int = 20) -> Row:
    process = Process(anon, 0, handles, 5, number * 5.0 if cpu_s is None else cpu_s)
    return Row(number, 1000, 1000, {"ack": {"p99": p99}, "end_to_end": {"p99": p99}}, {"broker-1": process})


def drifted(first: list[Row], last: list[Row], limits: Thresholds | None = None) -> list[str]:
    return [finding.what for finding in compare(first, last, 10.0, limits or Thresholds()) if not finding.ok]


def test_windows_are_the_first_and_last_five_minutes_without_the_very_first_interval() -> None:
    rows = [row(number) for number in range(180)]
    first, last = windows(rows, 10.0)
    assert [each.number for each in first] == list(range(1, 31))
    assert [each.number for each in last] == list(range(150, 180))


def test_windows_of_a_short_run_are_thirds() -> None:
    first, last = windows([row(number) for number in range(13)], 5.0)
    assert [each.number for each in first] == [1, 2, 3, 4]
    assert [each.number for each in last] == [9, 10, 11, 12]


def test_constant_figures_are_no_drift() -> None:
    assert drifted([row(1), row(2)], [row(8), row(9)]) == []


def test_slower_acknowledgements_beyond_noise_are_drift() -> None:
    assert drifted([row(1)], [row(8, p99=3.1)]) == ["ack, p99", "end to end, p99"]
    assert drifted([row(1, p99=0.2)], [row(8, p99=0.9)]) == []


def test_one_slow_interval_is_no_drift() -> None:
    assert drifted([row(1), row(2)], [row(7), row(8, p99=900), row(9)]) == []


def test_intervals_without_arrivals_are_drift() -> None:
    silent = dataclasses.replace(row(8), latencies={"ack": {"p99": 2.0}})
    assert drifted([row(1)], [silent]) == ["end to end, p99"]


def test_growing_memory_descriptors_and_processor_time_are_drift() -> None:
    assert drifted([row(1)], [row(8, anon=115 * MIB)]) == []
    assert drifted([row(1)], [row(8, anon=117 * MIB)]) == ["broker-1: own memory"]
    assert drifted([row(1)], [row(8, handles=29)]) == ["broker-1: descriptors"]
    slower = [row(8, cpu_s=40), row(9, cpu_s=47)]
    assert drifted([row(1), row(2)], slower) == ["broker-1: processor"]


def test_processor_time_is_in_cores() -> None:
    assert cores_of("broker-1", [row(1), row(2), row(4)], 10.0) == pytest.approx(0.5)


def test_a_missed_rate_or_missing_records_fail_the_totals() -> None:
    rows = [row(number) for number in range(4)]
    assert [each.ok for each in totals(rows, 100.5, 10.0, 4000, 4000, Thresholds())] == [True, True]
    assert [each.ok for each in totals(rows, 102.0, 10.0, 4000, 3999, Thresholds())] == [False, False]
