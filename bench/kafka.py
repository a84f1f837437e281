"""A Kafka to compare with: brokers in KRaft mode on this machine, a producer, and Spark's source for it.

Nothing of it is the project's. It comes into the cache of `bench.compare.peers.install`, once:

* the broker, from Maven Central, which runs on the Java of ``JAVA_HOME`` or ``PATH``;
* Spark's module for Kafka, without the parts that Spark ships. If the module for the installed Spark is not available,
  the next available one is taken; `Parts.spark_module` names it;
* confluent-kafka, from PyPI.

`Missing` names anything that could not be fetched.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare.peers.install import Missing, jars, java, python_packages, run
from bench.compare.peers.servers import HOST, START_S, free_ports, serving

__all__ = ["BROKER_VERSION", "CLIENT_VERSION", "Kafka", "Missing", "Parts", "Server", "bring", "client", "running"]

BROKER_VERSION = "4.3.1"
CLIENT_VERSION = "2.16.1"
"""Version of confluent-kafka."""
SPARK_CLIENT_VERSION = "3.9.2"
"""Version of Kafka's own client, in Spark's module."""
POOL_VERSION = "2.13.1"
SPARK_MODULE_ELSE = ("4.2.0", "4.0.0")
"""Versions of the source, and of the part with tokens and settings, if those for the installed Spark are not
available.
"""
JVM = (
    "-Xmx1g",
    "-Xms1g",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
)
"""As in Kafka's own start script."""
SETTINGS = """
process.roles={roles}
node.id={number}
controller.quorum.voters=1@127.0.0.1:{controller}
listeners={listeners}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={logs}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
log.segment.delete.delay.ms=1000
"""
LOGGING = """
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


@dataclass(frozen=True)
class Server:
    """The programs of a broker and a Python client."""

    broker: Path
    """A folder of jars."""
    client: Path
    """A folder for ``sys.path``."""


@dataclass(frozen=True)
class Parts(Server):
    """With Spark's module."""

    spark: list[Path]
    """Jars for ``spark.jars``."""
    spark_module: str
    """The name of the module for Spark."""


def bring_server() -> Server:
    """From the cache or from outside. Raises `Missing`."""
    java()
    broker = jars(f"kafka-{BROKER_VERSION}", [f"org.apache.kafka:kafka_2.13:{BROKER_VERSION}"], alone=False)
    return Server(broker, python_packages(f"confluent-kafka=={CLIENT_VERSION}"))


def bring() -> Parts:
    """Everything, from the cache or from outside. Raises `Missing`."""
    server = bring_server()
    installed = importlib.metadata.version("pyspark")
    refused = []
    for source, tokens in ((installed, installed), SPARK_MODULE_ELSE):
        artifacts = [
            f"org.apache.spark:spark-sql-kafka-0-10_2.13:{source}",
            f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{tokens}",
            f"org.apache.kafka:kafka-clients:{SPARK_CLIENT_VERSION}",
            f"org.apache.commons:commons-pool2:{POOL_VERSION}",
        ]
        try:
            spark = jars(f"spark-{source}-{tokens}", artifacts, alone=True)
        except Missing as error:
            refused.append(str(error))
            continue
        words = f"spark-sql-kafka-0-10 {source}" + (f", with spark-token-provider {tokens}" * (source != tokens))
        return Parts(server.broker, server.client, sorted(spark.glob("*.jar")), words)
    raise Missing("; ".join(refused))


def client(parts: Server) -> Any:
    """The module ``confluent_kafka``."""
    if str(parts.client) not in sys.path:
        sys.path.append(str(parts.client))
    return importlib.import_module("confluent_kafka")


class Kafka:
    """Running brokers."""

    def __init__(self, parts: Server, bootstrap: str, pids: Mapping[str, int]) -> None:
        self.bootstrap = bootstrap
        self.pids = pids
        """Process ids of the brokers by their names; the first is the controller too."""
        client(parts)
        admin = importlib.import_module("confluent_kafka.admin")
        self._new_topic = admin.NewTopic
        # Kept: it would forget its work when it goes. Silent: it would report stopped brokers.
        self._admin = admin.AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

    @property
    def pid(self) -> int:
        """Process id of the first broker."""
        return next(iter(self.pids.values()))

    def create(
        self, topic: str, partitions: int, *, replication: int = 1, settings: Mapping[str, str] | None = None
    ) -> None:
        """Make a topic, whose partitions have the brokers as leaders in turn, beginning with the first.

        Kafka would begin with any: a topic's only partition would now be led by a broker that is warm, now by one that
        has only followed so far.
        """
        places = replicas(partitions, replication, len(self.pids))
        wanted = self._new_topic(topic, partitions, replica_assignment=places, config=dict(settings or {}))
        self._admin.create_topics([wanted], operation_timeout=START_S)[topic].result()

    def delete(self, topic: str) -> None:
        """Delete a topic; its files go some time later."""
        self._admin.delete_topics([topic], operation_timeout=START_S)[topic].result()


@contextlib.contextmanager
def running(parts: Server, folder: Path, brokers: int = 1) -> Iterator[Kafka]:
    """`brokers` on free ports, with all they have below `folder`; gone at the end of the block."""
    folder.mkdir(parents=True)
    controller, *ports = free_ports(1 + brokers)
    logging = folder / "log4j2.properties"
    logging.write_text(LOGGING)
    base = [java(), *JVM, "-cp", f"{parts.broker}/*", f"-Dlog4j2.configurationFile={logging}"]
    identity = str(uuid.uuid4())
    with contextlib.ExitStack() as stack:
        pids = {}
        for number, port in enumerate(ports, 1):
            name = f"broker-{number}"
            settings = folder / f"{name}.properties"
            settings.write_text(broker_settings(number, port, controller, folder / name))
            formatting = [*base, "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(settings)]
            run(formatting, "Kafka could not format its storage")
            argv = [*base, "kafka.Kafka", str(settings)]
            pids[name] = stack.enter_context(serving("Kafka", argv, folder / f"{name}.log", ports=[port]))
        yield Kafka(parts, ",".join(f"{HOST}:{port}" for port in ports), pids)


def replicas(partitions: int, replication: int, brokers: int) -> list[list[int]]:
    """The brokers of each partition, the leader first."""
    return [[1 + (each + copy) % brokers for copy in range(replication)] for each in range(partitions)]


def broker_settings(number: int, port: int, controller: int, logs: Path) -> str:
    """The settings of the broker with that number; the first is the controller too, and listens as such."""
    listeners = f"PLAINTEXT://{HOST}:{port}" + (f",CONTROLLER://{HOST}:{controller}" if number == 1 else "")
    roles = "broker,controller" if number == 1 else "broker"
    return SETTINGS.format(roles=roles, number=number, port=port, controller=controller, listeners=listeners, logs=logs)
