"""`AtWork`: when an application sends the first record made from what it consumed. All orders are in tests/property."""

import asyncio
import gc

import pyarrow as pa
import pytest

from kera.client.cluster.at_work import OPEN_MAX, AtWork
from kera.client.producing.producer import Producer
from kera.core.base.clock import FakeClock
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.support import FakeCluster

STREAM_ID = 7


@pytest.fixture
async def producer(cluster: FakeCluster, make_producer: MakeProducer) -> Producer:
    made = make_producer(cluster, linger_ms=60_000)
    await made.prepare("s")
    return made


async def test_the_first_record_after_the_job_began_counts_in_a_chunk_already_open(
    cluster: FakeCluster, producer: Producer
) -> None:
    at_work = cluster.at_work
    producer.send("s", b"before", streamlet=0)
    job = at_work.begin([STREAM_ID], asyncio.get_running_loop().time())
    assert at_work.first_us(job) is None
    producer.send("s", b"made of it", streamlet=0)
    first_us = at_work.first_us(job)
    assert first_us is not None
    producer.send("s", b"later", streamlet=0)
    await producer.flush()
    assert at_work.first_us(job) == first_us


async def test_the_first_record_counts_after_its_chunk_was_sent(cluster: FakeCluster, producer: Producer) -> None:
    at_work = cluster.at_work
    producer.send("s", b"before", streamlet=0)
    job = at_work.begin([STREAM_ID], asyncio.get_running_loop().time())
    producer.send("s", b"made of it", streamlet=0)
    await producer.flush()
    assert at_work.first_us(job) is not None


async def test_a_record_for_another_stream_does_not_count(cluster: FakeCluster, producer: Producer) -> None:
    job = cluster.at_work.begin([STREAM_ID + 1], 0.0)
    producer.send("s", b"another one")
    await producer.send_batch("s", pa.RecordBatch.from_pydict({"value": [b"x"]}))
    await producer.flush()
    assert cluster.at_work.first_us(job) is None


@pytest.mark.parametrize("rows", [1, 4_000])
async def test_rows_of_a_batch_count_whether_gathered_or_sent_at_once(
    cluster: FakeCluster, make_producer: MakeProducer, rows: int
) -> None:
    for linger_ms in (0, 60_000):
        producer = make_producer(cluster, linger_ms=linger_ms)
        await producer.prepare("s")
        job = cluster.at_work.begin([STREAM_ID], asyncio.get_running_loop().time())
        await producer.send_batch("s", pa.RecordBatch.from_pydict({"value": [b"x" * 100] * rows}))
        assert cluster.at_work.first_us(job) is not None
        cluster.at_work.end(job)
        await producer.flush()


class Chunk:
    opened_s = 0.0

    def __init__(self, *times_s: float) -> None:
        self.times_s = times_s


class Writer:
    def __init__(self, *chunks: Chunk) -> None:
        self.open_chunks = dict(enumerate(chunks))


def test_only_a_limited_number_of_open_chunks_is_examined() -> None:
    clock = FakeClock(1_000_000)
    at_work = AtWork(clock)
    writer = Writer(*[Chunk(0.5)] * OPEN_MAX, Chunk(1.5))
    at_work.add_writer(STREAM_ID, writer)
    job = at_work.begin([STREAM_ID], 0.0)
    clock.advance(1.0)
    assert at_work.first_us(job) is None
    other = Writer(Chunk(0.5), Chunk(1.25))
    at_work.add_writer(STREAM_ID, other)
    assert at_work.first_us(job) == 250_000


def test_the_time_to_the_first_record_is_never_negative() -> None:
    at_work = AtWork(FakeClock(1_000_000))
    job = at_work.begin([STREAM_ID], 5.0)
    at_work.accepted(STREAM_ID, 4.0)
    assert at_work.first_us(job) == 0


@pytest.mark.parametrize("set_by_s", [5.0, -5.0])
def test_setting_the_clock_does_not_lengthen_the_time_to_the_first_record(set_by_s: float) -> None:
    """A chunk that was open before has records of both times: by the clock, the work took five seconds too long."""
    clock = FakeClock(100_000_000)
    at_work, chunk = AtWork(clock), Chunk(99.0)
    writer = Writer(chunk)
    at_work.add_writer(STREAM_ID, writer)
    if set_by_s < 0:  # the chunk's older record then has a future time
        clock.step(set_by_s)
    job = at_work.begin([STREAM_ID], 5.0)
    if set_by_s > 0:
        clock.step(set_by_s)
    clock.advance(0.002)
    chunk.times_s = 99.0, clock.now_us() / 1e6
    clock.advance(0.003)
    assert at_work.first_us(job) == 5_000


def test_dropped_jobs_and_writers_leave_no_state() -> None:
    at_work = AtWork(FakeClock(0))
    job, writer = at_work.begin([STREAM_ID], 0.0), Writer(Chunk(1.0))
    at_work.add_writer(STREAM_ID, writer)
    del job, writer
    gc.collect()
    other = at_work.begin([STREAM_ID], 0.0)
    assert at_work.first_us(other) is None
    at_work.end(other)
    assert not at_work.pending
