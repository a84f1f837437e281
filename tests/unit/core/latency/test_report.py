from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import InvalidArgument
from kera.core.latency.buckets import BUCKETS
from kera.core.latency.hop import Hop
from kera.core.latency.offset import ANSWERS, Offset, PeerClockOffset
from kera.core.latency.report import (
    CHUNKS_MAX,
    GROUP_BYTES_MAX,
    SAMPLES_MAX,
    Of,
    add_sample,
    checked,
    stream_ids,
)
from kera.core.latency.sample import TIME_US_MAX, Sample
from kera.v1 import latency_pb2


def report_of(**fields: Any) -> latency_pb2.LatencyReport:
    usual: dict[str, Any] = {"stream_id": 7, "hop": 1, "count": 2, "sum_us": 3, "max_us": 2, "buckets": [1, 0, 1]}
    return latency_pb2.LatencyReport(samples=[latency_pb2.HopSample(**usual | fields)])


@given(st.lists(st.integers(0, TIME_US_MAX), min_size=1, max_size=50), st.sampled_from(Hop), st.text(max_size=20))
def test_a_report_survives_the_wire(times: list[int], hop: Hop, group: str) -> None:
    of = Of(1 << 60, 3, hop, group if hop.of_reader else "")
    sample = Sample()
    for us in times:
        sample.add(us)
    report = latency_pb2.LatencyReport()
    add_sample(report, of, sample)
    ((came_of, came),) = checked(latency_pb2.LatencyReport.FromString(report.SerializeToString()))
    assert came_of == of
    assert (came.count, came.sum_us, came.max_us, came.buckets) == (
        sample.count,
        sample.sum_us,
        sample.max_us,
        sample.buckets,
    )


def test_a_report_of_stream_names_only_has_no_samples() -> None:
    report = latency_pb2.LatencyReport()
    for stream_id in (5, 5, 9):
        report.samples.add(stream_id=stream_id)
    assert checked(report) == []
    assert list(stream_ids(report)) == [5, 9]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hop": 7}, "there is no hop 7"),
        ({"hop": 0}, "there is no hop 0"),
        ({"buckets": [0] * BUCKETS + [2]}, "65 buckets, of 64"),
        ({"count": CHUNKS_MAX + 1}, "4294967297 chunks, of 4294967296 at most"),
        ({"buckets": [1]}, "1 chunks in buckets, of 2"),
        ({"count": 0, "buckets": []}, "3 us altogether, of 0 chunks"),
        ({"max_us": TIME_US_MAX + 1, "sum_us": TIME_US_MAX + 1}, "a time of"),
        ({"sum_us": 1}, "1 us altogether"),
        ({"sum_us": 5}, "5 us altogether"),
        ({"consumer_group": "app"}, "a consumer group, which writers are not in"),
        ({"hop": 4, "consumer_group": "ä" * GROUP_BYTES_MAX}, "a consumer group of more than 1024 bytes"),
    ],
)
def test_an_inconsistent_sample_is_refused(fields: dict[str, Any], says: str) -> None:
    checked(report_of())
    with pytest.raises(InvalidArgument, match=says):
        checked(report_of(**fields))


def test_a_report_has_limits() -> None:
    report = latency_pb2.LatencyReport(samples=[latency_pb2.HopSample(stream_id=1)] * SAMPLES_MAX)
    assert checked(report) == []
    report.samples.add(stream_id=1)
    with pytest.raises(InvalidArgument, match="501 samples, and at most 500"):
        checked(report)
    apart: list[dict[str, Any]] = [{"clock_error_us": TIME_US_MAX + 1}, {"clock_ahead_us": -TIME_US_MAX - 1}]
    for clocks in apart:
        with pytest.raises(InvalidArgument, match="clocks that are more than"):
            checked(latency_pb2.LatencyReport(**clocks))
    checked(latency_pb2.LatencyReport(own_linger_us=TIME_US_MAX))
    with pytest.raises(InvalidArgument, match="the linger"):
        checked(latency_pb2.LatencyReport(own_linger_us=TIME_US_MAX + 1))


class TestClockOffset:
    def test_a_new_offset_is_unknown(self) -> None:
        assert PeerClockOffset().best is None

    def test_the_shortest_round_trip_gives_the_offset(self) -> None:
        offset = PeerClockOffset()
        offset.answered(1_000, 1_100, 6_080)
        assert offset.best == Offset(5_030, 50)
        offset.answered(2_000, 2_011, 7_005)
        assert offset.best == Offset(5_000, 6)
        offset.answered(3_000, 4_000, 8_900)
        assert offset.best == Offset(5_000, 6)

    def test_old_answers_are_forgotten_so_that_the_offset_follows_a_drift(self) -> None:
        offset = PeerClockOffset()
        offset.answered(0, 2, 101)
        for number in range(ANSWERS):
            offset.answered(1_000 + number, 1_020 + number, 1_160 + number)
        assert offset.best == Offset(150, 10)

    @given(
        st.lists(st.tuples(st.integers(0, 50_000), st.floats(0, 1)), min_size=1, max_size=30),
        st.integers(-(10**12), 10**12),
        st.sampled_from([0, 5_000_000, -5_000_000]),
    )
    def test_the_offset_is_right_within_its_error(
        self, answers: list[tuple[int, float]], ahead_us: int, jump_us: int
    ) -> None:
        """Holds also after a clock is set, from the next answer on."""
        offset, now_us = PeerClockOffset(), 0
        for number, (round_trip_us, share) in enumerate(answers):
            if number == len(answers) // 2:
                ahead_us += jump_us
            now_us += 1_000_000
            made_us = now_us + int(round_trip_us * share)
            offset.answered(now_us, now_us + round_trip_us, made_us + ahead_us)
            assert offset.best is not None
            assert abs(offset.best.ahead_us - ahead_us) <= offset.best.error_us + 1
