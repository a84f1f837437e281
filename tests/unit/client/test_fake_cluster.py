"""The fake cluster for users' tests: streams, groups, epochs, faults, and refusals of a real cluster."""

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from kera.client.admin.locating import ChunkQuery
from kera.client.serializers import AvroDeserializer, AvroSerializer
from kera.client.testing import FakeCluster
from kera.coordinator.cluster.validation import checked_name
from kera.core.base.address import split_address
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import (
    CorruptChunk,
    DataLost,
    EpochPassed,
    InvalidArgument,
    ProducerFenced,
    StreamExists,
    Unavailable,
    UnknownSchema,
    UnknownStream,
    UnknownSubject,
)
from tests.unit.client.support import WAIT_S, until

DOCS = Path(__file__).parents[3] / "docs" / "testing-your-code.md"


@pytest.mark.parametrize("grpc", [False, True])
async def test_sent_records_are_stored_in_order_and_read_over_either_transport(grpc: bool) -> None:
    async with FakeCluster(brokers=2, grpc=grpc) as cluster:
        client = cluster.client(transport="grpc" if grpc else "tcp")
        await client.admin.create_stream("orders", streamlets=2)
        async with client.producer() as producer:
            await producer.prepare("orders")
            for number in range(10):
                await producer.send("orders", b"%d" % number, streamlet=number % 2)
        stream = cluster.stream("orders")
        assert stream.values(0) == [b"0", b"2", b"4", b"6", b"8"]
        assert stream.values(1) == [b"1", b"3", b"5", b"7", b"9"]
        async with client.consumer("orders", start="earliest", end="latest") as consumer:
            assert {record.value async for record in consumer} == {b"%d" % number for number in range(10)}


async def test_a_typed_stream_has_its_own_columns() -> None:
    async with FakeCluster() as cluster:
        client = cluster.client()
        schema = pa.schema([pa.field("n", pa.int64())])
        await client.admin.create_stream("numbers", schema=schema)
        async with client.producer() as producer:
            await producer.prepare("numbers")
            await (await producer.send_batch("numbers", pa.record_batch({"n": [1, 2]}, schema)))
        assert cluster.stream("numbers").table().to_pydict() == {"n": [1, 2]}


async def test_the_schema_registry_takes_every_schema() -> None:
    async with FakeCluster() as cluster:
        client = cluster.client()
        await client.admin.create_stream("orders")
        schema = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
        for kind in (schema, {**schema, "fields": [{"name": "id", "type": "string"}]}):
            async with client.producer(serializer=AvroSerializer(kind)) as producer:
                await producer.prepare("orders")
                producer.send("orders", {"id": 1 if kind is schema else "1"})
        async with client.consumer(
            "orders", start="earliest", end="latest", deserializer=AvroDeserializer()
        ) as consumer:
            assert [record.value async for record in consumer] == [{"id": 1}, {"id": "1"}]
        schemas = cluster.client().schemas
        assert await schemas.subjects("ord") == ["orders-value"]
        assert await schemas.versions("orders-value") == [1, 2]
        assert (await schemas.latest("orders-value")).schema_id == 2
        assert (await schemas.register("other-value", "avro", (await schemas.by_id(2)).definition)).schema_id == 2
        assert (await schemas.version("orders-value", 1)).schema_id == 1
        for wrong in (schemas.by_id(9), schemas.version("orders-value", 9)):
            with pytest.raises(UnknownSchema):
                await wrong
        with pytest.raises(UnknownSubject):
            await schemas.latest("nobody-value")
        with pytest.raises(InvalidArgument, match="run the test against kera dev"):
            await schemas.set_compatibility("orders-value", "full")


async def test_streams_can_be_created_altered_listed_moved_and_deleted() -> None:
    async with FakeCluster(brokers=2) as cluster:
        admin = cluster.client().admin
        for name in ("b", "a"):
            await admin.create_stream(name)
        with pytest.raises(StreamExists):
            await admin.create_stream("a")
        assert [each.name for each in await admin.list_streams()] == ["a", "b"]
        assert (await admin.alter_stream("a", durability="persisted")).config.durability == "persisted"
        await admin.move_streamlet("a", 0, 2)
        assert cluster.stream("a").streamlets[0].owner == 2
        assert [each.broker_id for each in (await admin.describe_cluster()).brokers if each.alive] == [1, 2]
        await admin.delete_stream("a")
        with pytest.raises(UnknownStream):
            cluster.stream("a")
        with pytest.raises(InvalidArgument, match="one entry"):
            await admin.create_stream("lanes", entries=2)


async def test_reading_truncated_records_raises_data_lost() -> None:
    async with FakeCluster() as cluster:
        client = cluster.client()
        cluster.create_stream("s")
        async with client.producer() as producer:
            await producer.prepare("s")
            for value in (b"a", b"b"):
                await producer.send("s", value)
        start = Position(1, 1, 0)
        end = cluster.stream("s").streamlets[0].log[1].start
        assert await client.admin.truncate_stream("s", {0: [end]}) == {0: [end]}
        async with client.consumer("s", start={0: [start]}, end="latest") as consumer:
            with pytest.raises(DataLost):
                await anext(aiter(consumer))
        async with client.consumer("s", start="earliest", end="latest") as consumer:
            assert [record.value async for record in consumer] == [b"b"]


async def test_a_consumer_goes_on_at_the_position_its_group_committed() -> None:
    async with FakeCluster() as cluster:
        client = cluster.client()
        cluster.create_stream("s")
        async with client.producer() as producer:
            await producer.prepare("s")
            await producer.send("s", b"a")
            async with client.consumer("s", start="committed", end="latest", consumer_group="g") as consumer:
                assert [record.value async for record in consumer] == [b"a"]
                await consumer.commit()
            await producer.send("s", b"b")
        async with client.consumer("s", start="committed", end="latest", consumer_group="g") as consumer:
            assert [record.value async for record in consumer] == [b"b"]
        assert [each.consumer_group for each in await client.admin.consumer_groups()] == ["g"]


async def test_a_newer_producer_of_the_same_name_fences_the_older_one() -> None:
    async with FakeCluster() as cluster:
        client = cluster.client()
        cluster.create_stream("s")
        first, second = client.producer(name="loader"), client.producer(name="loader")
        for producer in (first, second):
            await producer.prepare("s")
            await producer.send("s", b"x")
        with pytest.raises(ProducerFenced):
            await first.send("s", b"too late")
        assert cluster.stream("s").values() == [b"x", b"x"]


class TestFaults:
    async def test_a_refused_write_fails_and_a_later_one_succeeds(self) -> None:
        async with FakeCluster() as cluster:
            cluster.create_stream("s")
            producer = cluster.client().producer()
            await producer.prepare("s")
            cluster.brokers[1].refuse_all(CorruptChunk("a flipped bit"))  # not retried, so it fails without a wait
            with pytest.raises(CorruptChunk):
                await producer.send("s", b"lost")
            cluster.brokers[1].refuse_all(None)
            await producer.send("s", b"kept")
            assert cluster.stream("s").values() == [b"kept"]

    @pytest.mark.parametrize("grpc", [False, True])
    async def test_the_addresses_of_a_crashed_broker_stay_reserved(self, grpc: bool) -> None:
        async with FakeCluster(grpc=grpc) as cluster:
            broker = cluster.brokers[1]
            addresses = {split_address(each) for each in (broker.info.frames_address, broker.info.grpc_address)}
            await broker.crash()
            for address in addresses:
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind(address)
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection(*address)
            await broker.restart()
        for address in addresses:
            (await asyncio.start_server(lambda *_: None, *address)).close()  # released with the cluster

    async def test_a_producer_survives_a_crash_when_another_broker_takes_over(self) -> None:
        async with FakeCluster(brokers=2) as cluster:
            client = cluster.client()
            cluster.create_stream("s")
            producer = client.producer()
            await producer.prepare("s")
            await producer.send("s", b"a")
            await cluster.brokers[1].crash()
            assert not cluster.brokers[1].running
            pending = producer.send("s", b"b")
            cluster.take_over(1, 2)
            await asyncio.wait_for(pending, WAIT_S)
            cluster.recovered()
            async with client.consumer("s", start="earliest", end="latest") as consumer:
                assert [record.value async for record in consumer] == [b"a", b"b"]

    async def test_a_restarted_broker_keeps_its_records(self) -> None:
        async with FakeCluster() as cluster:
            client = cluster.client()
            cluster.create_stream("s")
            producer = client.producer()
            await producer.prepare("s")
            await producer.send("s", b"a")
            await cluster.brokers[1].crash()
            await cluster.brokers[1].restart()
            await asyncio.wait_for(producer.send("s", b"b"), WAIT_S)
            assert cluster.stream("s").values() == [b"a", b"b"]

    async def test_requests_of_a_paused_broker_wait_and_are_handled_in_order(self) -> None:
        async with FakeCluster() as cluster:
            cluster.create_stream("s")
            producer = cluster.client().producer(request_bytes_max=1)
            await producer.prepare("s")
            broker = cluster.brokers[1]
            broker.pause("MultiWriteChunks")
            pending = [producer.send("s", b"%d" % number) for number in range(3)]
            await until(lambda: broker.requests.waiting > 0)
            assert cluster.stream("s").values() == []
            broker.resume()
            await asyncio.wait_for(asyncio.gather(*pending), WAIT_S)
            assert cluster.stream("s").values() == [b"0", b"1", b"2"]

    async def test_a_slow_broker_answers_late(self) -> None:
        async with FakeCluster() as cluster:
            cluster.create_stream("s")
            producer = cluster.client().producer()
            await producer.prepare("s")
            cluster.brokers[1].slow_down(0.05)
            began_s = asyncio.get_running_loop().time()
            await producer.send("s", b"a")
            assert asyncio.get_running_loop().time() >= began_s + 0.05

    async def test_a_request_that_the_coordinator_refused_is_retried(self) -> None:
        async with FakeCluster() as cluster:
            cluster.create_stream("s")
            cluster.coordinator.refuse(Unavailable("nobody leads"))
            assert (await cluster.client().describe("s")).name == "s"
            assert len(cluster.coordinator.requests.named("DescribeStream")) == 2

    async def test_a_method_that_the_fake_cluster_lacks_is_refused_by_name(self) -> None:
        async with FakeCluster() as cluster:
            with pytest.raises(InvalidArgument, match="does not offer Rebalance"):
                await cluster.client().admin.rebalance()


class TestWhatARealClusterRefuses:
    @pytest.mark.parametrize(
        "retention",
        [
            {"retention_ms": 5},
            {"retention_bytes": 5},
            {"retention_consumer_groups": ["g"]},
            {"retention_consumer_groups": ["g"], "retention_consumed": True},
        ],
    )
    async def test_retention_is_refused(self, retention: dict[str, Any]) -> None:
        async with FakeCluster() as cluster:
            cluster.create_stream("s")
            for request in ("create_stream", "alter_stream"):
                with pytest.raises(InvalidArgument, match="a fake cluster has no retention"):
                    await getattr(cluster.client().admin, request)("s", **retention)
            assert not cluster.stream("s").message.config.retention_consumer_groups

    async def test_replicated_durability_needs_a_replication_of_at_least_1(self) -> None:
        async with FakeCluster() as cluster:
            admin = cluster.client().admin
            with pytest.raises(InvalidArgument, match="needs replication of at least 1"):
                await admin.create_stream("s", replication=0, durability="replicated")
            await admin.create_stream("s", replication=0, durability="persisted")
            with pytest.raises(InvalidArgument, match="needs replication of at least 1"):
                await admin.alter_stream("s", durability="replicated")
            assert (await admin.describe_stream("s")).config.durability == "persisted"
            await admin.create_stream("safe", replication=1, durability="replicated")

    async def test_names_that_a_real_cluster_refuses_are_refused(self) -> None:
        async with FakeCluster() as cluster:
            for name in ("", ".", "..", "a/b", "a b", "a\n", "é", "x" * 250):
                with pytest.raises(InvalidArgument):
                    checked_name(name)
                with pytest.raises(InvalidArgument, match="a stream cannot be called"):
                    cluster.create_stream(name)

    async def test_unusual_names_that_a_real_cluster_takes_are_accepted(self) -> None:
        async with FakeCluster() as cluster:
            for name in ("...", ".a", "-", "Az_09", "x" * 249):
                assert cluster.create_stream(checked_name(name)).message.name == name


class TestMisuse:
    async def test_misuse_is_refused_at_once(self) -> None:
        mistakes: list[tuple[Callable[[Any], object], str]] = [
            (lambda cluster: cluster.stream("s").move(0, 9), "no broker 9: the cluster has brokers 1 to 2"),
            (lambda cluster: cluster.stream("s").move(1, 2), "has streamlets 0 to 0, not 1"),
            (lambda cluster: cluster.stream("s").relocate(0, 0), "no broker 0"),
            (lambda cluster: cluster.stream("s").seal(-1), "has streamlets 0 to 0, not -1"),
            (lambda cluster: cluster.stream("s").values(7), "has streamlets 0 to 0, not 7"),
            (lambda cluster: cluster.take_over(9, 2), "no broker 9"),
            (lambda cluster: cluster.take_over(1, 2), "broker 1 still runs: crash it first"),
            (lambda cluster: cluster.stream("s").take_over(1, 2), "broker 1 still runs: crash it first"),
            (lambda cluster: cluster.brokers[1].slow_down(-1), "delay_s is -1"),
            (lambda cluster: cluster.brokers[1].slow_down("1"), "delay_s is '1'"),
            (lambda cluster: cluster.create_stream("none", streamlets=0), "streamlets is 0"),
            (lambda cluster: cluster.brokers[1].pause("Write"), "method is 'Write'.*MultiWriteChunks"),
            (lambda cluster: cluster.brokers[1].refuse("busy"), "error is 'busy'"),
            (lambda cluster: cluster.brokers[1].refuse(Unavailable), "error is <class"),
            (lambda cluster: cluster.brokers[1].refuse_all(ValueError()), r"error is ValueError\(\)"),
            (lambda cluster: cluster.coordinator.refuse(ValueError()), r"error is ValueError\(\)"),
        ]
        async with FakeCluster(brokers=2) as cluster:
            cluster.create_stream("s")
            for use, complaint in mistakes:
                with pytest.raises(InvalidArgument, match=complaint):
                    use(cluster)
                assert cluster.stream("s").streamlets[0].owner == 1

    async def test_restarting_a_running_broker_is_refused(self) -> None:
        async with FakeCluster() as cluster:
            with pytest.raises(InvalidArgument, match="broker 1 still runs"):
                await cluster.brokers[1].restart()

    async def test_moving_a_streamlet_to_a_crashed_broker_is_refused(self) -> None:
        async with FakeCluster(brokers=3) as cluster:
            stream = cluster.create_stream("s")
            for broker_id in (1, 2):
                await cluster.brokers[broker_id].crash()
            with pytest.raises(InvalidArgument, match="broker 2 does not run"):
                cluster.take_over(1, 2)
            with pytest.raises(InvalidArgument, match="broker 2 does not run"):
                stream.move(0, 2)

    @pytest.mark.parametrize("wrong", [{"brokers": 0}, {"brokers": "2"}, {"segment_bytes": 0}])
    def test_invalid_options_of_a_fake_cluster_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument, match=f"{next(iter(wrong))} is "):
            FakeCluster(**wrong)

    async def test_a_cluster_works_only_while_entered_and_can_be_entered_once(self) -> None:
        cluster = FakeCluster()
        with pytest.raises(InvalidArgument, match="has not been entered"):
            cluster.client()
        async with cluster:
            with pytest.raises(InvalidArgument, match="this one runs"):
                await cluster.__aenter__()
        for use in (cluster.client, cluster.__aenter__, lambda: cluster.bootstrap):
            with pytest.raises(InvalidArgument, match="has been closed"):
                await cast("Any", use())


async def test_values_come_from_all_streamlets_unless_one_is_named() -> None:
    async with FakeCluster() as cluster:
        stream = cluster.create_stream("s", streamlets=2)
        async with cluster.client().producer() as producer:
            await producer.prepare("s")
            for number in range(4):
                await producer.send("s", b"%d" % number, streamlet=number % 2)
        assert stream.values() == [b"0", b"2", b"1", b"3"]
        assert stream.values(1) == [b"1", b"3"]


async def test_written_records_close_epochs() -> None:
    async with FakeCluster() as cluster:
        client = cluster.client()
        await client.admin.create_stream("s", streamlets=2, epoch_ms=10, punctuation="producers")
        async with client.producer() as producer:
            await producer.prepare("s")
            for streamlet, times in enumerate(((1000, 12_000, 31_000), (5000, 45_000))):
                for time_us in times:
                    await producer.send("s", b"%d" % time_us, timestamp_us=time_us, streamlet=streamlet)
        bounds = await client.bounds("s")
        assert [bounds[streamlet][0].settled_us for streamlet in (0, 1)] == [31_000, 45_000]
        async with client.epochs("s", start="earliest", end="latest") as epochs:
            assert [(epoch.number, epoch.records) async for epoch in epochs] == [(0, 2), (1, 1)]


async def test_a_group_goes_on_with_the_epochs_after_its_commit() -> None:
    async with FakeCluster() as cluster:
        client = cluster.client()
        await client.admin.create_stream("s", streamlets=2, epoch_ms=10, punctuation="producers")
        async with client.producer() as producer:
            await producer.prepare("s")
            for epoch in range(9):
                for streamlet in (0, 1):
                    await producer.send("s", b"x", timestamp_us=epoch * 10_000 + 1, streamlet=streamlet)
        async with client.epochs("s", start="earliest", end=4, consumer_group="g") as epochs:
            assert [epoch.number async for epoch in epochs] == [0, 1, 2, 3]
            await epochs.commit()
        async with client.epochs("s", start="committed", end=3, consumer_group="g", epoch_ms=20) as epochs:
            assert [(epoch.number, epoch.records) async for epoch in epochs] == [(2, 4)]
        async with client.epochs("s", start="committed", end=2, consumer_group="g", epoch_ms=30) as epochs:
            with pytest.raises(EpochPassed, match="start=1 reads all of it again"):
                await anext(epochs)
        async with client.epochs("s", start=1, end=2, epoch_ms=30) as epochs:
            assert [epoch.records async for epoch in epochs] == [6]
        places = await client.locate("s", [ChunkQuery(0, 0, EARLIEST, records_max=2)])
        assert [(place.record, place.bytes) for place in places] == [(2, place.position.offset) for place in places]


async def test_punctuations_of_producers_close_epochs() -> None:
    async with FakeCluster() as cluster:
        client = cluster.client()
        stream = cluster.create_stream("plain")
        await client.admin.create_stream("s", streamlets=3, epoch_ms=10, punctuation="producers")
        async with client.producer() as producer:
            await producer.prepare("s")
            for streamlet in (0, 1):
                producer.send("s", b"%d" % streamlet, timestamp_us=streamlet, streamlet=streamlet)
            for time_us, written in ((20_000, 2), (20_000, 0), (5, 0)):
                assert await producer.punctuate("s", time_us) == (2, written)
            with pytest.raises(InvalidArgument, match="has no epochs"):
                await producer.punctuate("plain", 5)
        assert stream.values() == []
        assert cluster.stream("s").values() == [b"0", b"1"]
        bounds = await client.bounds("s")
        assert [bounds[streamlet][0].watermark_us for streamlet in range(3)] == [20_000, 20_000, None]
        async with client.epochs("s", start="earliest", end=2) as epochs:
            assert [(epoch.number, epoch.records) async for epoch in epochs] == [(0, 2)]


def test_a_missing_package_is_reported_with_the_command_to_install_it() -> None:
    program = "import sys; sys.modules['grpc_health'] = None; import kera.client.testing"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "is missing; install it with: pip install 'kera[testing]'" in result.stderr


SYNCHRONOUS = """
def test_mine(kera_fake_cluster):
    raise AssertionError("it does not come to this")
"""


def test_the_examples_of_the_document_pass_and_a_synchronous_test_is_refused(pytester: pytest.Pytester) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    for number, example in enumerate(examples):
        if "kera_dev" not in example:
            pytester.makepyfile(**{f"test_example_{number}": example})
    pytester.makepyfile(test_synchronous=SYNCHRONOUS)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    result = pytester.runpytest_subprocess("-p", "kera.pytest_plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*kera_fake_cluster runs in the event loop of its test*async def*"])
