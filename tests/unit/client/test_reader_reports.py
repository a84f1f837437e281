"""Latency reports of consumers in groups: they measure streams with a latency constraint and report to brokers."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.client.client import Client
from kera.client.cluster.at_work import AtWork
from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.cluster.retry import RetryTime
from kera.client.cluster.timing import Timing
from kera.client.consuming.fetching.hooks import FetcherPort
from kera.client.consuming.fetching.ranges import Range
from kera.client.consuming.latency.hooks import ReaderLatency
from kera.client.consuming.latency.reader_reports import VALID_S_MAX, ReaderMeter
from kera.client.consuming.latency.waiting import Came, Waiting
from kera.client.settings import ClientSettings, ConsumerSettings
from kera.core.base.clock import FakeClock
from kera.core.base.ids import EARLIEST, EntryId
from kera.core.format.chunk import encode_chunk
from kera.core.latency.hop import Hop
from kera.core.latency.report import SAMPLES_MAX, checked
from kera.core.latency.sample import TIME_US_MAX
from kera.v1 import broker_pb2, latency_pb2
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.producer_support import give
from tests.unit.client.support import WAIT_S, FakeCluster, until

STREAM_ID = 7
BROKER_ID = 3
BUDGET = latency_pb2.StreamBudget(stream_id=STREAM_ID, window_ms=60_000, hand_over_us=5_000)


def fetched(created_us: int = 1_000_000, streamlet: int = 0) -> Fetched:
    chunk = encode_chunk(
        b"x" * 8, record_count=1, stream_id=STREAM_ID, streamlet_id=streamlet, schema_id=1, producer_id=1,
        producer_epoch=1, sequence=0, created_us=created_us, min_timestamp_us=0, max_timestamp_us=0,
    )  # fmt: skip
    where = EntryId(STREAM_ID, streamlet, 0)
    return Fetched(where, EARLIEST, EARLIEST, [pa.py_buffer(chunk.to_bytes())], 0, None)


def answer(
    broker_time_us: int = 0, valid_ms: int = 5_000, next_stream_ids: Sequence[int] = ()
) -> broker_pb2.MultiReadChunksResponse:
    advice = latency_pb2.ReaderAdvice(stream_id=STREAM_ID, valid_ms=valid_ms, next_stream_ids=next_stream_ids)
    return broker_pb2.MultiReadChunksResponse(advice=[advice], broker_time_us=broker_time_us)


def taken(meter: ReaderMeter, what: Fetched, came_s: float, taken_s: float, done_s: float) -> Came | None:
    came = meter.came(what, BROKER_ID, came_s)
    if came is not None:
        meter.taken(what, came, taken_s)
    meter.asks(done_s)
    return came


def told(meter: ReaderMeter) -> dict[Hop, tuple[int, int]]:
    return {of.hop: (sample.count, sample.sum_us) for of, sample in checked(meter.report(BROKER_ID, [STREAM_ID]))}


class TestMeter:
    def test_a_report_without_a_constraint_has_no_measurements(self) -> None:
        meter = ReaderMeter("app")
        taken(meter, fetched(), 1.0, 1.1, 1.2)
        meter.look(9.0, 1.0)
        assert not meter.watches
        report = meter.report(BROKER_ID, [STREAM_ID])
        assert [(sample.stream_id, sample.count) for sample in report.samples] == [(STREAM_ID, 0)]

    def test_the_hand_over_of_very_old_records_is_capped(self) -> None:
        """A broker refuses a whole report with a longer time in it."""
        meter = ReaderMeter("app")
        meter.answered(BROKER_ID, answer(1_700_000_000_000_000), -0.001, 0.001)
        taken(meter, fetched(created_us=0), 1.0, 1.25, 1.5)
        assert told(meter) == {Hop.HAND_OVER: (1, TIME_US_MAX), Hop.PREFETCH: (1, 250_000), Hop.WORK: (1, 250_000)}

    def test_a_writers_clock_that_is_ahead_does_not_make_hand_overs_negative(self) -> None:
        meter = ReaderMeter("app")
        meter.answered(BROKER_ID, answer(5_000_000_000), -0.001, 0.001)
        taken(meter, fetched(created_us=5_001_000_000), 1.0, 1.25, 1.5)
        taken(meter, fetched(created_us=5_006_000_000), 1.01, 1.25, 1.5)
        taken(meter, fetched(created_us=5_006_500_000), 1.53, 1.55, 1.75)
        report = meter.report(BROKER_ID, [STREAM_ID])
        (found,) = [sample for of, sample in checked(report) if of.hop is Hop.HAND_OVER]
        assert (report.clock_ahead_us, found.count, found.sum_us) == (4_990_000, 2, 20_000)

    def test_hand_over_prefetch_and_work_are_measured(self) -> None:
        """According to an answer that took 2 ms, the broker's clock is 5,000 s ahead of ours."""
        meter = ReaderMeter("app")
        meter.answered(BROKER_ID, answer(5_000_000_000), -0.001, 0.001)
        what = fetched(created_us=5_000_900_000)
        assert taken(meter, what, 1.0, 1.25, 1.5) == Came(BROKER_ID, 1.0)
        report = meter.report(BROKER_ID, [STREAM_ID])
        assert report.clock_error_us == 1_000
        assert {sample.consumer_group for sample in report.samples} == {"app"}
        hops = {of.hop: (sample.count, sample.sum_us) for of, sample in checked(report)}
        assert hops == {Hop.HAND_OVER: (1, 100_000), Hop.PREFETCH: (1, 250_000), Hop.WORK: (1, 250_000)}
        assert told(meter) == {}

    def test_work_ends_with_the_first_record_sent_on(self) -> None:
        """That record may come before or after the application asks for more, but before it takes another chunk."""
        for accepted_s, us in ((1.25, 250_000), (1.75, 750_000), (None, 500_000)):
            at_work = AtWork(FakeClock(0))
            meter = ReaderMeter("app", at_work)
            meter.answered(BROKER_ID, answer(next_stream_ids=[STREAM_ID + 1]), 0.0, 0.0)
            came = meter.came(fetched(), BROKER_ID, 0.9)
            meter.taken(fetched(), came, 1.0)
            if accepted_s == 1.25:
                at_work.accepted(STREAM_ID + 1, accepted_s)
            meter.asks(1.5)
            if accepted_s == 1.75:
                at_work.accepted(STREAM_ID + 1, accepted_s)
            meter.taken(fetched(), came, 2.0)
            assert told(meter)[Hop.WORK] == (1, us)
            meter.asks(2.25)
            meter.close()
            assert told(meter)[Hop.WORK] == (1, 250_000)
            assert not at_work.pending

    def test_taking_an_unmeasured_chunk_ends_the_work_too(self) -> None:
        at_work = AtWork(FakeClock(0))
        meter = ReaderMeter("app", at_work)
        meter.answered(BROKER_ID, answer(next_stream_ids=[STREAM_ID + 1]), 0.0, 0.0)
        meter.taken(fetched(), meter.came(fetched(), BROKER_ID, 0.9), 1.0)
        meter.asks(1.5)
        meter.taken(fetched(), None, 2.0)
        at_work.accepted(STREAM_ID + 1, 3.0)
        meter.asks(4.0)
        assert told(meter)[Hop.WORK] == (1, 500_000)

    def test_hand_over_is_not_measured_without_the_brokers_time(self) -> None:
        meter = ReaderMeter("app")
        meter.answered(BROKER_ID, answer(), 0.0, 0.001)
        taken(meter, fetched(), 1.0, 1.25, 1.5)
        assert told(meter).keys() == {Hop.PREFETCH, Hop.WORK}

    def test_measuring_ends_when_the_advice_expires(self) -> None:
        meter = ReaderMeter("app")
        meter.answered(BROKER_ID, answer(valid_ms=(1 << 32) - 1), 0.0, 0.0)
        taken(meter, fetched(), VALID_S_MAX - 1, VALID_S_MAX - 1, VALID_S_MAX - 1)
        assert told(meter) == {Hop.PREFETCH: (1, 0), Hop.WORK: (1, 0)}
        taken(meter, fetched(), VALID_S_MAX + 1, VALID_S_MAX + 1, VALID_S_MAX + 1)
        meter.taken(fetched(), Came(BROKER_ID, 0.0), VALID_S_MAX + 1)
        meter.look(VALID_S_MAX + 9, 1.0)
        assert Hop.PREFETCH not in told(meter)
        meter.answered(BROKER_ID, broker_pb2.MultiReadChunksResponse(), VALID_S_MAX + 1, VALID_S_MAX + 1)
        assert not meter.watches
        assert told(meter) == {}

    def test_the_next_request_may_be_put_off_after_a_small_answer(self) -> None:
        meter = ReaderMeter("app")
        told = latency_pb2.ReaderAdvice(stream_id=STREAM_ID, fetch_wait_us=5_000, fetch_bytes_min=1_000, valid_ms=5_000)
        meter.answered(BROKER_ID, broker_pb2.MultiReadChunksResponse(advice=[told]), 0.0, 1.0)
        pauses = [meter.pause_s(STREAM_ID, size_bytes, 2.0) for size_bytes in (0, 1, 999, 1_000)]
        assert pauses == [0.0, 0.005, 0.005, 0.0]
        assert meter.pause_s(STREAM_ID, 1, 6.1) == 0.0
        assert meter.pause_s(STREAM_ID + 1, 1, 2.0) == 0.0

    def test_samples_beyond_the_limit_go_into_the_next_report(self) -> None:
        meter = ReaderMeter("app")
        meter.answered(BROKER_ID, answer(), 0.0, 0.0)
        for streamlet in range(SAMPLES_MAX):
            taken(meter, fetched(streamlet=streamlet), 1.0, 1.0, 1.0)
        reports = [checked(meter.report(BROKER_ID, [])) for _ in range(4)]
        assert [len(report) for report in reports] == [SAMPLES_MAX - 1, SAMPLES_MAX - 1, 2, 0]
        assert len({of for report in reports for of, _ in report}) == 2 * SAMPLES_MAX

    def test_samples_of_brokers_no_longer_in_use_are_dropped(self) -> None:
        meter = ReaderMeter("app")
        meter.answered(BROKER_ID, answer(1), 0.0, 0.0)
        taken(meter, fetched(), 1.0, 1.0, 1.0)
        meter.keep([BROKER_ID + 1])
        assert told(meter) == {}
        assert meter.report(BROKER_ID, []).clock_error_us == 0


class TestWhatWaits:
    """A hanging application finishes no work, so the time so far counts."""

    def test_current_work_and_the_longest_wait_count_with_the_time_so_far(self) -> None:
        waiting = [came(0.5), came(0.5, streamlet=1), came(1.0)]
        meter = watching(waiting)
        meter.taken(fetched(), Came(BROKER_ID, 0.25), 0.5)
        found = []
        for now_s in (1.0, 2.0, 3.0):
            meter.look(now_s, 1.0)
            found.append(told(meter))
        wait = [1_500_000, 2_500_000]
        assert found[0] == {Hop.PREFETCH: (1, 250_000)}
        assert found[1:] == [{Hop.PREFETCH: (1, us), Hop.WORK: (1, us)} for us in wait]
        meter.asks(3.5)
        meter.look(9.0, 1.0)
        assert told(meter) == {Hop.PREFETCH: (1, 8_500_000), Hop.WORK: (1, 3_000_000)}

    def test_chunks_from_before_the_constraint_count_from_their_arrival(self) -> None:
        meter = ReaderMeter("app", waiting=lambda: [came(1.0)])
        here = meter.came(fetched(), BROKER_ID, 0.5)
        meter.taken(fetched(), here, 0.75)
        meter.answered(BROKER_ID, answer(valid_ms=60_000), 5.0, 5.0)
        meter.look(6.0, 1.0)
        assert told(meter) == {Hop.PREFETCH: (1, 5_000_000), Hop.WORK: (1, 5_250_000)}
        meter.asks(7.0)
        meter.taken(fetched(), Came(BROKER_ID, 1.0), 7.0)
        assert told(meter) == {Hop.PREFETCH: (1, 6_000_000), Hop.WORK: (1, 6_250_000)}

    def test_unfinished_work_stops_counting_after_the_first_record_sent_on(self) -> None:
        at_work = AtWork(FakeClock(0))
        meter = ReaderMeter("app", at_work)
        meter.answered(BROKER_ID, answer(valid_ms=60_000, next_stream_ids=[STREAM_ID + 1]), 0.0, 0.0)
        meter.taken(fetched(), Came(BROKER_ID, 0.0), 0.0)
        meter.look(5.0, 1.0)
        assert told(meter)[Hop.WORK] == (1, 5_000_000)
        at_work.accepted(STREAM_ID + 1, 5.5)
        meter.look(9.0, 1.0)
        assert told(meter) == {}

    def test_chunks_of_dropped_ranges_do_not_count_as_waiting(self) -> None:
        waiting = [came(0.0)]
        meter = watching(waiting)
        meter.taken(fetched(), Came(BROKER_ID, 0.0), 0.0, waiting[0].range)
        told(meter)
        waiting[0].range.dropped = True
        meter.look(9.0, 1.0)
        assert told(meter) == {}

    @given(
        st.lists(st.tuples(*[st.integers(0, 1_000)] * 3), max_size=30),
        st.integers(0, 999),
    )
    def test_looking_does_not_change_the_figures_of_an_application_that_goes_on(
        self, steps: list[tuple[int, int, int]], phase_ms: int
    ) -> None:
        """This holds while each wait and each piece of work is shorter than the time between two looks."""
        assert run(steps, phase_ms) == run(steps, None)

    @pytest.mark.parametrize("work_ms", [1_500, 3_000, 20_000])
    def test_looking_does_not_change_the_figures_of_work_that_always_takes_long(self, work_ms: int) -> None:
        """This holds once the meter knows the usual time: before, the first piece of work counts as hanging."""
        steps = [(100, 50, work_ms)] * 5
        meters = [watching([]), watching([])]
        for meter in meters:
            play(meter, steps[:1], 0)
            told(meter)
            play(meter, steps, 0 if meter is meters[0] else None, begin_ms=30_000)
        assert told(meters[0]) == told(meters[1])


def watching(waiting: list[Waiting]) -> ReaderMeter:
    meter = ReaderMeter("app", waiting=lambda: waiting)
    meter.answered(BROKER_ID, answer(valid_ms=(1 << 32) - 1), 0.0, 0.0)
    meter.answered(BROKER_ID, answer(valid_ms=(1 << 32) - 1), 0.0, 1e6)  # this advice counts for long
    return meter


def came(at_s: float, streamlet: int = 0) -> Waiting:
    what = fetched(streamlet=streamlet)
    here = Range(Wanted(what.entry, EARLIEST, None), RetryTime(ClientSettings()))
    return Waiting(here, what.entry, Came(BROKER_ID, at_s))


def run(steps: list[tuple[int, int, int]], phase_ms: int | None) -> dict[Hop, tuple[int, int]]:
    meter = watching([])
    play(meter, steps, phase_ms)
    return told(meter)


def play(meter: ReaderMeter, steps: list[tuple[int, int, int]], phase_ms: int | None, begin_ms: int = 0) -> None:
    """Chunks come one by one, each after an idle time; with `phase_ms`, the meter looks once a second at that phase."""
    waiting: list[Waiting] = []
    meter._waiting = lambda: waiting

    def pass_by(begin_ms: int, end_ms: int) -> int:
        for now_ms in range(begin_ms, end_ms) if phase_ms is not None else ():
            if now_ms % 1_000 == phase_ms:
                meter.look(now_ms / 1_000, 1.0)
        return end_ms

    now_ms = begin_ms
    for idle_ms, wait_ms, work_ms in steps:
        now_ms = pass_by(now_ms, now_ms + idle_ms)
        waiting.append(came(now_ms / 1_000))
        now_ms = pass_by(now_ms, now_ms + wait_ms)
        arrived = waiting.pop()
        meter.taken(fetched(), arrived.came, now_ms / 1_000)
        now_ms = pass_by(now_ms, now_ms + work_ms)
        meter.asks(now_ms / 1_000)


@pytest.fixture
def quick(cluster: FakeCluster) -> FakeCluster:
    cluster.timing = Timing(latency_report_s=0.01, latency_learn_s=0.01)
    return cluster


def reader_hops(cluster: FakeCluster) -> set[tuple[Hop, str]]:
    figures = cluster.plugins.latency.figures()
    return {(each.hop, each.consumer_group) for each in figures if each.hop.of_reader}


async def test_a_group_measures_a_stream_with_a_constraint(quick: FakeCluster, make_producer: MakeProducer) -> None:
    quick.plugins.latency.set_budgets(1, [BUDGET])
    producer = make_producer(quick)
    async with Client(quick).consumer("s", consumer_group="app", start="earliest") as consumer:  # type: ignore[arg-type]
        await producer.prepare("s")
        records = consumer.records()

        async def all_measured() -> bool:
            await give(producer.send("s", b"x"))
            await give(anext(records))
            return reader_hops(quick) == {(hop, "app") for hop in Hop if hop.of_reader}

        async with asyncio.timeout(WAIT_S):
            while not await all_measured():
                pass
    assert all(figures.mean_us < 60_000_000 for figures in quick.plugins.latency.figures())


async def test_a_hanging_application_is_reported(quick: FakeCluster, make_producer: MakeProducer) -> None:
    """This includes chunks that came before the consumer had heard of the constraint."""
    producer = make_producer(quick)
    async with Client(quick).consumer("s", consumer_group="app", start="earliest") as consumer:  # type: ignore[arg-type]
        await producer.prepare("s")
        await give(producer.send("s", b"x"))
        await give(anext(consumer.records()))
        await give(producer.send("s", b"waits"))
        quick.plugins.latency.set_budgets(1, [BUDGET])

        def told_of() -> bool:
            figures = quick.plugins.latency.figures()
            late = {each.hop for each in figures if each.mean_us > 20_000 and each.consumer_group == "app"}
            return late >= {Hop.PREFETCH, Hop.WORK}

        await until(told_of)


async def test_readers_outside_of_a_group_do_not_measure(
    quick: FakeCluster, make_producer: MakeProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers without a group, and reads of a range, do not measure."""
    made: list[str] = []

    class Noted(ReaderLatency):
        def __init__(self, cluster: Any, consumer_group: str, port: FetcherPort) -> None:
            super().__init__(cluster, consumer_group, port)
            made.append(consumer_group)

    monkeypatch.setattr("kera.client.consuming.latency.hooks.ReaderLatency", Noted)
    producer, client = make_producer(quick), Client(quick)  # type: ignore[arg-type]
    await producer.prepare("s")
    await give(producer.send("s", b"x"))
    async with client.consumer("s", start="earliest") as consumer:
        assert (await give(anext(consumer.records()))).value == b"x"
    settings = ConsumerSettings(consumer_group="app")
    chunks = [chunk async for chunk in client.read_range("s", 0, 0, EARLIEST, None, settings=settings)]
    assert (len(chunks), made) == (1, [])
    async with client.consumer("s", settings=settings, start="earliest"):
        assert made == ["app"]


async def test_read_requests_go_on_after_the_connection_to_the_broker_closes(
    quick: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(quick)
    await producer.prepare("s")
    async with Client(quick).consumer("s", consumer_group="app", start="earliest") as consumer:  # type: ignore[arg-type]
        quick.loopback.closed = True
        await give(producer.send("s", b"x"))
        assert (await give(anext(consumer.records()))).value == b"x"
        before = quick.counters.read_requests
        await until(lambda: quick.counters.read_requests > before + 2)


async def test_a_reader_that_pulls_delays_requests_as_advised(quick: FakeCluster, make_producer: MakeProducer) -> None:
    """With such advice, a chunk right behind another one waits for the delayed request."""
    wait_s = 0.05
    budget = latency_pb2.StreamBudget(stream_id=STREAM_ID, window_ms=60_000, hand_over_us=round(wait_s * 1e6))
    quick.plugins.latency.set_budgets(1, [budget])
    producer, loop, sent_s = make_producer(quick), asyncio.get_running_loop(), 0.0
    client = Client(quick)  # type: ignore[arg-type]
    async with client.consumer("s", consumer_group="app", shared_memory="never", start="earliest") as consumer:
        await producer.prepare("s")
        records = consumer.records()
        async with asyncio.timeout(WAIT_S):
            while True:
                for value in (b"first", b"right behind it"):
                    await producer.send("s", value)
                    sent_s = loop.time()
                    await anext(records)
                if loop.time() - sent_s >= wait_s / 2:
                    break
