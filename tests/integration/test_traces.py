"""Traces from a producer over a broker and its backup to a consumer, at a receiver and an OpenTelemetry Collector."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pytest

from kera.client import Client, ClientSettings
from kera.local.cluster import LocalCluster
from tests.collector import Received, collecting, receiving

pytestmark = pytest.mark.timeout(1700)  # the first time, the collector is built
CREATE, SEND, RECEIVE, PROCESS = 4, 3, 3, 5
APPEND, REPLICATE = 2, 1
"""Kinds of spans in OTLP."""


async def through(bootstrap: str, traces: str, records: int = 3) -> list[dict[str, bytes | None]]:
    """Write and read records; returns their headers."""
    async with await Client.connect(bootstrap, ClientSettings(traces=traces)) as client:
        await client.admin.create_stream("orders", replication=1)
        async with client.producer() as producer:
            await producer.prepare("orders")
            await asyncio.gather(*(producer.send("orders", b"a value that is secret") for _ in range(records)))
        async with client.consumer("orders", start="earliest", end="latest", consumer_group="audit") as consumer:
            return [dict(record.headers) async for record in consumer]


@pytest.mark.parametrize(
    "receiver",
    [pytest.param(receiving, id="receiver"), pytest.param(collecting, id="collector", marks=pytest.mark.slow)],
)
def test_a_trace_follows_a_record_from_producer_over_broker_and_backup_to_consumer(
    tmp_path: Path, receiver: Callable[[Path], AbstractContextManager[Received]]
) -> None:
    with receiver(tmp_path) as collector:
        traces = f"otlp {collector.url} 1"
        with LocalCluster.running(brokers=1, backups=1, env={"KERA_BROKER_TRACES": traces}) as cluster:
            headers = asyncio.run(through(cluster.bootstrap, traces))
            collector.wait_for(*(f"{what} orders" for what in ("create", "send", "append", "replicate", "receive")))
            found = collector.wait_for("process orders", count=len(headers))
        text = collector.text()

    by_id = {each.span_id: each for each in found}
    creates = {(each.trace_id, each.span_id) for each in found if each.name == "create orders"}
    assert len(creates) == len(headers) == 3
    assert {tuple((each["traceparent"] or b"").decode().split("-")[1:3]) for each in headers} == creates
    kinds = {(each.name.split()[0], each.kind, each.service) for each in found}
    assert kinds == {
        ("create", CREATE, "kera-client"),
        ("send", SEND, "kera-client"),
        ("append", APPEND, "kera-broker"),
        ("replicate", REPLICATE, "kera-broker"),
        ("receive", RECEIVE, "kera-client"),
        ("process", PROCESS, "kera-client"),
    }
    for each in found:
        above = by_id.get(each.parent_id)
        name = each.name.split()[0]
        if name in {"send", "append", "replicate", "process"}:
            assert above is not None
            assert above.trace_id == each.trace_id
            expected = {"send": "create", "append": "send", "replicate": "append", "process": "receive"}[name]
            assert above.name.split()[0] == expected
        assert each.attributes["messaging.destination.name"] == "orders"
    linked = {link for each in found if each.name == "send orders" for link in each.links}
    received = {link for each in found if each.name == "receive orders" for link in each.links}
    assert linked == received == creates
    processed = [each for each in found if each.name == "process orders"]
    assert {each.attributes["messaging.consumer.group.name"] for each in processed} == {"audit"}
    assert "secret" not in text


async def batches(bootstrap: str, traces: str) -> list[int]:
    """Send a batch to a stream with headers, and a batch to a typed stream; returns the rows read from the former."""
    async with await Client.connect(bootstrap, ClientSettings(traces=traces)) as client:
        await client.admin.create_stream("plain", replication=1)
        await client.admin.create_stream("typed", replication=1, schema=pa.schema([("n", pa.int64())]))
        async with client.producer() as producer:
            for stream, column in (("plain", pa.array([b"1", b"2"], pa.binary())), ("typed", pa.array([1, 2]))):
                name = "value" if stream == "plain" else "n"
                await (await producer.send_batch(stream, pa.record_batch({name: column})))
        async with client.consumer("plain", start="earliest", end="latest") as consumer:
            return [chunk.batch.num_rows async for chunk in consumer.batches()]


def test_traces_follow_batches_as_far_as_their_stream_allows(tmp_path: Path) -> None:
    with receiving(tmp_path) as collector:
        traces = f"otlp {collector.url} 1"
        with LocalCluster.running(brokers=1, backups=1, env={"KERA_BROKER_TRACES": traces}) as cluster:
            assert asyncio.run(batches(cluster.bootstrap, traces)) == [2]
            wanted = [f"{what} plain" for what in ("send_batch", "send", "append", "replicate", "receive", "process")]
            found = collector.wait_for(*wanted, *(f"{what} typed" for what in ("send_batch", "send", "append")))

    one = {each.name: each for each in found}
    batch = one["send_batch plain"]
    assert batch.kind == CREATE
    assert (batch.attributes["messaging.operation.type"], batch.attributes["messaging.batch.message_count"]) == (
        "send",
        "2",
    )
    assert one["receive plain"].links == {(batch.trace_id, batch.span_id)}
    for stream in ("plain", "typed"):
        assert one[f"send {stream}"].parent_id == one[f"send_batch {stream}"].span_id
        assert one[f"append {stream}"].parent_id == one[f"send {stream}"].span_id


@pytest.mark.timeout(180)  # a client that waited for the collector with each record would take longer
def test_a_hanging_collector_does_not_slow_clients() -> None:
    with socket.socket() as silent, LocalCluster.running(brokers=1, backups=1) as cluster:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # it accepts nothing
        headers = asyncio.run(through(cluster.bootstrap, f"otlp http://127.0.0.1:{silent.getsockname()[1]} 1", 500))
    assert all("traceparent" in each for each in headers)
    assert len(headers) == 500


def test_without_traces_records_have_no_headers_and_nothing_is_sent(tmp_path: Path) -> None:
    with receiving(tmp_path) as collector, LocalCluster.running(brokers=1, backups=1) as cluster:
        headers = asyncio.run(through(cluster.bootstrap, ""))
        assert headers == [{}, {}, {}]
        assert collector.spans() == []
