"""Latency reports of producers: they measure streams with a latency constraint, and follow advice."""

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.client.producing.lanes.lane import Lane, LaneIdentity, PendingChunk
from kera.client.producing.lanes.lane_columns import LaneColumns
from kera.client.producing.latency.broker_times import BROKERS_MAX, KEPT_S, BrokerTimes
from kera.client.producing.latency.pace import ADVICE_MAX, ADVISED_S_MAX, MARGIN, VALID_S_MAX, Pace
from kera.client.producing.latency.writer_reports import WriterReports
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from kera.client.types import StreamDescription
from kera.core.base.clock import FakeClock
from kera.core.format.chunk import Codec
from kera.core.latency.hop import Hop
from kera.core.latency.report import INTERVAL_S, SAMPLES_MAX, checked
from kera.core.latency.sample import TIME_US_MAX
from kera.v1 import broker_pb2, latency_pb2
from tests.unit.client.support import BROKER_ID, broker_info, stream_info
from tests.unit.client.virtual_support import Ways, virtually

STREAM_ID = 7
LINGER_US = 40_000


def advice(linger_us: int = LINGER_US, valid_ms: int = 5_000, stream_id: int = STREAM_ID) -> latency_pb2.WriterAdvice:
    return latency_pb2.WriterAdvice(stream_id=stream_id, linger_us=linger_us, valid_ms=valid_ms)


def advised() -> Pace:
    pace = Pace(ProducerSettings())
    pace.advise([advice()], 1.0)
    return pace


def described(*, typed: bool = False, epoch_ms: int = 0) -> StreamDescription:
    schema = pa.schema([("n", pa.int64())]) if typed else None
    return StreamDescription.from_message(stream_info(schema=schema, epoch_ms=epoch_ms), [broker_info()])


class TestAdvice:
    def test_advice_counts_until_it_expires(self) -> None:
        pace = Pace(ProducerSettings())
        pace.advise([advice()], 1.0)
        assert (pace.holds, pace.wait_s(STREAM_ID, 5.9), pace.wait_s(STREAM_ID, 6.1)) == (True, 0.04, 0.0)
        assert pace.wait_s(8, 5.0) == 0.0

    def test_expired_advice_is_forgotten(self) -> None:
        pace = Pace(ProducerSettings())
        pace.advise([advice()], 1.0)
        kept = []
        for now_s in (5.9, 6.1):
            pace.advise([], now_s)
            kept.append((pace.advised, pace.holds))
        assert kept == [(True, True), (False, False)]

    def test_an_explicit_linger_wins_over_advice_and_is_still_measured(self) -> None:
        pace = Pace(ProducerSettings(linger_ms=2))
        pace.advise([advice()], 1.0)
        assert (pace.wait_s(STREAM_ID, 2.0), pace.is_advised(STREAM_ID)) == (0.002, True)

    def test_extreme_advice_is_bounded(self) -> None:
        pace = Pace(ProducerSettings(delivery_timeout_ms=1 << 40))
        most = (1 << 32) - 1
        pace.advise([advice(most, most, number) for number in range(ADVICE_MAX + 5)], 0.0)
        assert pace.wait_s(0, VALID_S_MAX - 1) == min(most / 1e6, ADVISED_S_MAX)
        assert pace.wait_s(0, VALID_S_MAX + 1) == 0.0
        assert not pace.is_advised(ADVICE_MAX)

    @given(st.integers(0, (1 << 32) - 1), st.floats(1, 10_000), st.floats(0, 20))
    def test_advice_never_delays_a_chunk_beyond_the_deadline_of_a_target(
        self, linger_us: int, target_ms: float, took_s: float
    ) -> None:
        pace = Pace(ProducerSettings(latency_target_ms=target_ms))
        chunk: Any = type("Chunk", (), {"closed_s": 0.0})()
        pace.acknowledged([chunk], took_s)
        pace.advise([advice(linger_us)], took_s)
        wait_s = pace.wait_s(STREAM_ID, took_s)
        assert wait_s <= max(0.0, target_ms / 1000 * (1 - MARGIN) - took_s + 1e-6)
        assert wait_s <= linger_us / 1e6


def requests_of(ways: Ways) -> list[broker_pb2.MultiWriteChunksRequest]:
    """All requests that are sent from now on."""
    loopback = ways.cluster.loopback
    seen: list[broker_pb2.MultiWriteChunksRequest] = []
    submit = loopback.submit

    def submitted(method: Any, message: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(message, broker_pb2.MultiWriteChunksRequest):
            seen.append(message)
        return submit(method, message, *arguments, **options)

    loopback.submit = submitted  # type: ignore[method-assign]
    return seen


def constrain(ways: Ways, gather_us: int = LINGER_US) -> None:
    budget = latency_pb2.StreamBudget(stream_id=STREAM_ID, window_ms=60_000, gather_us=gather_us)
    ways.cluster.plugins.latency.set_budgets(1, [budget])


async def send_for(producer: Producer, seconds: float, *, streamlets: int = 1) -> None:
    loop, number = asyncio.get_running_loop(), 0
    until_s = loop.time() + seconds
    while loop.time() < until_s:
        producer.send("s", b"x", streamlet=number % streamlets)
        number += 1
        await asyncio.sleep(0.001)  # sleep: virtual time
    await producer.flush()


def test_reports_name_only_the_streams_when_no_constraint_exists() -> None:
    async def main(ways: Ways, producer: Producer) -> tuple[int, list[latency_pb2.LatencyReport]]:
        seen = requests_of(ways)
        await send_for(producer, 4 * INTERVAL_S)
        return len(seen), [each.latency for each in seen if each.HasField("latency")]

    requests, reports = virtually(1, 0.002, main)[1]
    assert requests > 1_000
    assert 3 <= len(reports) <= 4
    for report in reports:
        assert [(sample.stream_id, sample.count, sample.hop) for sample in report.samples] == [(STREAM_ID, 0, 0)]


@pytest.mark.parametrize("ahead_us", [-54 * 365 * 86_400_000_000, -TIME_US_MAX - 10_000_000, TIME_US_MAX + 10_000_000])
def test_a_wrong_clock_leaves_reports_valid(ahead_us: int) -> None:
    """A broker that refuses a report also refuses the chunks beside it, with a constraint and without."""
    told_us = 60 * 365 * 86_400_000_000
    times = BrokerTimes()
    times.own.add(STREAM_ID)
    reports = WriterReports(BROKER_ID, times, advised(), 60.0, lambda: told_us + ahead_us, 0.0)
    reports.answered(0.9, broker_pb2.MultiWriteChunksResponse(broker_time_us=told_us), INTERVAL_S)
    chunk: Any = PendingChunk.__new__(PendingChunk)
    chunk.closed_s, chunk.deadline_s = 1.2, 61.1
    chunk.lane = Lane(LaneIdentity("s", STREAM_ID, 0, 1, Codec.NONE, typed=True), LaneColumns(1, 1))
    reports.delivered([], [chunk], 1.3)
    request = broker_pb2.MultiWriteChunksRequest()
    assert reports.add_to(request, lambda: [STREAM_ID], 2 * INTERVAL_S)
    assert [(of.stream_id, of.hop) for of, _ in checked(request.latency)] == [
        (STREAM_ID, Hop.GATHER),
        (STREAM_ID, Hop.SEND),
    ]
    assert request.latency.clock_ahead_us == 0


class TestTimes:
    def test_chunks_of_streams_with_advice_have_the_brokers_time(self) -> None:
        times = BrokerTimes()
        times.answered(BROKER_ID, 10.0, 10.02, 7_000_000)
        assert times.created_us(BROKER_ID, described(), 11.0) is None  # no reader measures the stream
        times.advised([STREAM_ID], 10.0)
        assert times.created_us(BROKER_ID, described(), 11.0) == 7_000_000 + 990_000
        assert times.created_us(BROKER_ID + 1, described(), 11.0) is None
        assert times.created_us(BROKER_ID, described(), 11.0 + KEPT_S) is None
        assert times.created_us(BROKER_ID, described(), 11.0) is None  # the broker's time is forgotten

    def test_a_stream_whose_epochs_go_by_the_writers_time_keeps_that_time(self) -> None:
        times = BrokerTimes()
        times.answered(BROKER_ID, 10.0, 10.02, 7_000_000)
        times.advised([STREAM_ID], 10.0)
        assert times.created_us(BROKER_ID, described(typed=True, epoch_ms=1_000), 11.0) is None
        assert times.own == {STREAM_ID}
        assert times.created_us(BROKER_ID, described(typed=True), 11.0) is not None

    def test_the_times_of_a_limited_number_of_brokers_are_kept(self) -> None:
        times = BrokerTimes()
        for broker_id in range(BROKERS_MAX + 1):
            times.answered(broker_id, 10.0, 10.02, 7_000_000)
        assert times.best(BROKERS_MAX - 1) is not None
        assert times.best(BROKERS_MAX) is None


@pytest.mark.parametrize("is_batch", [False, True])
def test_chunks_that_readers_measure_carry_the_brokers_time_despite_a_wrong_clock(is_batch: bool) -> None:
    """Measured chunks and bundles of a batch have the broker's time, however wrong the writer's is."""

    async def main(ways: Ways, producer: Producer) -> list[int]:
        constrain(ways, gather_us=1_000)
        await send_for(producer, 3 * INTERVAL_S)
        before, wrong_us = len(ways.cluster.loopback.writes), []
        for _ in range(5):
            if is_batch:
                rows = pa.record_batch({"value": [b"x"] * 6, "keys": [[b"%d" % each] for each in range(6)]})
                delivery: Any = await producer.send_batch("s", rows)
            else:
                delivery = producer.send("s", b"x")
            broker_us = ways.cluster.plugins.latency.now_us()
            await delivery
            for write in ways.cluster.loopback.writes[before:]:
                wrong_us += [abs(chunk.created_us - broker_us) for chunk in write]
            before = len(ways.cluster.loopback.writes)
        return wrong_us

    clock = FakeClock()  # the producer's clock is years behind
    wrong_us = virtually(2, 0.002, main, clock=clock)[1]
    assert wrong_us
    assert max(wrong_us) < 60_000_000


@pytest.mark.parametrize(("linger_ms", "told_us"), [(None, 0), (0, 0), (2, 2_000), (float("inf"), TIME_US_MAX)])
def test_a_report_names_an_explicit_linger(linger_ms: float | None, told_us: int) -> None:
    pace = Pace(ProducerSettings(linger_ms=linger_ms))
    reports = WriterReports(BROKER_ID, BrokerTimes(), pace, 60.0, lambda: 1, 0.0)
    request = broker_pb2.MultiWriteChunksRequest()
    assert reports.add_to(request, lambda: [STREAM_ID], 2 * INTERVAL_S)
    assert checked(request.latency) == []
    assert request.latency.own_linger_us == told_us


def test_the_first_request_says_how_long_a_broker_may_hold_it_back() -> None:
    for linger_ms, told in ((None, False), (0, True)):
        reports = WriterReports(
            BROKER_ID, BrokerTimes(), Pace(ProducerSettings(linger_ms=linger_ms)), 60.0, lambda: 1, 5.0
        )
        request = broker_pb2.MultiWriteChunksRequest()
        assert reports.add_to(request, lambda: [STREAM_ID], 5.0) == told
        assert request.latency.HasField("held_us_max") == told
        assert [each.stream_id for each in request.latency.samples] == [STREAM_ID] * told


def test_chunks_fill_and_are_measured_under_a_constraint() -> None:
    async def main(ways: Ways, producer: Producer) -> list[broker_pb2.MultiWriteChunksRequest]:
        constrain(ways)
        seen = requests_of(ways)
        await send_for(producer, 5 * INTERVAL_S, streamlets=2)
        return seen

    ways, seen = virtually(2, 0.002, main)
    advised = seen[[each.HasField("latency") for each in seen].index(True) + 2 :]
    assert len(advised) < 4 / (LINGER_US / 1e6) * 2.5
    report = next(each.latency for each in reversed(seen) if each.HasField("latency"))
    samples = {(sample.streamlet_id, sample.hop): sample for sample in report.samples}
    assert samples.keys() == {(streamlet, hop) for streamlet in (0, 1) for hop in (Hop.GATHER, Hop.SEND)}
    for (_, hop), sample in samples.items():
        assert sample.count > 5
        assert sample.max_us <= (LINGER_US if hop == Hop.GATHER else 2_000) + 1_100
    assert report.clock_error_us > 0
    figures = {each.hop: each for each in ways.cluster.plugins.latency.figures()}
    assert LINGER_US * 0.8 <= figures[Hop.GATHER].mean_us <= LINGER_US + 1_000


def test_chunks_go_at_once_and_unmeasured_after_advice_ends() -> None:
    async def main(ways: Ways, producer: Producer) -> tuple[int, int]:
        constrain(ways)
        await send_for(producer, 3 * INTERVAL_S)
        ways.cluster.plugins.latency.set_budgets(2, [])
        await send_for(producer, 6 * INTERVAL_S)
        seen = requests_of(ways)
        await send_for(producer, 2 * INTERVAL_S)
        return len(seen), sum(bool(sample.count) for each in seen for sample in each.latency.samples)

    requests, samples = virtually(1, 0.002, main)[1]
    assert requests > 500
    assert samples == 0


def test_samples_of_many_streamlets_go_in_several_reports() -> None:
    streamlets = SAMPLES_MAX // 2 + 30

    async def main(ways: Ways, producer: Producer) -> list[list[int]]:
        constrain(ways, gather_us=900_000)
        await send_for(producer, 2.5 * INTERVAL_S, streamlets=1)
        seen = requests_of(ways)
        for streamlet in range(streamlets):
            producer.send("s", b"x", streamlet=streamlet)
        for _ in range(3):
            await asyncio.sleep(INTERVAL_S)  # sleep: virtual time
            await producer.send("s", b"x", streamlet=0)
        return [[sample.streamlet_id for sample in each.latency.samples if sample.count] for each in seen]

    told = virtually(streamlets, 0.002, main, chunk_bytes_max=1_000)[1]
    assert max(map(len, told)) <= SAMPLES_MAX
    assert {streamlet for each in told for streamlet in each} == set(range(streamlets))


@pytest.mark.parametrize("answers_after_s", [0.001, 0.3])
def test_the_shorter_of_target_and_constraint_bounds_the_wait(answers_after_s: float) -> None:
    """The shorter of the two counts."""

    async def main(ways: Ways, producer: Producer) -> float:
        constrain(ways, gather_us=500_000)
        await send_for(producer, 2 * INTERVAL_S)
        accepted_s = asyncio.get_running_loop().time()
        await producer.send("s", b"x")
        return ways.sent_s[-1] - accepted_s

    waited_s = virtually(1, answers_after_s, main, latency_target_ms=100)[1]
    assert waited_s <= max(0.0, 0.09 - answers_after_s) + 0.001


def test_reports_go_without_chunks_while_chunks_fill_for_long() -> None:
    """Chunks take longer to fill than advice counts: reports go without chunks, and do not make a chunk go early."""

    async def main(ways: Ways, producer: Producer) -> list[tuple[int, bool]]:
        constrain(ways, gather_us=3_600_000_000)
        await send_for(producer, 1.5 * INTERVAL_S)
        seen, loop = requests_of(ways), asyncio.get_running_loop()
        until_s = loop.time() + 30
        while loop.time() < until_s:
            producer.send("s", b"x" * 100, streamlet=0)
            await asyncio.sleep(0.025)  # sleep: virtual time
        return [(each.chunk_count, any(sample.count for sample in each.latency.samples)) for each in seen]

    seen = virtually(1, 0.002, main, chunk_bytes_max=32 << 10)[1]
    chunks = [count for count, _ in seen if count]
    assert 4 <= len(chunks) <= 6
    assert set(chunks) == {1}
    assert 20 <= len(seen) <= 32
    told = [number for number, (_, with_samples) in enumerate(seen) if with_samples]
    with_chunks = [number for number, (count, _) in enumerate(seen) if count]
    assert len(told) >= len(chunks) - 1
    assert all(any(0 <= each - number <= 2 for each in told) for number in with_chunks[:-1])  # and not with the next


def test_a_producer_without_samples_and_open_chunks_sends_no_reports() -> None:
    async def main(ways: Ways, producer: Producer) -> tuple[int, bool]:
        constrain(ways)
        await send_for(producer, 3 * INTERVAL_S)
        await asyncio.sleep(2 * INTERVAL_S)  # sleep: virtual time
        seen = requests_of(ways)
        await asyncio.sleep(60)  # sleep: virtual time
        return len(seen), producer.routes.wait_s(producer._writers.by_name["s"].lanes.lanes[0]) > 0

    assert virtually(1, 0.002, main)[1] == (0, False)


def test_a_waiting_chunk_goes_when_advice_ends() -> None:
    """An hour is left, but no broker says so any more."""

    async def main(ways: Ways, producer: Producer) -> float:
        constrain(ways, gather_us=3_600_000_000)
        await send_for(producer, 1.5 * INTERVAL_S)
        ways.cluster.plugins.latency.set_budgets(2, [])
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await producer.send("s", b"x", streamlet=0)
        return loop.time() - begun_s

    assert 1 <= virtually(1, 0.002, main)[1] <= 10
