"""Decisions of the benchmark of a path about records and figures; its measurements are not tested."""

import itertools
import struct

import pytest

from bench.experiments.latency import CONSTRAINT, FULL, PATH, PATH_RATE, UNTIL, WINDOW, samples_of
from bench.experiments.setup import judge
from bench.latency_path import CHUNK_BYTES, Arrival, Merger, Phase, Run, bars, law, lets_fill, mean_and_rate, next_size
from kera.client import LatencyDescription
from kera.v1 import latency_pb2


def value(number: int, sent_us: int) -> bytes:
    return struct.pack("<QQ", number, sent_us) + b"rest"


def described(*hops_us: int) -> LatencyDescription:
    hops = [
        latency_pb2.HopDescription(stream="packets", hop=hop, mean_us=us)
        for hop, us in zip((latency_pb2.HOP_GATHER, latency_pb2.HOP_SEND), hops_us, strict=False)
    ]
    return LatencyDescription.from_message(latency_pb2.LatencyDescription(hops=hops))


def test_merged_inputs_keep_the_earliest_send_time() -> None:
    merger = Merger(3)
    assert list(merger.take([value(1, 50), value(2, 60), value(1, 40)])) == []
    assert list(merger.take([value(2, 61), value(1, 70), value(3, 80)])) == [value(1, 40)]
    assert list(merger.take([value(2, 59)])) == [value(2, 59)]


def test_means_weight_records_and_rates_span_the_arrivals() -> None:
    arrivals = [Arrival(10.0, 100, 50.0), Arrival(12.0, 300, 90.0)]
    assert mean_and_rate(arrivals) == (80.0, 150.0)
    with pytest.raises(SystemExit, match="longer window"):
        mean_and_rate(arrivals[:1])


def test_the_papers_law_shrinks_chunks_that_wait_and_grows_others() -> None:
    assert next_size(CHUNK_BYTES, 100) == int(CHUNK_BYTES * 0.98**100)
    assert next_size(CHUNK_BYTES, 3_000) == 200
    assert next_size(1_000, 0.0) == 1_100
    assert next_size(CHUNK_BYTES, 0.0) == CHUNK_BYTES
    assert next_size(1_000, 3.0) == 1_000


def test_the_papers_law_continues_until_the_constraint_is_held() -> None:
    steps = law([2_000, 2_000, 2_000], [4, 1, 1], rest_ms=10, limit_ms=100, window_s=15)
    assert [step.mean_ms <= 100 for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) > 1
    assert all(later.at_s - step.at_s >= 15 for step, later in itertools.pairwise(steps))
    assert steps[-1].chunks_per_s > steps[0].chunks_per_s
    never = law([100, 100, 100], [4, 1, 1], rest_ms=400, limit_ms=300, window_s=15, most=7)
    assert len(never) == 7


def test_hops_are_drawn_to_one_scale() -> None:
    lines = bars(described(2_000_000, 1_000), described(100_000, 1_000)).splitlines()
    assert lines[2] == f"| packets | gather | 2,000.0 | 100.0 | `{'#' * 40} / ##` |"
    assert lines[3].endswith("| 1.0 | 1.0 | `. / .` |")


def test_a_path_lets_chunks_fill_when_all_its_streams_have_advice() -> None:
    def advised(*gather_us: int) -> LatencyDescription:
        hops = [latency_pb2.HopDescription(hop=latency_pb2.HOP_GATHER, advised_us=us) for us in gather_us]
        return LatencyDescription.from_message(latency_pb2.LatencyDescription(hops=hops))

    assert lets_fill(advised(5, 5, 5))
    assert not lets_fill(advised(5, 0, 5))


def test_the_claims_about_a_path_are_judged_by_its_run() -> None:
    before = Phase(4_000.0, 60.0, 2.0, 300.0, described())
    good = Run(before, before._replace(mean_ms=200.0), 2.0)
    assert [holds(good, at) for at in range(3)] == [True, True, True]
    bad = Run(before, before._replace(mean_ms=400.0, rate=50.0), float("inf"))
    assert [holds(bad, at) for at in range(3)] == [False, False, False]


def holds(run: Run, claim: int) -> bool:
    found = samples_of(run)
    assert list(found) == [FULL, CONSTRAINT, UNTIL, WINDOW]
    samples = {(series, PATH_RATE): [one] for series, one in found.items()}
    return judge(PATH.claims[claim], samples, 2).state == "yes"
