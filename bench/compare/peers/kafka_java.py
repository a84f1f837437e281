"""Apache Kafka with its own client, in Java, by its own tools: kafka-producer-perf-test and kafka-consumer-perf-test.

That is Kafka's best client. The tools give throughput. Their latencies count from the moment when a record is sent,
late or not (coordinated omission), and their values do not contain due times; so they are not comparable, and workloads
with a rate are not supported. Levels are those of `bench.compare.peers.kafka`.
"""

from __future__ import annotations

from typing import Any

from bench import kafka
from bench.compare.contestant import Command, Role
from bench.compare.peers import kafka as by_python
from bench.compare.peers.install import jars, java
from bench.compare.peers.peer import command
from bench.compare.workload import Workload


class KafkaJava(by_python.Kafka):
    """See `bench.compare.contestant.Contestant`."""

    name = "kafka-java"

    def bring(self) -> None:
        """Fetch the broker, and the tools with the client."""
        super().bring()
        tools()

    @property
    def title(self) -> str:
        """The title, with the version."""
        return f"Kafka {kafka.BROKER_VERSION} (its own client, in Java)"

    def versions(self) -> dict[str, str]:
        """Versions of broker, and of client and tools."""
        return {"kafka": kafka.BROKER_VERSION, "kafka-clients": kafka.BROKER_VERSION}

    def supports(self, workload: Workload) -> str | None:
        """The limits of the tools: one topic, no keys, no rate, one consumer of a backlog."""
        if workload.rate:
            return "its tools measure no latency from when a record is due"
        if workload.keys != "none":
            return "its producer tool has no keys"
        if workload.streams > 1:
            return "its tools write to and read from one topic"
        if workload.consumers > 1 or (workload.consumers and not workload.backlog_bytes):
            return "its consumer tool does not tell of the last records, unless it is told how many there are"
        return None

    def running(self, workload: Workload, brokers: kafka.Kafka) -> by_python.Running:
        """The running contestant whose workers are the tools."""
        return _Running(workload, brokers, "")


class _Running(by_python.Running):
    def worker(self, role: Role, index: int) -> Command:
        del role, index
        settings: dict[str, Any] = {**self.settings(), "java": java(), "tools": str(tools())}
        return command("kafka_java_worker", settings)


def tools() -> str:
    """The folder of the tools' jars."""
    version = kafka.BROKER_VERSION
    return str(jars(f"kafka-tools-{version}", [f"org.apache.kafka:kafka-tools:{version}"], alone=False))
