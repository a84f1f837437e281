"""A real Kafka for tests: one broker in KRaft mode, from the jars that ``scripts/kafka.sh`` fetches, on free ports."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tests.integration.zookeeper import _die_with_parent, _free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
PORT_ATTEMPTS = 5
JVM = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={logs}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
log.retention.ms=-1
log.cleaner.backoff.ms=200
file.delete.delay.ms=100
"""


def jars() -> Path | None:
    """The folder of jars; None: they have not been fetched."""
    return next((each.parent for each in sorted(ROOT.glob("build/kafka/*/.complete"))), None)


def java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")


def kafka_or_skip(directory: Path) -> Kafka:
    """A broker that has not been started; skips where there cannot be one."""
    libs, found = jars(), java()
    if libs is None:
        pytest.skip("there is no Kafka: sh scripts/kafka.sh fetches one")
    if found is None:
        pytest.skip("there is no Java for Kafka: sh scripts/java.sh finds one")
    return Kafka(directory, libs, found)


def headers_of(number: int) -> list[tuple[str, bytes | None]] | None:
    """The headers of a numbered record: each third record has some, with a repeated name, an empty value, and a
    null.
    """
    return [("n", b"%d" % number), ("none", None), ("n", b""), ("", b"\xff")] if number % 3 == 0 else None


class Kafka:
    """One broker: started by ``with``, and ended there, or when this process ends."""

    def __init__(self, directory: Path, libs: Path, java: str) -> None:
        self._directory = directory
        self._command = (java, *JVM, "-cp", f"{libs}/*")
        self._port = 0
        self._controller = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = ThreadPoolExecutor(1, thread_name_prefix="kafka-parent")

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._port}"

    def url(self, topic: str) -> str:
        return f"kafka://{self.bootstrap}/{topic}"

    def __enter__(self) -> Self:
        for _ in range(PORT_ATTEMPTS):
            self._port, self._controller = _free_port(), _free_port()
            if self._start():
                return self
        raise AssertionError(f"Kafka did not start:\n{self._log.read_text()[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._parent.shutdown()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def _log(self) -> Path:
        return self._directory / "kafka.log"

    def _start(self) -> bool:
        shutil.rmtree(self._directory / "data", ignore_errors=True)
        settings = self._directory / "server.properties"
        settings.write_text(
            SETTINGS.format(port=self._port, controller=self._controller, logs=self._directory / "data")
        )
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "x")
        format_it = (*self._command, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings))
        subprocess.run(format_it, check=True, capture_output=True)
        return self._launched(settings)

    def _launched(self, settings: Path) -> bool:
        self._parent.submit(self._launch, settings).result()
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                admin.list_topics(timeout=0.5)
            except confluent_kafka.KafkaException:
                time.sleep(0.05)
            else:
                return True
        self._stop()
        return False

    def _launch(self, settings: Path) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                (*self._command, "kafka.Kafka", str(settings)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call of the kernel, which needs no lock
            )

    # -- operations for tests -------------------------------------------------------------------------------------

    def restart(self) -> None:
        """End the broker at once, and start it again at the same address with its data."""
        self._stop()
        assert self._launched(self._directory / "server.properties"), self._log.read_text()[-4000:]

    def make_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_topics([NewTopic(name, partitions, 1, config=dict(config or {}))])[name].result()
        return name

    def delete_topic(self, name: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.delete_topics([name])[name].result()
        while name in admin.list_topics(timeout=10).topics:
            time.sleep(0.02)

    def add_partitions(self, name: str, partitions: int) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_partitions([NewPartitions(name, partitions)])[name].result()

    def remove_before(self, topic: str, offset: int) -> None:
        """Remove the records of partition 0 before an offset."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for removed in admin.delete_records([confluent_kafka.TopicPartition(topic, 0, offset)]).values():
            removed.result()

    def producer(self, **settings: Any) -> Any:
        named = {name.replace("_", "."): value for name, value in settings.items()}
        return confluent_kafka.Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5, **named})

    def fill(self, topic: str, records: int, partitions: int, *, first: int = 0) -> None:
        """Numbered records, in turns over the partitions; each third one has headers, each seventh no key."""
        producer = self.producer()
        for number in range(first, first + records):
            producer.produce(
                topic,
                b"%d" % number,
                key=None if number % 7 == 0 else b"k%d" % (number % 100),
                partition=number % partitions,
                timestamp=1_700_000_000_000 + number,
                headers=headers_of(number),
            )
            if number % 1000 == 0:
                producer.poll(0)
        assert producer.flush(30) == 0

    def read(self, topic: str, partitions: int) -> dict[int, list[Any]]:
        """All committed messages, per partition in order."""
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": uuid.uuid4().hex,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 20,
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(partitions)])
        found: dict[int, list[Any]] = {number: [] for number in range(partitions)}
        ended: set[int] = set()
        while len(ended) < partitions:
            for message in consumer.consume(10_000, 0.1):
                error, partition = message.error(), message.partition()
                assert partition is not None
                if error is None:
                    found[partition].append(message)
                else:
                    assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                    ended.add(partition)
        consumer.close()
        return found


def values(messages: Sequence[Any]) -> list[bytes]:
    return [message.value() for message in messages]
