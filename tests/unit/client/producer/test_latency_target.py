"""Latency targets: how long chunks fill, as plain rules and with producers on a loop with virtual time."""

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kera.client.producing.lanes.lane import PendingChunk
from kera.client.producing.latency.pace import ADVISED_S_MAX, FEW, MARGIN, SLACK, SLACK_OF_FEW, WINDOW_S, Pace
from kera.client.producing.producer import Producer
from kera.client.producing.sending.fill_time import TIMER_S
from kera.client.settings import ProducerSettings
from kera.core.base.settings import InvalidSettings
from kera.core.latency.limits import HELD_REQUESTS_MAX, HELD_US_MAX
from kera.v1 import latency_pb2
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.producer_support import give
from tests.unit.client.support import FakeCluster
from tests.unit.client.virtual_support import Ways, virtually

ROUNDING_S = 2e-6


def pace(**options: Any) -> Pace:
    return Pace(ProducerSettings(**options))


def closed_at(*times_s: float) -> list[PendingChunk]:
    chunks = []
    for time_s in times_s:
        chunk = PendingChunk.__new__(PendingChunk)
        chunk.closed_s = time_s
        chunks.append(chunk)
    return chunks


class TestPace:
    def test_chunks_do_not_wait_without_a_target_or_advice(self) -> None:
        plain = pace()
        assert (plain.holds, plain.measures, plain.wait_s(7, 5.0)) == (False, False, 0.0)

    def test_an_explicit_linger_wins(self) -> None:
        for linger_ms in (0, 3):
            given_both = pace(linger_ms=linger_ms, latency_target_ms=50)
            assert (given_both.holds, given_both.measures) == (linger_ms > 0, False)
            assert given_both.wait_s(7, 5.0) == linger_ms / 1000

    @given(st.integers(1, 1 << 40), st.integers(0, (1 << 32) - 1), st.one_of(st.none(), st.floats(0.001, 3_600_000)))
    def test_half_of_the_delivery_timeout_is_left_for_requests(
        self, timeout_ms: int, advised_us: int, target_ms: float | None
    ) -> None:
        bounded = pace(delivery_timeout_ms=timeout_ms, latency_target_ms=target_ms)
        bounded.acknowledged(closed_at(1.0), 1.0)
        advice = latency_pb2.WriterAdvice(stream_id=7, linger_us=advised_us, valid_ms=5_000)
        assert bounded.wait_s(7, 1.0) <= timeout_ms / 2_000
        bounded.advise([advice], 1.0)
        wait_s = bounded.wait_s(7, 1.0)
        assert wait_s <= timeout_ms / 2_000
        if target_ms is None and advised_us / 1e6 < timeout_ms / 2_000 and advised_us < ADVISED_S_MAX * 1e6:
            assert wait_s == advised_us / 1e6
        held_us = bounded.held_us_max
        left_s = timeout_ms / 1000 - wait_s - (HELD_US_MAX if held_us is None else held_us) / 1e6
        assert left_s >= timeout_ms / 4_000 - ROUNDING_S

    @pytest.mark.parametrize(
        ("options", "held_us"),
        [
            ({}, None),
            ({"linger_ms": 0}, 0),
            ({"linger_ms": 5}, 0),
            ({"latency_target_ms": 50}, 0),
            ({"delivery_timeout_ms": 1_000}, 250_000),
            ({"delivery_timeout_ms": 2_000}, None),
            ({"requests_in_flight_max": HELD_REQUESTS_MAX}, 0),
            ({"requests_in_flight_max": HELD_REQUESTS_MAX + 1}, None),
        ],
    )
    def test_brokers_hold_back_no_more_than_settings_allow(self, options: dict[str, Any], held_us: int | None) -> None:
        assert pace(**options).held_us_max == held_us

    def test_chunks_do_not_wait_before_the_first_measurement(self) -> None:
        targeted = pace(latency_target_ms=50)
        assert targeted.holds
        assert targeted.measures
        assert targeted.wait_s(7, 5.0) == 0.0

    def test_the_wait_is_the_target_less_a_tenth_and_the_measured_time(self) -> None:
        targeted = pace(latency_target_ms=50)
        targeted.acknowledged(closed_at(1.001, 1.0), 1.008)
        assert targeted.wait_s(7, 1.1) == pytest.approx(0.045 - 0.008)

    def test_chunks_do_not_wait_when_answers_take_longer_than_the_target(self) -> None:
        targeted = pace(latency_target_ms=50)
        targeted.acknowledged(closed_at(1.0), 1.2)
        assert targeted.wait_s(7, 1.3) == 0.0

    def test_a_few_answers_later_than_the_target_do_not_count(self) -> None:
        targeted = pace(latency_target_ms=50)
        for took_s in [0.2] * 3 + [0.002] * 97:
            targeted.acknowledged(closed_at(1.0), 1.0 + took_s)
        assert targeted.wait_s(7, 1.3) == pytest.approx(0.045 - 0.002, abs=0.001)

    def test_old_measurements_do_not_count(self) -> None:
        targeted = pace(latency_target_ms=50)
        targeted.acknowledged(closed_at(1.0), 1.2)
        targeted.acknowledged(closed_at(10.0), 10.005)
        assert targeted.wait_s(7, 1.3 + WINDOW_S * 1.2) == pytest.approx(0.040)

    def test_chunks_that_waited_for_a_connection_or_came_in_a_bundle_do_not_count(self) -> None:
        targeted = pace(latency_target_ms=50)
        targeted.connected_s = 5.0
        targeted.acknowledged(closed_at(4.9, 5.1), 5.2)
        bundled = PendingChunk.__new__(PendingChunk)
        bundled.closed_s = None  # a chunk that came out of a bundle
        targeted.acknowledged([bundled], 5.2)
        assert targeted.rest_s(5.3) is None

    @given(
        st.floats(0.1, 3_600_000),
        st.lists(st.tuples(st.floats(0, 2), st.floats(0, 3)), max_size=50),
        st.floats(0, 20),
    )
    def test_no_chunk_waits_beyond_its_deadline(
        self, target_ms: float, requests: list[tuple[float, float]], later_s: float
    ) -> None:
        targeted, now_s, seen = pace(latency_target_ms=target_ms), 0.0, []
        for step_s, took_s in requests:
            now_s += step_s
            targeted.acknowledged(closed_at(now_s), now_s + took_s)
            seen.append((now_s + took_s, took_s))
        now_s = max([at for at, _ in seen], default=0.0) + later_s
        wait_s = targeted.wait_s(7, now_s)
        recent = sorted(took_s for at, took_s in seen if at >= now_s - WINDOW_S)
        if recent:
            left_s = target_ms / 1000 * (1 - MARGIN) + ROUNDING_S
            highest_s = recent[-1 - len(recent) // 100]
            if highest_s <= target_ms / 1000 / 4:  # a figure read off buckets is up to 42 % more
                assert wait_s <= max(0.0, left_s - highest_s)
            assert wait_s <= max(0.0, left_s - recent[(len(recent) - 1) // 2])
        early_s = [targeted.early_s(wait_s, others) for others in (0, 1, FEW, 1_000_000)]
        assert 0 <= early_s[0] <= early_s[3] == early_s[2] <= early_s[1] <= wait_s


@pytest.mark.parametrize("value", [0, -1, 3_600_001, True])
def test_an_invalid_target_is_refused(value: Any) -> None:
    with pytest.raises(InvalidSettings, match="latency_target_ms"):
        ProducerSettings.load(latency_target_ms=value)


def test_an_environment_variable_sets_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_PRODUCER_LATENCY_TARGET_MS", "50")
    loaded = ProducerSettings.load()
    assert (loaded.latency_target_ms, loaded.linger_ms) == (50, None)


# -- a producer on a loop with virtual time ----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([10, 50, 200]),
    st.floats(0.0005, 0.3),
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0, 0.03), st.integers(0, 7), st.booleans()), min_size=1, max_size=60),
)
def test_every_record_is_acknowledged_within_the_target(
    target_ms: int, answers_after_s: float, streamlets: int, steps: list[tuple[float, int, bool]]
) -> None:
    """This holds for records and small batches, as long as the broker answers in time."""

    async def main(_: Ways, producer: Producer) -> float:
        loop, waiting = asyncio.get_running_loop(), []

        async def timed(accepted_s: float, delivery: Any) -> float:
            await delivery
            return loop.time() - accepted_s

        for pause_s, streamlet, as_batch in steps:
            await asyncio.sleep(pause_s)  # sleep: virtual time
            accepted_s = loop.time()
            if as_batch:
                delivery: Any = await producer.send_batch(
                    "s", pa.record_batch({"value": [b"x"]}), streamlet=streamlet % streamlets
                )
            else:
                delivery = producer.send("s", b"x", streamlet=streamlet % streamlets)
            waiting.append(asyncio.ensure_future(timed(accepted_s, delivery)))
        return float(max(await asyncio.gather(*waiting)))

    _, latest_s = virtually(
        streamlets, answers_after_s, main, latency_target_ms=target_ms, requests_in_flight_max=1_000
    )
    target_s = target_ms / 1000
    if answers_after_s < target_s * (1 - MARGIN):
        assert latest_s <= target_s
    else:  # the target cannot be met: as without one, a chunk waits for the answer before it and for its own
        assert latest_s <= 2 * answers_after_s + target_s


@pytest.mark.parametrize(("streamlets", "slack"), [(12, SLACK_OF_FEW), (100, SLACK)])
def test_chunks_fill_and_go_together(streamlets: int, slack: float) -> None:
    """At 4,000 records a second and 200 ms, the slack bounds the requests, and nearly so the chunks."""
    records, answer_s = 8_000, 0.002

    async def main(ways: Ways, producer: Producer) -> tuple[int, int]:
        before = len(ways.sent_s)
        for number in range(records):
            producer.send("s", b"x" * 100, streamlet=number * 37 % streamlets)
            if number % 4 == 0:
                await asyncio.sleep(0.001)  # sleep: virtual time
        await producer.flush()
        return len(ways.sent_s) - before, sum(map(len, ways.cluster.loopback.writes[before:]))

    _, (requests, chunks) = virtually(streamlets, answer_s, main, latency_target_ms=200)
    wait_s, seconds = 0.2 * (1 - MARGIN) - answer_s, records / 4_000
    assert chunks <= streamlets * (seconds / (wait_s * (1 - SLACK)) + 2)
    assert requests <= seconds / (wait_s * slack) + 2


def sent_after(pauses_s: list[float], **full: int) -> list[float]:
    """The times when records leave, each for its own streamlet after a pause; with `full`, the last fills its chunk."""

    async def main(ways: Ways, producer: Producer) -> list[float]:
        for number in range(3):  # so that the producer has measured the rest of the way
            await producer.send("s", b"x", streamlet=number)
        began_s, before = asyncio.get_running_loop().time(), len(ways.sent_s)
        for streamlet, pause_s in enumerate(pauses_s):
            await asyncio.sleep(pause_s)  # sleep: virtual time
            last = streamlet == len(pauses_s) - 1
            producer.send("s", b"x" * (full.get("bytes", 1) if last else 1), streamlet=streamlet)
        await asyncio.sleep(1)  # sleep: virtual time
        sent = [
            (at_s - began_s, len(write))
            for at_s, write in zip(ways.sent_s[before:], ways.cluster.loopback.writes[before:], strict=True)
        ]
        return [at_s for at_s, chunks in sent for _ in range(chunks)]

    _, sent_s = virtually(len(pauses_s), 0.002, main, latency_target_ms=200, chunk_bytes_max=1_000)
    return list(sent_s)


WAIT_S = 0.2 * (1 - MARGIN) - 0.002


def test_few_chunks_go_with_a_due_chunk_after_half_of_their_time() -> None:
    first_s, second_s, third_s = sent_after([0.0, 0.08, 0.04])
    assert first_s == second_s == pytest.approx(WAIT_S, abs=0.005)
    assert third_s == pytest.approx(0.12 + WAIT_S, abs=0.005)


def test_a_full_chunk_does_not_make_other_chunks_go_early() -> None:
    full_s, first_s, second_s = sent_after([0.0, 0.0, 0.17], bytes=1_000)
    assert full_s == pytest.approx(0.17, abs=0.005)
    assert first_s == second_s == pytest.approx(WAIT_S, abs=0.005)


def test_an_idle_producer_without_a_target_sends_at_once() -> None:
    async def main(ways: Ways, producer: Producer) -> float:
        await asyncio.sleep(1)  # sleep: virtual time
        accepted_s = asyncio.get_running_loop().time()
        await producer.send("s", b"x")
        return ways.sent_s[-1] - accepted_s

    assert virtually(1, 0.01, main)[1] < TIMER_S


def test_a_producer_keeps_to_an_explicit_linger() -> None:
    async def main(ways: Ways, producer: Producer) -> float:
        accepted_s = asyncio.get_running_loop().time()
        await producer.send("s", b"x")
        return ways.sent_s[-1] - accepted_s

    waited_s = virtually(1, 0.01, main, linger_ms=20, latency_target_ms=500)[1]
    assert 0.02 <= waited_s <= 0.02 + 2 * TIMER_S


def test_a_full_chunk_does_not_wait() -> None:
    async def main(ways: Ways, producer: Producer) -> tuple[float, float]:
        accepted_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(producer.send("s", b"x" * 600) for _ in range(2)))
        return accepted_s, ways.sent_s[-1]

    accepted_s, sent_s = virtually(1, 0.01, main, latency_target_ms=1_000, chunk_bytes_max=1_000)[1]
    assert sent_s - accepted_s < TIMER_S


async def test_records_gather_into_one_chunk_on_a_real_loop(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    """On a real loop: the first record goes at once, later ones wait."""
    producer = make_producer(cluster, latency_target_ms=50)
    await producer.prepare("s")
    for number in range(3):
        await give(producer.send("s", b"%d" % number))
    waited = [producer.send("s", b"%d" % number) for number in range(10)]
    await give(asyncio.gather(*waited))
    assert len(cluster.loopback.writes[-1]) == 1
    assert [len(write) for write in cluster.loopback.writes] == [1, 1, 1, 1]
