"""The pure parts of `bench.compare.peers`: protocols cut anywhere, configurations, and what tools print."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import kafka
from bench.compare.peers import kafka as kafka_peer
from bench.compare.peers import nats, rabbitmq, redis
from bench.compare.peers import rabbitmq_protocol as stream
from bench.compare.peers.install import Missing, go_program, new_packages
from bench.compare.peers.kafka_java import KafkaJava
from bench.compare.peers.kafka_java_worker import consumed, produced, produced_in_all, producer_properties
from bench.compare.peers.kafka_worker import messages, producer_settings
from bench.compare.peers.nats_protocol import BATCH_MAX, Acknowledgements, Messages, publish, publish_atomically
from bench.compare.peers.peer import names
from bench.compare.peers.raw import Batch
from bench.compare.peers.redis_protocol import Replies, adds, command
from bench.compare.worker import Task, Worker
from bench.compare.workload import Workload


def a_workload(**settings: object) -> Workload:
    return Workload.model_validate({"name": "some", "title": "Some", "record_bytes": 100, "seconds": 1} | settings)


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """Cut the data in two at each place, and into single bytes."""
    for at in range(len(data)):
        yield [data[:at], data[at:]]
    yield [bytes([byte]) for byte in data]


# -- NATS


ACKNOWLEDGED = (
    b'MSG _A.0 1  33\r\n{"stream":"round-1-0-0", "seq":1}\r\n'
    b'MSG _A12.7 1  33\r\n{"stream":"round-1-0-7", "seq":5}\r\nPING\r\n'
    b'MSG _A.7 1  33\r\n{"stream":"round-1-0-7", "seq":6}\r\n'
)


def test_nats_acknowledgements_are_counted_by_partition_wherever_they_are_cut() -> None:
    for pieces in cuts(ACKNOWLEDGED):
        acknowledgements = Acknowledgements()
        total: Counter[int] = Counter()
        for piece in pieces:
            total += acknowledgements.feed(piece)
        assert total == {0: 1, 7: 2}


def test_a_refusal_by_nats_is_an_error() -> None:
    with pytest.raises(ValueError, match="no space"):
        Acknowledgements().feed(b'MSG _A.0 1 9\r\n{"error":{"code":503,"description":"no space"}}\r\n')


def test_nats_publications_have_a_reply_subject_for_the_partition() -> None:
    assert publish(b"s", Batch(3, [b"one", b"two"], None), b"_A") == b"PUB s _A.3 3\r\none\r\nPUB s _A.3 3\r\ntwo\r\n"


def test_a_nats_atomic_batch_ends_with_a_commit_that_is_acknowledged() -> None:
    first = b"NATS/1.0\r\nNats-Batch-Id:_A-3\r\nNats-Batch-Sequence:1\r\nkey: k\r\n\r\n"
    last = b"NATS/1.0\r\nNats-Batch-Id:_A-3\r\nNats-Batch-Sequence:2\r\nNats-Batch-Commit:1\r\nkey: l\r\n\r\n"
    published = publish_atomically(b"s", Batch(3, [b"one", b"two"], [b"k", b"l"]), b"_A")
    assert published == (
        b"HPUB s %d %d\r\n%bone\r\n" % (len(first), len(first) + 3, first)
        + b"HPUB s _A.3 %d %d\r\n%btwo\r\n" % (len(last), len(last) + 3, last)
    )


def test_too_many_messages_for_a_nats_atomic_batch_are_split() -> None:
    published = publish_atomically(b"s", Batch(0, [b"v"] * (2 * BATCH_MAX + 1), None), b"_A")
    assert published.count(b"Nats-Batch-Commit") == 3
    assert published.count(b"Nats-Batch-Sequence:1\r\n") == 3
    assert b"Nats-Batch-Sequence:%d\r\n" % (BATCH_MAX + 1) not in published


def test_nats_batch_acknowledgements_count_all_messages_wherever_they_are_cut() -> None:
    data = (
        b'MSG _A.0 1 52\r\n{"stream":"round-1-0-0", "seq":1000,"batch":"_A-0","count":1000}\r\n'
        b'MSG _A.1 1 33\r\n{"stream":"round-1-0-1", "seq":1}\r\n'
        b'MSG _A.0 1 52\r\n{"stream":"round-1-0-0", "seq":1003,"batch":"_A-0","count":3}\r\n'
    )
    for pieces in cuts(data):
        acknowledgements = Acknowledgements()
        total: Counter[int] = Counter()
        for piece in pieces:
            total += acknowledgements.feed(piece)
        assert total == {0: 1003, 1: 1}


def test_nats_supports_persisted_workloads_if_it_has_atomic_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    contestant, persisted = nats.Nats(), a_workload(durability="persisted")
    monkeypatch.setattr(contestant, "_version", lambda: "2.11.4")
    assert contestant.supports(persisted) is not None
    assert contestant.supports(a_workload()) is None
    monkeypatch.setattr(contestant, "_version", lambda: "2.12.0")
    assert contestant.supports(persisted) is None


def test_a_key_is_a_nats_header_and_the_value_is_read_back() -> None:
    published = publish(b"s", Batch(0, [b"value"], [b"k"]), b"_A")
    headers = b"NATS/1.0\r\nkey: k\r\n\r\n"
    assert published == b"HPUB s _A.0 %d %d\r\n%bvalue\r\n" % (len(headers), len(headers) + 5, headers)
    delivered = b"HMSG _D.0 1 reply %d %d\r\n%bvalue\r\n" % (len(headers), len(headers) + 5, headers)
    assert Messages().feed(delivered) == [b"value"]


def test_nats_messages_are_parsed_and_requests_answered_wherever_they_are_cut() -> None:
    control = b"NATS/1.0 100 FlowControl Request\r\n\r\n"
    data = (
        b"MSG _D.0 1 $JS.ACK.x 4\r\na\r\nb\r\nPING\r\n"
        + b"HMSG _D.0 1 $JS.FC.y %d %d\r\n%b\r\n" % (len(control), len(control), control)
        + b"MSG _D.0 1 $JS.ACK.x 2\r\ncd\r\n"
    )
    for pieces in cuts(data):
        messages = Messages()
        assert [value for piece in pieces for value in messages.feed(piece)] == [b"a\r\nb", b"cd"]
        assert messages.answers == [b"PONG\r\n", b"PUB $JS.FC.y 0\r\n\r\n"]


def test_nats_settings_have_routes_and_sync_only_if_needed() -> None:
    text = nats.settings(1, [10, 11], [20, 21], Path("/data"), sync_always=True)
    assert "port: 11\n" in text
    assert "listen: 127.0.0.1:21" in text
    assert "routes: [nats-route://127.0.0.1:20]" in text
    assert "sync_interval: always" in text
    alone = nats.settings(0, [10], [20], Path("/data"), sync_always=False)
    assert "cluster" not in alone
    assert "sync_interval" not in alone


# -- Redis


def test_each_redis_record_is_one_command() -> None:
    one, two = (command(b"XADD", b"s", b"*", b"v", value) for value in (b"one", b"two"))
    assert adds(b"s", Batch(0, [b"one", b"two"], None)) == one + two
    assert adds(b"s", Batch(0, [b"one"], [b"key"])) == command(b"XADD", b"s", b"*", b"k", b"key", b"v", b"one")


def test_redis_replies_are_counted_wherever_they_are_cut() -> None:
    data = b"$15\r\n1700000000000-0\r\n$15\r\n1700000000000-1\r\n:1\r\n$15\r\n1700000000001-0\r\n:0\r\n"
    for pieces in cuts(data):
        replies = Replies()
        fed = [replies.feed(piece) for piece in pieces]
        assert sum(added for added, _ in fed) == 3
        assert [wait for _, waits in fed for wait in waits] == [1, 0]


def test_a_redis_id_counts_only_when_it_is_complete() -> None:
    replies = Replies()
    assert replies.feed(b"$15\r\n17000") == (0, ())
    assert replies.feed(b"00000000-0\r\n") == (1, ())


def test_a_refusal_by_redis_is_an_error() -> None:
    with pytest.raises(ValueError, match="OOM"):
        Replies().feed(b"$15\r\n1700000000000-0\r\n-OOM command not allowed\r\n")


def test_a_redis_replica_has_a_leader() -> None:
    assert "replicaof 127.0.0.1 1\n" in redis.settings(2, Path("/data"), sync_always=False, leader=1)
    assert "appendfsync always\n" in redis.settings(1, Path("/data"), sync_always=True, leader=None)


# -- RabbitMQ


def a_delivery(entries: bytes, count: int, messages: int) -> bytes:
    header = struct.pack(">BBHIqQQiIII", 0x50, 0, count, messages, 0, 1, 0, 0, len(entries), 0, 0)
    assert len(header) == stream.CHUNK_HEADER_BYTES
    return b"\x05" + header + entries


def test_rabbitmq_frames_are_parsed_wherever_they_are_cut() -> None:
    data = stream.frame(stream.CREDIT, b"abc") + stream.frame(stream.OPEN, b"")
    for pieces in cuts(data):
        frames = stream.Frames()
        found = [each for piece in pieces for each in frames.feed(piece)]
        assert found == [(stream.CREDIT, b"abc"), (stream.OPEN, b"")]


def test_rabbitmq_confirmations_count_messages_by_publishing_ids() -> None:
    ((key, body),) = stream.Frames().feed(stream.publish(2, [b"aa", b"bb", b"cc"], together=2))
    assert key == stream.PUBLISH
    assert struct.unpack_from(">BI", body) == (2, 2)
    ids = [struct.unpack_from(">Q", body, 5)[0], struct.unpack_from(">Q", body, 5 + 8 + 11 + 12)[0]]
    assert stream.confirmed(struct.pack(">BIQQ", 2, 2, *ids)) == 3


def test_rabbitmq_values_are_read_back_alone_and_together() -> None:
    ((_, body),) = stream.Frames().feed(stream.publish(0, [b"aa", b"bb", b"cc"], together=2))
    together, alone = body[5 + 8 : 5 + 8 + 11 + 12], body[5 + 8 + 11 + 12 + 8 :]
    delivery = memoryview(a_delivery(together + alone, count=2, messages=3))
    assert stream.chunk_messages(delivery) == 3
    assert [bytes(value) for value in stream.chunk_values(delivery)] == [b"aa", b"bb", b"cc"]


def test_rabbitmq_supports_only_the_workloads_that_it_can_do() -> None:
    contestant = rabbitmq.RabbitMq()
    assert contestant.supports(a_workload()) is None
    assert contestant.supports(a_workload(durability="persisted")) is not None
    assert contestant.supports(a_workload(durability="replicated", replicas=1)) is not None
    assert contestant.supports(a_workload(streamlets=1_000)) is not None


def test_the_root_directory_in_erlangs_script_is_relocated_once() -> None:
    script = "    ROOTDIR=/usr/lib/erlang\nelse\n    ROOTDIR=/usr/lib/erlang\nfi\n"
    moved = rabbitmq.relocated(script, Path("/cache"))
    assert moved == "    ROOTDIR=/cache/usr/lib/erlang\nelse\n    ROOTDIR=/cache/usr/lib/erlang\nfi\n"
    assert rabbitmq.relocated(moved, Path("/cache")) == moved


# -- Kafka


def test_only_the_first_kafka_broker_is_a_controller() -> None:
    first, second = (kafka.broker_settings(number, 9000 + number, 9000, Path("/logs")) for number in (1, 2))
    assert "process.roles=broker,controller\n" in first
    assert "listeners=PLAINTEXT://127.0.0.1:9001,CONTROLLER://127.0.0.1:9000\n" in first
    assert "process.roles=broker\n" in second
    assert "listeners=PLAINTEXT://127.0.0.1:9002\n" in second
    assert "controller.quorum.voters=1@127.0.0.1:9000\n" in second


def test_kafka_brokers_lead_partitions_in_turn() -> None:
    assert kafka.replicas(3, 2, 2) == [[1, 2], [2, 1], [1, 2]]
    assert kafka.replicas(2, 1, 1) == [[1], [1]]


def test_durabilities_become_kafka_settings() -> None:
    leader, persisted = a_workload(), a_workload(durability="persisted")
    replicated = a_workload(durability="replicated", replicas=1)
    assert [kafka_peer.acks(each) for each in (leader, replicated, persisted)] == ["1", "all", "1"]
    assert kafka_peer.topic_settings(leader) == {}
    assert kafka_peer.topic_settings(replicated) == {"min.insync.replicas": "2"}
    assert kafka_peer.topic_settings(persisted) == {"flush.messages": "1"}


def test_kafkas_tools_support_only_throughput_workloads() -> None:
    contestant = KafkaJava()
    assert contestant.supports(a_workload(streamlets=8, producers=2)) is None
    assert contestant.supports(a_workload(consumers=1, backlog_bytes=1_000)) is None
    for refused in ({"rate": 1000}, {"keys": "zipf"}, {"streams": 2}, {"consumers": 1}):
        assert contestant.supports(a_workload(**refused)) is not None


def test_reports_of_kafkas_producer_tool_are_parsed() -> None:
    window = "340 records sent, 3365.3 records/sec (0.32 MB/sec), 61.7 ms avg latency, 74.0 ms max latency."
    last = (
        "7871 records sent, 78710.0 records/sec (7.51 MB/sec), 61.70 ms avg latency, 74.00 ms max latency,"
        " 60 ms 50th, 70 ms 95th, 73 ms 99th, 74 ms 99.9th."
    )
    assert (produced(window), produced_in_all(window)) == (340, None)
    assert (produced(last), produced_in_all(last)) == (None, 7871)
    assert produced("WARN something else") is None


def test_reports_of_kafkas_consumer_tool_are_parsed() -> None:
    line = "2026-01-01 10:00:00:123, 0, 95.3674, 953.6743, 1000000, 10000000.0000, 0, 100, 953.6743, 10000000.0000"
    assert consumed(line) == 1_000_000
    assert consumed("SLF4J: Defaulting to no-operation (NOP) logger implementation") is None


# -- all


def test_the_missing_packages_are_those_that_apt_would_install() -> None:
    simulation = "Reading package lists...\nInst libpopt0 (1.19)\nInst socat (1.7)\nConf libpopt0 (1.19)\n"
    assert new_packages(simulation) == ["libpopt0", "socat"]


def test_each_partition_has_its_own_name_in_each_round() -> None:
    workload = a_workload(streams=2, streamlets=3)
    first, second = names(workload, 1), names(workload, 2)
    assert len({*first, *second}) == 12
    assert first[1 * 3 + 2] == "round-1-1-2"


def test_a_go_program_is_taken_from_the_path_or_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.compare.peers.install.CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Missing, match="no some-server, and no go"):
        go_program("some-server", "example.org/some-server", "v1.0.0")

    go = tmp_path / "go"
    go.write_text('#!/bin/sh\necho "$@" > "$GOBIN/some-server"\n')
    go.chmod(0o755)
    built = go_program("some-server", "example.org/some-server", "v1.0.0").path
    assert built == tmp_path / "cache" / "some-server-v1.0.0" / "some-server"
    assert built.read_text() == "install example.org/some-server@v1.0.0\n"

    here = tmp_path / "some-server"
    here.touch(mode=0o755)
    assert go_program("some-server", "example.org/some-server", "v1.0.0").path == here


@pytest.mark.parametrize(("rate", "bounded"), [(0, False), (1000, True)])
def test_kafka_requests_in_flight_are_bounded_only_at_a_rate(rate: float, *, bounded: bool) -> None:
    settings = {"bootstrap": "127.0.0.1:1", "acks": "all", "topics": ["some"]}
    task = Task(role="produce", index=0, workload=a_workload(rate=rate), settings=settings)
    assert ("max.in.flight.requests.per.connection" in producer_settings(Worker(task))) == bounded


def test_a_workload_can_have_settings_only_for_kafka() -> None:
    workload = a_workload(settings={"kafka": {"batch.size": 1280}, "kafka-java": {"max.request.size": 1 << 20}})
    settings = {"bootstrap": "127.0.0.1:1", "acks": "1", "topics": ["some"]}
    worker = Worker(Task(role="produce", index=0, workload=workload, settings=settings))
    assert producer_settings(worker)["batch.size"] == 1280
    assert producer_properties(worker)["max.request.size"] == 1 << 20


def test_kafka_records_are_divided_over_partitions_or_have_keys() -> None:
    divided = Counter(each["partition"] for each in messages(a_workload(streamlets=1024, batch_bytes=1024), 0))
    assert divided == dict.fromkeys(range(1024), 10)
    many = Counter(each["partition"] for each in messages(a_workload(streamlets=1024, batch_bytes=1 << 20), 0))
    assert len(many) == 1024
    keyed = messages(a_workload(streamlets=16, keys="random", batch_records=5000), 0)
    assert len(keyed) == 5000
    assert all(each.keys() == {"value", "key"} for each in keyed)
