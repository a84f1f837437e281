"""Latency reports that ride on requests to a broker, and the advice that comes back with the answers."""

from typing import Any

import pytest

from kera.broker.heartbeat import HeartbeatLimits, HeartbeatReport
from kera.broker.latency.manager import LatencyManager
from kera.broker.serving.latency_reports import LatencyReports
from kera.core.errors import InvalidArgument, NotAllowed
from kera.core.latency.hop import Hop
from kera.core.latency.report import SAMPLES_MAX, Of, add_sample
from kera.core.latency.sample import Sample
from kera.core.rpc import Call, Reply, api
from kera.core.rpc.method import Peer
from kera.v1 import broker_pb2, coordinator_pb2, latency_pb2
from tests.unit.broker.support import STREAM_ID, Broker, Engine, chunk, read_range, stream_info

BUDGET = latency_pb2.StreamBudget(stream_id=STREAM_ID, window_ms=10_000, gather_us=20_000, hand_over_us=5_000)


@pytest.fixture
async def broker(engine: Engine) -> Broker:
    return Broker(engine, stream_info())


def report_of(hop: Hop, us: int = 1_000, stream_id: int = STREAM_ID) -> latency_pb2.LatencyReport:
    report, sample = latency_pb2.LatencyReport(), Sample()
    sample.add(us)
    add_sample(report, Of(stream_id, 0, hop), sample)
    return report


def write(broker: Broker, report: latency_pb2.LatencyReport, sequence: int = 0) -> broker_pb2.MultiWriteChunksResponse:
    request = broker_pb2.MultiWriteChunksRequest(chunk_count=1, latency=report)
    reply: Any = broker.start(api.MULTI_WRITE_CHUNKS, request, chunk(1, sequence))
    assert isinstance(reply, Reply)
    message: broker_pb2.MultiWriteChunksResponse = reply.message
    return message


def read(broker: Broker, report: latency_pb2.LatencyReport, *ranges: Any) -> broker_pb2.MultiReadChunksResponse:
    reply: Any = broker.start(api.MULTI_READ_CHUNKS, broker_pb2.MultiReadChunksRequest(ranges=ranges, latency=report))
    assert isinstance(reply, Reply)
    message: broker_pb2.MultiReadChunksResponse = reply.message
    return message


def hops(broker: Broker) -> list[Hop]:
    return [each.hop for each in broker.plugins.latency.figures()]


async def test_a_write_without_a_report_gets_no_time_and_no_advice(broker: Broker) -> None:
    broker.plugins.latency.set_budgets(1, [BUDGET])
    reply: Any = broker.write(chunk(1, 0))
    assert (reply.message.broker_time_us, list(reply.message.advice)) == (0, [])
    assert hops(broker) == []


async def test_a_report_without_a_budget_gets_the_time_and_no_advice(broker: Broker) -> None:
    answer = write(broker, report_of(Hop.GATHER))
    assert answer.broker_time_us > 0
    assert not answer.advice
    assert hops(broker) == []


async def test_a_writer_gets_advice_and_its_samples_count(broker: Broker) -> None:
    broker.plugins.latency.set_budgets(1, [BUDGET])
    answer = write(broker, latency_pb2.LatencyReport(samples=[latency_pb2.HopSample(stream_id=STREAM_ID)]))
    assert [(each.stream_id, each.linger_us) for each in answer.advice] == [(STREAM_ID, 20_000)]
    assert [status.durability for status in answer.statuses] == [1]
    assert hops(broker) == [Hop.REPLICATE]  # the time of this request itself
    write(broker, report_of(Hop.GATHER), 1)
    assert hops(broker) == [Hop.REPLICATE, Hop.GATHER]


async def test_a_request_limits_how_long_its_writer_may_be_held_back(broker: Broker) -> None:
    latency = broker.plugins.latency
    budget = latency_pb2.StreamBudget(stream_id=STREAM_ID, window_ms=10_000, gather_us=20_000, replicate_us=400_000)
    latency.set_budgets(1, [budget])
    held_s = latency.replicate.until_s(STREAM_ID, latency.now_us()) - latency.replicate.now_s()
    assert held_s == pytest.approx(0.4, abs=0.1)
    named = [latency_pb2.HopSample(stream_id=STREAM_ID)]
    write(broker, latency_pb2.LatencyReport(samples=named, held_us_max=0))
    assert latency.replicate.until_s(STREAM_ID, latency.now_us()) == 0
    with pytest.raises(InvalidArgument, match="the delay"):
        write(broker, latency_pb2.LatencyReport(held_us_max=1 << 63), 1)


async def test_a_report_may_come_without_a_chunk(broker: Broker) -> None:
    """Such a report adds no sample of replication."""
    broker.plugins.latency.set_budgets(1, [BUDGET])
    reply: Any = broker.start(
        api.MULTI_WRITE_CHUNKS, broker_pb2.MultiWriteChunksRequest(latency=report_of(Hop.GATHER)), b""
    )
    assert ([each.stream_id for each in reply.message.advice], len(reply.message.statuses)) == ([STREAM_ID], 0)
    assert hops(broker) == [Hop.GATHER]


async def test_a_reader_gets_advice_and_its_samples_count(broker: Broker) -> None:
    broker.plugins.latency.set_budgets(1, [BUDGET])
    broker.append(chunk(1, 0))
    answer = read(broker, report_of(Hop.PREFETCH), read_range())
    assert answer.results[0].length_bytes > 0
    assert [(each.stream_id, each.fetch_wait_us) for each in answer.advice] == [(STREAM_ID, 5_000)]
    assert answer.broker_time_us > 0
    assert hops(broker) == [Hop.PREFETCH]


async def test_advice_names_the_streams_that_the_readers_group_writes_to(broker: Broker) -> None:
    pairs = [("app", 8), ("app", 9), ("other", 10), ("app", 8)]
    following = [latency_pb2.NextStream(consumer_group=group, stream_id=stream_id) for group, stream_id in pairs]
    budget = latency_pb2.StreamBudget(stream_id=STREAM_ID, window_ms=10_000, next=following)
    broker.plugins.latency.set_budgets(1, [budget])
    for group, next_ids in (("app", [8, 9]), ("nobody", []), ("", [])):
        report = latency_pb2.LatencyReport(samples=[latency_pb2.HopSample(stream_id=STREAM_ID, consumer_group=group)])
        (advice,) = read(broker, report).advice
        assert list(advice.next_stream_ids) == next_ids


async def test_a_read_without_ranges_may_carry_a_report(broker: Broker) -> None:
    """A reader on the push channel has no other request to send its report with."""
    broker.plugins.latency.set_budgets(1, [BUDGET])
    assert len(read(broker, report_of(Hop.WORK)).advice) == 1
    assert hops(broker) == [Hop.WORK]


async def test_a_waiting_read_gets_advice_with_its_answer(broker: Broker) -> None:
    broker.plugins.latency.set_budgets(1, [BUDGET])
    request = broker_pb2.MultiReadChunksRequest(ranges=[read_range()], wait_ms=20_000, latency=report_of(Hop.PREFETCH))
    waiting = broker.start(api.MULTI_READ_CHUNKS, request)
    broker.append(chunk(1, 0))
    assert len((await waiting).message.advice) == 1


async def test_writers_cannot_report_hops_of_readers_nor_readers_hops_of_writers(broker: Broker) -> None:
    broker.plugins.latency.set_budgets(1, [BUDGET])
    read(broker, report_of(Hop.GATHER))
    assert hops(broker) == []
    write(broker, report_of(Hop.PREFETCH))
    assert hops(broker) == [Hop.REPLICATE]


async def test_a_report_about_a_stream_elsewhere_gets_no_advice(broker: Broker) -> None:
    other = latency_pb2.StreamBudget(stream_id=STREAM_ID + 1, window_ms=1_000)
    broker.plugins.latency.set_budgets(1, [other])
    assert not write(broker, report_of(Hop.GATHER, stream_id=STREAM_ID + 1)).advice
    assert hops(broker) == []


async def test_an_invalid_report_is_refused_before_anything_is_done(broker: Broker) -> None:
    """Also when the broker measures nothing."""
    wrong = latency_pb2.LatencyReport(samples=[latency_pb2.HopSample(stream_id=STREAM_ID)] * (SAMPLES_MAX + 1))
    with pytest.raises(InvalidArgument, match="501 samples"):
        write(broker, wrong)
    with pytest.raises(InvalidArgument, match="501 samples"):
        read(broker, wrong)
    assert broker.counters.chunks_appended == 0


async def test_the_native_core_leaves_writes_with_a_report_to_python(broker: Broker) -> None:
    request = broker_pb2.MultiWriteChunksRequest(chunk_count=1, latency=report_of(Hop.GATHER))
    reply: Any = broker.broker.writer.write(Call(request, memoryview(chunk(1, 0)), broker.peer))
    assert reply.message.broker_time_us > 0


async def test_heartbeats_carry_figures_and_bring_budgets(broker: Broker) -> None:
    manager = broker.plugins.latency
    report = HeartbeatReport(broker.streams, latency=manager, limits=HeartbeatLimits(hops_max=1))
    answer = coordinator_pb2.HeartbeatResponse()
    report.answered(answer)
    assert not manager.watches(STREAM_ID)
    answer.budgets.version = 5
    answer.budgets.budgets.append(BUDGET)
    report.answered(answer)
    assert manager.watches(STREAM_ID)
    write(broker, report_of(Hop.GATHER))
    request = coordinator_pb2.HeartbeatRequest()
    report.fill(request)
    assert request.budgets_version == 5
    assert [(each.stream_id, int(each.hop), each.count) for each in request.latency] == [(STREAM_ID, 1, 1)]
    answer.budgets.Clear()
    answer.budgets.version = 6
    report.answered(answer)
    assert not manager.watches(STREAM_ID)


async def test_a_dropped_stream_is_no_longer_watched(broker: Broker) -> None:
    broker.plugins.latency.set_budgets(1, [BUDGET])
    broker.streams.drop(STREAM_ID)
    assert not broker.plugins.latency.watches(STREAM_ID)


async def test_samples_of_a_consumer_group_count_only_if_the_peer_may_use_it() -> None:
    def may_use_group(_peer: Peer, name: str) -> None:
        if name != "mine":
            raise NotAllowed(name)

    manager = LatencyManager()
    manager.set_budgets(1, [BUDGET])
    reports = LatencyReports(manager, lambda _peer, _operation, _stream_id: {0}, may_use_group)
    report, sample = latency_pb2.LatencyReport(), Sample()
    sample.add(1_000)
    for name in ("mine", "of-others"):
        add_sample(report, Of(STREAM_ID, 0, Hop.WORK, name), sample)
    response = broker_pb2.MultiReadChunksResponse()
    call = Call(broker_pb2.MultiReadChunksRequest(latency=report), memoryview(b""), Peer("tcp", "reader"))
    reports.on_read_answered(call, response)
    assert [each.consumer_group for each in manager.figures()] == ["mine"]
    assert [each.stream_id for each in response.advice] == [STREAM_ID]


async def test_samples_of_groups_on_no_path_are_ignored_even_if_invalid(broker: Broker) -> None:
    """The stream's advice goes back all the same."""
    budget = latency_pb2.StreamBudget(window_ms=10_000, stream_id=STREAM_ID)
    budget.ends.consumer_groups.append("real")
    broker.plugins.latency.set_budgets(1, [budget])
    for name, counts in (("made-up", False), ("", False), ("real", True)):
        wrong = latency_pb2.HopSample(stream_id=STREAM_ID, hop=latency_pb2.HOP_WORK, count=1, consumer_group=name)
        report = latency_pb2.LatencyReport(samples=[wrong])
        if counts:
            with pytest.raises(InvalidArgument, match="0 chunks in buckets, of 1"):
                read(broker, report)
        else:
            assert [each.stream_id for each in read(broker, report).advice] == [STREAM_ID]
        report.samples[0].buckets.append(1)
        read(broker, report)
        assert hops(broker) == ([Hop.WORK] if counts else [])


async def test_figures_that_do_not_fit_a_heartbeat_go_with_the_next(broker: Broker) -> None:
    manager = broker.plugins.latency
    manager.set_budgets(1, [BUDGET])
    report = HeartbeatReport(broker.streams, latency=manager, limits=HeartbeatLimits(hops_max=1))
    write(broker, report_of(Hop.GATHER))
    requests = [coordinator_pb2.HeartbeatRequest() for _ in range(2)]
    for request in requests:
        report.fill(request)
    assert [request.latency_left_out for request in requests] == [1, 1]
    assert {int(each.hop) for request in requests for each in request.latency} == {Hop.GATHER, Hop.REPLICATE}


async def test_samples_of_streamlets_elsewhere_are_ignored(broker: Broker) -> None:
    manager = broker.plugins.latency
    manager.set_budgets(1, [BUDGET])
    report, sample = latency_pb2.LatencyReport(), Sample()
    sample.add(1_000_000)
    for streamlet_id in (7, (1 << 32) - 1):
        add_sample(report, Of(STREAM_ID, streamlet_id, Hop.GATHER), sample)
    reply = write(broker, report)
    assert [each.stream_id for each in reply.advice] == [STREAM_ID]
    assert all(each.hop is not Hop.GATHER for each in manager.figures())
