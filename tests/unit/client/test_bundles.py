"""Bundles: a batch's chunks for many streamlets go in one request, in order, and survive faults."""

import asyncio
import contextlib
from typing import Any

import pyarrow as pa
import pytest

from kera.client.producing.encoding.partitioner import streamlet_of
from kera.client.producing.lanes.bundle import Bundle
from kera.client.producing.outcomes.outcome import BatchDelivery
from kera.client.producing.producer import Producer
from kera.client.producing.sending import routes
from kera.core.errors import ArenaFull, ClosedError, Unavailable, Uncertain, UnknownStream
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.support import WAIT_S, FakeCluster, Fault, stream_info, until

KEYS = DEFAULT_SCHEMA.field("keys").type
STREAMLETS = 4
ROWS = 40
READY = 2 * ROWS
OPTIONS: dict[str, Any] = {"payload": "lean", "linger_ms": 0, "chunk_bytes_max": 8_192}


@pytest.fixture
async def wide(make_cluster: MakeCluster) -> FakeCluster:
    return make_cluster(stream_info(streamlets=STREAMLETS))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Bundle]:
    """All bundles made during the test."""
    found: list[Bundle] = []

    class Seen(Bundle):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(routes, "Bundle", Seen)
    return found


def rows(first: int, count: int = ROWS) -> list[bytes]:
    return [b"%d" % (number * 2_654_435_761 % 2**32) for number in range(first, first + count)]


def batch(first: int, count: int = ROWS) -> pa.RecordBatch:
    """Rows whose keys are their values; too many to be gathered."""
    values = rows(first, count)
    headers = [[("pad", bytes(200))] for _ in values]
    columns = {"keys": pa.array([[value] for value in values], KEYS), "value": values}
    return pa.record_batch({**columns, "headers": pa.array(headers, DEFAULT_SCHEMA.field("headers").type)})


async def give(awaitable: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await awaitable


async def ready(producer: Producer) -> None:
    """Send the rows up to `READY`, so that the producer knows where all streamlets are."""
    for first in range(0, READY, ROWS):  # the first batch makes it connect and look the streamlets up again
        await give(await give(producer.send_batch("s", batch(first))))


def check_stored(cluster: FakeCluster, count: int) -> None:
    """Check that all rows up to `count` are stored once, in order, where their keys belong."""
    for streamlet in range(STREAMLETS):
        assert cluster.values("s", streamlet) == [
            row for row in rows(0, count) if streamlet_of(row, STREAMLETS) == streamlet
        ]


async def test_chunks_of_a_batch_go_together_and_each_has_its_delivery(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle]
) -> None:
    producer = make_producer(wide, **OPTIONS)
    await ready(producer)
    assert not made
    delivery = await give(producer.send_batch("s", batch(READY)))
    assert type(delivery) is BatchDelivery
    assert not delivery.done()
    with pytest.raises(asyncio.InvalidStateError):
        delivery.result()
    with pytest.raises(asyncio.InvalidStateError):
        delivery.exception()
    told: list[BatchDelivery] = []
    delivery.add_done_callback(told.append)

    deliveries = await give(delivery)

    assert [len(bundle.lanes) for bundle in made] == [STREAMLETS]
    assert len(wide.loopback.writes[-1]) == STREAMLETS
    check_stored(wide, READY + ROWS)
    expected = {streamlet: wide.values("s", streamlet) for streamlet in range(STREAMLETS)}
    for each in deliveries:
        values = expected[each.entry.streamlet_id]
        assert (each.record, each.record + each.record_count) == (len(values) - each.record_count, len(values))
        assert each.position is not None
    assert (delivery.done(), delivery.exception(), delivery.result()) == (True, None, deliveries)
    await until(lambda: told == [delivery])


async def test_rows_without_keys_go_to_the_streamlets_in_turn_chunk_by_chunk(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle]
) -> None:
    producer = make_producer(wide, **OPTIONS)
    values = [b"%04d" % number for number in range(400)]
    columns = pa.record_batch({"value": [value * 25 for value in values]})
    await ready(producer)
    before = [len(wide.values("s", streamlet)) for streamlet in range(STREAMLETS)]

    deliveries = await give(await give(producer.send_batch("s", columns)))

    assert [len(bundle.lanes) for bundle in made] == [len(deliveries)]
    assert len(deliveries) >= STREAMLETS
    streamlets = [each.entry.streamlet_id for each in deliveries]
    assert streamlets == [(streamlets[0] + number) % STREAMLETS for number in range(len(deliveries))]
    rows_of = [[value[:4] for value in wide.values("s", number)[before[number] :]] for number in range(STREAMLETS)]
    assert all(found == sorted(found) for found in rows_of)
    assert sorted(value for found in rows_of for value in found) == values


async def test_batches_and_records_between_them_keep_their_order(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle]
) -> None:
    producer = make_producer(wide, **OPTIONS)
    await ready(producer)
    last = READY
    for count in (40, 3, 50, 1, 1, 60, 40):
        if count < 10:
            for row in rows(last, count):
                producer.send("s", row, keys=[row])
        else:
            await give(producer.send_batch("s", batch(last, count)))
        last += count
    await give(producer.flush())

    assert made
    check_stored(wide, last)


@pytest.mark.parametrize("fault", [Fault.NOT_SENT, Fault.LOST, Fault.ANSWER_LOST])
async def test_a_lost_bundle_is_retried(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle], fault: Fault
) -> None:
    producer = make_producer(wide, **OPTIONS)
    await ready(producer)
    wide.loopback.faults.extend([fault, fault])
    sent = [await give(producer.send_batch("s", batch(READY + ROWS * number))) for number in (0, 1, 2)]
    told: list[BatchDelivery] = []
    sent[0].add_done_callback(told.append)

    deliveries = [await give(each) for each in sent]

    assert made
    check_stored(wide, READY + 3 * ROWS)
    assert [sum(each.record_count for each in of_batch) for of_batch in deliveries] == [ROWS] * 3
    assert (sent[0].done(), sent[0].exception(), sent[0].result()) == (True, None, deliveries[0])
    await until(lambda: told == [sent[0]])


async def test_an_error_for_one_chunk_of_a_bundle_leaves_the_others_stored(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle]
) -> None:
    producer = make_producer(wide, **OPTIONS)
    await ready(producer)
    spoilt = iter([1, 3])

    def amend(answer: broker_pb2.MultiWriteChunksResponse) -> None:
        """The broker has the chunk but says that it has not: the retry is a repeat."""
        which = next(spoilt, None) if len(answer.statuses) == STREAMLETS else None
        if which is not None:
            answer.statuses[which].CopyFrom(broker_pb2.ChunkStatus(error=error_to_message(ArenaFull("no room"))))
            answer.all_stored = False

    wide.loopback.amend = amend
    deliveries = [await give(await give(producer.send_batch("s", batch(READY + ROWS * number)))) for number in (0, 1)]

    assert len(made) == 2
    check_stored(wide, READY + 2 * ROWS)
    assert [sum(each.duplicate for each in of_batch) for of_batch in deliveries] == [1, 1]


async def test_a_permanent_refusal_fails_the_batch(wide: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(wide, **OPTIONS)
    await ready(producer)
    wide.loopback.refuse = lambda: UnknownStream("it was deleted", stream="s")

    delivery = await give(producer.send_batch("s", batch(READY)))
    del wide.infos["s"]

    with pytest.raises(UnknownStream):
        await give(delivery)
    assert isinstance(delivery.exception(), UnknownStream)
    with pytest.raises(UnknownStream):
        await give(producer.flush())


async def test_chunks_wait_in_order_while_the_broker_is_unreachable(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle]
) -> None:
    producer = make_producer(wide, **OPTIONS)
    await ready(producer)
    wide.connects.extend([Unavailable("nobody listens")] * 2)
    sent = [await give(producer.send_batch("s", batch(READY + ROWS * number))) for number in (0, 1)]
    await wide.loopback.close()
    (last,) = rows(READY + 2 * ROWS, 1)
    producer.send("s", last, keys=[last])

    for each in sent:
        await give(each)
    await give(producer.flush())

    assert len(made) == 2
    check_stored(wide, READY + 2 * ROWS + 1)


@pytest.mark.parametrize("in_flight", [False, True])
async def test_closing_a_producer_fails_undelivered_bundles(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle], *, in_flight: bool
) -> None:
    producer = make_producer(wide, **OPTIONS)
    await ready(producer)
    wide.loopback.faults.append(Fault.HELD)
    delivery = await give(producer.send_batch("s", batch(READY)))
    if in_flight:
        await until(lambda: bool(wide.loopback.held))
    loss = producer.loss()
    assert loss is not None
    assert loss.attributes == {"records": ROWS, "streams": ["s"]}
    flush = asyncio.create_task(producer.flush())
    await asyncio.sleep(0)
    if not in_flight:
        made[0].sent = False  # as if the loop had not run

    await give(producer.close(flush=False))

    error = Uncertain if in_flight else ClosedError
    with pytest.raises(error):
        await give(delivery)
    with contextlib.suppress(Uncertain, ClosedError):
        await give(flush)
    assert producer.loss() is None
    wide.loopback.release()  # an answer after the producer has closed
    await asyncio.sleep(0)


async def test_bundles_keep_to_the_limit_of_a_request(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle]
) -> None:
    producer = make_producer(wide, **OPTIONS, request_bytes_max=8_192, buffer_bytes_max=65_536)
    await ready(producer)
    for number in range(20):
        await give(producer.send_batch("s", batch(READY + ROWS * number)))
    await give(producer.flush())

    check_stored(wide, READY + 20 * ROWS)
    assert made
    assert all(len(bundle.bulk) <= 8_192 or len(bundle.lanes) == 1 for bundle in made)


async def test_a_lane_with_an_earlier_record_stays_out_of_the_bundle(
    wide: FakeCluster, make_producer: MakeProducer, made: list[Bundle]
) -> None:
    producer = make_producer(wide, **OPTIONS)
    await ready(producer)
    (row,) = rows(READY, 1)
    producer.send("s", row, keys=[row])  # a record in the same lane goes first

    await give(producer.send_batch("s", batch(READY + 1)))
    await give(producer.flush())

    assert sorted(len(bundle.lanes) for bundle in made) == [STREAMLETS - 1]
    check_stored(wide, READY + ROWS + 1)
