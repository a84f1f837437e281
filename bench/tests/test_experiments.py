"""What the experiments and the soak decide from figures. What they measure is no matter of tests."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from bench.experiments import report
from bench.experiments.__main__ import chosen
from bench.experiments.catalogue import EXPERIMENTS
from bench.experiments.checksum import ChecksumCost
from bench.experiments.measure import buffer_bytes_of, processes_of, sample_of, turns, workload_of
from bench.experiments.setup import Claim, Experiment, Place, Point, Sample, Setup, judge
from bench.soak import Process, Row, Thresholds, compare, cores_of, totals, windows
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
        workload_of(setup, 1.0)  # a workload that the harness takes


def test_names_and_figures_choose_experiments() -> None:
    assert chosen([]) == list(EXPERIMENTS)
    assert [each.name for each in chosen(["locality", "8.16"])] == ["virtual_logs", "locality"]
    assert chosen([report.CHECKSUM]) == []
    with pytest.raises(SystemExit, match=r"8\.99"):
        chosen(["8.99"])


def test_the_figures_of_chapter_8_are_there_but_for_the_one_with_kafka() -> None:
    there = set(itertools.chain.from_iterable(each.figures.split(", ") for each in EXPERIMENTS))
    assert {f"8.{number}" for number in range(3, 18)} - there == {"8.7"}


# --- claims --------------------------------------------------------------------------------------------------


def test_a_claim_compares_medians() -> None:
    samples = {("a", 1): [sample(1), sample(2), sample(30)], ("a", 2): [sample(4)]}
    verdict = judge(Claim("grows", ("a", 2), ("a", 1), least=1.5), samples)
    assert verdict.ratio == 2
    assert verdict.holds
    assert verdict.bounds == "at least 1.5"
    assert not judge(Claim("stays", ("a", 2), ("a", 1), least=0.8, most=1.2), samples).holds


def test_a_claim_may_be_about_what_was_consumed() -> None:
    samples = {("a", 1): [sample(9, 1)], ("a", 2): [sample(9, 3)]}
    assert judge(Claim("grows", ("a", 2), ("a", 1), metric="consumed"), samples).ratio == 3


def test_a_claim_about_what_was_not_measured_does_not_hold() -> None:
    verdict = judge(Claim("grows", ("a", 2), ("a", 1), most=5), {("a", 1): [sample(1)]})
    assert verdict.ratio is None
    assert not verdict.holds


# --- rounds --------------------------------------------------------------------------------------------------


def test_many_producers_share_few_processes() -> None:
    assert [processes_of(Setup(producers=count)) for count in (1, 2, 64)] == [1, 2, 2]
    workload = workload_of(Setup(producers=64, replication=1, place=Place(backups=1)), 2.0)
    assert (workload.producers, workload.durability, workload.replicas) == (2, "replicated", 1)


def test_points_take_turns_and_those_with_very_many_streams_come_last() -> None:
    one, many, two = (Point("a", count, Setup(streams=count)) for count in (1, 10_000, 2))
    assert turns([one, many, two], 2) == [one, two, one, two, many, many]


def test_a_producer_has_1000_chunks_waiting_but_at_least_what_is_in_flight() -> None:
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
    }
    assert sample_of(played) == Sample(500.0, 250.0, 0.5, 0.4, 0.1, 0.2)


def test_of_a_backlog_the_broker_is_counted_per_gb_read() -> None:
    consumed = {"records": 5_000_000, "bytes": 5 * 10**8, "seconds": 1.0}
    played = {"produced": None, "consumed": consumed, "cpu_s": {"broker-1": 0.1, "consumer-0": 0.2}, "latencies": {}}
    assert sample_of(played) == Sample(0.0, 500.0, 0.0, 0.2, 0.0, 0.4)


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


def test_what_was_saved_is_loaded_again(tmp_path: Path) -> None:
    report.save(found(), tmp_path)
    assert report.load(TABLE, tmp_path) == found()
    assert json.loads((tmp_path / "table.json").read_text())["claims"][0]["holds"] is True
    assert report.load(dataclasses.replace(TABLE, name="another"), tmp_path) is None


def test_points_that_an_experiment_has_no_more_are_left_out(tmp_path: Path) -> None:
    report.save(found(), tmp_path)
    loaded = report.load(dataclasses.replace(TABLE, points=TABLE.points[:1]), tmp_path)
    assert loaded is not None
    assert list(loaded.samples) == [("a", 1)]


def test_the_page_has_figures_verdicts_and_the_machine(tmp_path: Path) -> None:
    cost = ChecksumCost({16: 20.0}, {16: 1.0}, {16: 110})
    cost.save(tmp_path / "cost.json")
    assert ChecksumCost.load(tmp_path / "cost.json") == cost
    text = report.page([found()], cost)
    assert "| a | 1 | 110 (100-120) | 1.10 | 0.30 + 0.20 + 0.10 + 0.10 |" in text
    assert "| It grows | at least 2 | 4.55 | yes |" in text
    assert "| 8.4, 8.99 | [A table](#figures-84-899-a-table) | 1 of 1 claims |" in text
    assert "3 rounds of 2 s. 2 cores (a model), 16 GiB" in text
    assert "| 16 KiB | 110 | 20.0 | 1.00 | 5% | 5.5 | 5.8 |" in text


def test_a_point_that_failed_says_why() -> None:
    failed = dataclasses.replace(found(), samples={}, failures={("a", 1): "the broker is gone"})
    text = report.page([failed], None)
    assert "| a | 1 | the broker is gone |" in text
    assert "| It grows | at least 2 | not measured | no |" in text


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


def test_what_stays_as_it_was_has_not_drifted() -> None:
    assert drifted([row(1), row(2)], [row(8), row(9)]) == []


def test_slower_acknowledgements_are_drift_but_for_noise() -> None:
    assert drifted([row(1)], [row(8, p99=3.1)]) == ["ack, p99", "end to end, p99"]
    assert drifted([row(1, p99=0.2)], [row(8, p99=0.9)]) == []


def test_one_slow_interval_is_no_drift() -> None:
    assert drifted([row(1), row(2)], [row(7), row(8, p99=900), row(9)]) == []


def test_intervals_in_which_nothing_arrived_are_drift() -> None:
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


def test_the_rate_is_held_and_all_records_arrive() -> None:
    rows = [row(number) for number in range(4)]
    assert [each.ok for each in totals(rows, 100.5, 10.0, 4000, 4000, Thresholds())] == [True, True]
    assert [each.ok for each in totals(rows, 102.0, 10.0, 4000, 3999, Thresholds())] == [False, False]
