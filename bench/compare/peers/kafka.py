"""Apache Kafka with confluent-kafka, which is librdkafka: its fastest client for Python.

A stream is a topic. Producers send prepared records with ``produce_batch``; at a rate each has a delivery callback.
Level leader is acks=1; level replicated as many brokers as copies, all in sync, acks=all; level persisted in addition
flush.messages=1, so that each append is flushed.

At a rate brokers are warmed up with many more requests than a round has: at 1,000 a second a JVM would take minutes to
compile their handlers, which a server that has been up for a day has long done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import kafka
from bench.compare.contestant import Command, Role
from bench.compare.peers.kafka_worker import IN_FLIGHT_AT_A_RATE
from bench.compare.peers.peer import Peer, command, failing
from bench.compare.workload import Workload

WARM_UP_RECORDS, WARM_UP_S_MAX = 60_000, 90.0
"""After this many, a broker takes a quarter of its time per record after 10,000; more records do not improve it."""
WARM_UP_WINDOW = 4
"""Records under way: more of them give fewer, larger requests."""


class Kafka(Peer):
    """See `bench.compare.contestant.Contestant`."""

    name = "kafka"

    def __init__(self) -> None:
        self._parts: kafka.Server | None = None

    def bring(self) -> None:
        """Fetch broker and client."""
        self._parts = kafka.bring_server()

    @property
    def title(self) -> str:
        """The title, with versions."""
        return f"Kafka {kafka.BROKER_VERSION} (confluent-kafka {kafka.CLIENT_VERSION})"

    def versions(self) -> dict[str, str]:
        """Versions of broker and client."""
        return {"kafka": kafka.BROKER_VERSION, "confluent-kafka": kafka.CLIENT_VERSION}

    def supports(self, workload: Workload) -> str | None:
        """All workloads."""
        del workload
        return None

    def durability(self, workload: Workload) -> str:
        """The durability in Kafka's words."""
        return ", ".join(
            [f"acks={acks(workload)}", f"{1 + workload.replicas} brokers"]
            + [f"{name}={value}" for name, value in topic_settings(workload).items()]
        )

    @contextlib.contextmanager
    def start(self, workload: Workload, folder: Path) -> Iterator[Running]:
        """As many brokers as there are copies; the first is also the controller."""
        assert self._parts is not None  # noqa: S101 - started only with all parts
        with contextlib.ExitStack() as stack:
            with failing():
                brokers = stack.enter_context(kafka.running(self._parts, folder / "kafka", 1 + workload.replicas))
                if workload.rate:
                    warm_up(self._parts, brokers, workload)
            yield self.running(workload, brokers)

    def running(self, workload: Workload, brokers: kafka.Kafka) -> Running:
        """The running contestant whose workers use confluent-kafka."""
        assert self._parts is not None  # noqa: S101 - started only with all parts
        return Running(workload, brokers, str(self._parts.client))


def acks(workload: Workload) -> str:
    """The acknowledgements that a producer waits for."""
    return "all" if workload.replicas else "1"


def warm_up(parts: kafka.Server, brokers: kafka.Kafka, workload: Workload) -> None:
    """Write and read `WARM_UP_RECORDS` one by one, in a topic like the workload's."""
    client, topic = kafka.client(parts), "warm-up"
    brokers.create(topic, 1, replication=1 + workload.replicas, settings=topic_settings(workload))
    common = {"bootstrap.servers": brokers.bootstrap}
    in_flight = {"max.in.flight.requests.per.connection": IN_FLIGHT_AT_A_RATE}
    producer = client.Producer(common | in_flight | {"acks": acks(workload), "linger.ms": 0})
    consumer = client.Consumer(common | {"group.id": topic, "enable.auto.commit": False})
    consumer.assign([client.TopicPartition(topic, 0, 0)])
    value, end_s = bytes(workload.record_bytes), time.monotonic() + WARM_UP_S_MAX
    for _ in range(WARM_UP_RECORDS):
        if time.monotonic() > end_s:
            break
        producer.produce(topic, value)
        while len(producer) >= WARM_UP_WINDOW and time.monotonic() < end_s:
            producer.poll(0.001)
        consumer.consume(WARM_UP_WINDOW, 0)
    producer.flush()
    consumer.close()
    brokers.delete(topic)


def topic_settings(workload: Workload) -> dict[str, str]:
    """The topic settings for the workload's level."""
    settings = {}
    if workload.replicas:
        settings["min.insync.replicas"] = str(1 + workload.replicas)
    if workload.durability == "persisted":
        settings["flush.messages"] = "1"
    return settings


class Running:
    """See `bench.compare.contestant.Running`."""

    def __init__(self, workload: Workload, brokers: kafka.Kafka, client: str) -> None:
        self._workload = workload
        self._brokers = brokers
        self._client = client
        self._topics: list[str] = []

    def processes(self) -> dict[str, int]:
        """The brokers."""
        return dict(self._brokers.pids)

    def prepare(self, number: int) -> None:
        """Create a topic for each stream."""
        with failing():
            for topic in self._topics:
                self._brokers.delete(topic)
            self._topics = [f"round-{number}-{stream}" for stream in range(self._workload.streams)]
            for topic in self._topics:
                self._brokers.create(
                    topic,
                    self._workload.streamlets,
                    replication=1 + self._workload.replicas,
                    settings=topic_settings(self._workload),
                )

    def settings(self) -> dict[str, Any]:
        """The settings for workers."""
        return {"bootstrap": self._brokers.bootstrap, "topics": self._topics, "acks": acks(self._workload)}

    def worker(self, role: Role, index: int) -> Command:
        """A worker with the client on its path."""
        del role, index
        return command("kafka_worker", self.settings(), self._client)
