"""A Kafka to compare with: one broker in KRaft mode on this machine, its producer, and Spark's source for it.

Nothing of it is the project's. It comes by ``mvn`` and ``pip`` into ``~/.cache/kera-bench``, once:

* the broker, from Maven Central, which runs on the Java of ``JAVA_HOME`` or ``PATH``;
* Spark's module for Kafka, without what Spark ships. Where the module of the installed Spark cannot be had, it is the
  next one that can; `Parts.spark_module` says which it was;
* confluent-kafka, from PyPI.

What is missing is `Missing`, and its message says what.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark

CACHE = Path.home() / ".cache" / "kera-bench"
BROKER_VERSION = "4.3.1"
CLIENT_VERSION = "2.16.1"
"""Of confluent-kafka."""
SPARK_CLIENT_VERSION = "3.9.2"
"""Of Kafka's own client, in Spark's module."""
POOL_VERSION = "2.13.1"
SPARK_MODULES = ((pyspark.__version__, pyspark.__version__), ("4.2.0", "4.0.0"))
"""Versions of the source, and of the part that has tokens and settings; the first pair that can be had."""
HEAP = "1g"
START_S = 60.0
STOP_S = 20.0
INSTALL_S = 300.0
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
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""
LOGGING = """
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


class Missing(Exception):
    """Something that Kafka needs is not here, and could not be brought."""


@dataclass(frozen=True)
class Parts:
    """What was brought."""

    broker: Path
    """A folder of jars."""
    spark: list[Path]
    """Jars for ``spark.jars``."""
    spark_module: str
    """Which module for Spark it is, in words."""
    client: Path
    """A folder for ``sys.path``."""


def bring() -> Parts:
    """Everything, from the cache or from outside. Raises `Missing`."""
    java()
    broker = _jars(f"kafka-{BROKER_VERSION}", [f"org.apache.kafka:kafka_2.13:{BROKER_VERSION}"], alone=False)
    client = _python_client()
    refused = []
    for source, tokens in SPARK_MODULES:
        artifacts = [
            f"org.apache.spark:spark-sql-kafka-0-10_2.13:{source}",
            f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{tokens}",
            f"org.apache.kafka:kafka-clients:{SPARK_CLIENT_VERSION}",
            f"org.apache.commons:commons-pool2:{POOL_VERSION}",
        ]
        try:
            spark = _jars(f"spark-{source}-{tokens}", artifacts, alone=True)
        except Missing as error:
            refused.append(str(error))
            continue
        words = f"spark-sql-kafka-0-10 {source}" + (f", with spark-token-provider {tokens}" * (source != tokens))
        return Parts(broker, sorted(spark.glob("*.jar")), words, client)
    raise Missing("; ".join(refused))


def client(parts: Parts) -> Any:
    """The module ``confluent_kafka``."""
    if str(parts.client) not in sys.path:
        sys.path.append(str(parts.client))
    return importlib.import_module("confluent_kafka")


def java() -> str:
    """The java that runs Kafka. Raises `Missing`."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(f"{home}/bin/java" if home else "java")
    if found is None:
        raise Missing('there is no java: JAVA_HOME="$(sh scripts/java.sh)" says where one is')
    return found


def _jars(name: str, artifacts: Sequence[str], *, alone: bool) -> Path:
    """A folder with the jars of `artifacts` and, unless they are wanted `alone`, of all that they need."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise Missing(f"there is no mvn, which brings {artifacts[0]}")
    with _making(folder) as made:
        pom = made / "pom.xml"
        pom.write_text(_pom(artifacts, alone=alone))
        argv = [maven, "-B", "-q", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
        _run([*argv, f"-DoutputDirectory={made}"], f"mvn could not bring {artifacts[0]}")
        pom.unlink()
    return folder


def _pom(artifacts: Sequence[str], *, alone: bool) -> str:
    no_others = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    dependencies = []
    for artifact in artifacts:
        group, name, version = artifact.split(":")
        head = f"<groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
        dependencies.append(f"<dependency>{head}{no_others if alone else ''}</dependency>")
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>bench</groupId><artifactId>bench</artifactId>"
        f"<version>1</version><dependencies>{''.join(dependencies)}</dependencies></project>"
    )


def _python_client() -> Path:
    folder = CACHE / f"confluent-kafka-{CLIENT_VERSION}-py{sys.version_info[0]}{sys.version_info[1]}"
    if not folder.is_dir():
        with _making(folder) as made:
            argv = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
            argv += ["--target", str(made), f"confluent-kafka=={CLIENT_VERSION}"]
            _run(argv, f"pip could not bring confluent-kafka {CLIENT_VERSION}")
    return folder


@contextlib.contextmanager
def _making(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that becomes it when the block ends well: there is never half of one."""
    made = folder.with_name(f"{folder.name}-{uuid.uuid4().hex}")
    made.mkdir(parents=True)
    try:
        yield made
        with contextlib.suppress(OSError):  # another run was faster
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _run(argv: Sequence[str], failure: str) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Missing(f"{failure} within {INSTALL_S:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        raise Missing(f"{failure}: {lines[0] if lines else f'it ended with {done.returncode}'}"[:400])


class Kafka:
    """A running broker."""

    def __init__(self, parts: Parts, bootstrap: str, pid: int) -> None:
        self.bootstrap = bootstrap
        self.pid = pid
        self._parts = parts

    def create(self, topic: str, partitions: int) -> None:
        """Make a topic, not replicated."""
        client(self._parts)
        admin = importlib.import_module("confluent_kafka.admin")
        connected = admin.AdminClient({"bootstrap.servers": self.bootstrap})  # kept: it forgets its work when it goes
        wanted = admin.NewTopic(topic, num_partitions=partitions, replication_factor=1)
        connected.create_topics([wanted], operation_timeout=START_S)[topic].result()


@contextlib.contextmanager
def running(parts: Parts, folder: Path) -> Iterator[Kafka]:
    """A broker on free ports, with all it has below `folder`; gone at the end of the block."""
    folder.mkdir(parents=True)
    port, controller = _free_ports(2)
    settings, log, logging = folder / "server.properties", folder / "kafka.log", folder / "log4j2.properties"
    settings.write_text(SETTINGS.format(port=port, controller=controller, logs=folder / "data"))
    logging.write_text(LOGGING)
    base = [java(), f"-Xmx{HEAP}", f"-Xms{HEAP}", "-cp", f"{parts.broker}/*", f"-Dlog4j2.configurationFile={logging}"]
    identity = str(uuid.uuid4())
    formatting = [*base, "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(settings)]
    _run(formatting, "Kafka could not format its storage")
    # The kernel ends it if this process dies.
    bound = shutil.which("setpriv")
    argv = [*([bound, "--pdeathsig", "KILL"] if bound else []), *base, "kafka.Kafka", str(settings)]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _until_it_answers(process, port, log)
        yield Kafka(parts, f"127.0.0.1:{port}", process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Missing(f"Kafka ended with {process.returncode}: {log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise Missing(f"Kafka did not answer within {START_S:.0f} s: {log.read_text()[-2000:]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]
