"""The contestants of a comparison: each brings its servers, names their processes, and says how its workers start.

A contestant is a class of a module that `REGISTRY` knows by name; it is imported on demand. A missing dependency is a
reason in the report (`Contestant.missing`), never an error. All calls are synchronous, and made by one thread;
`Running.worker` may be called while nothing runs yet.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from bench.compare.workload import Workload

Role = Literal["produce", "consume"]


class Failed(Exception):
    """A contestant or one of its workers has failed; the message is for the report."""


@dataclass(frozen=True)
class Command:
    """The command of a worker process."""

    argv: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings for the worker besides the workload: addresses, names of streams, partitions. They arrive as
    `Task.settings`.
    """
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables in addition to ours."""


class Running(Protocol):
    """A contestant with running servers."""

    def processes(self) -> dict[str, int]:
        """Servers by name, with their process ids: their cost is the contestant's."""

    def prepare(self, number: int, /) -> None:
        """Create the streams of round `number`, and remove those of the round before with all their data. Raises
        `Failed`.

        Round 0 is the warm-up.
        """

    def worker(self, role: Role, index: int, /) -> Command:
        """The producer or consumer `index` of the prepared round."""


class Contestant(Protocol):
    """A contestant of the comparison."""

    name: str
    """The name on the command line: kafka."""

    @property
    def title(self) -> str:
        """The title in tables: Kafka 4.3.1 (librdkafka)."""

    def missing(self) -> str | None:
        """Fetch the dependencies, which may take minutes the first time. None: it can run; otherwise the reason why
        it cannot.
        """

    def versions(self) -> dict[str, str]:
        """Versions of server and client, by name. Called when nothing is missing."""

    def supports(self, workload: Workload) -> str | None:
        """The reason why it cannot do this workload; None: it can."""

    def durability(self, workload: Workload) -> str:
        """The settings that give the workload's level, for the report: acks=all, min.insync.replicas=2."""

    def start(self, workload: Workload, folder: Path) -> AbstractContextManager[Running]:
        """Servers for the workload, with all their data below the new `folder`; they are gone at the end. Raises
        `Failed`.

        Idle servers take no processor time worth mentioning: they stay while others are measured.
        """


REGISTRY = {
    "kera": "bench.compare.kera:Kera",
    "kera-memory": "bench.compare.kera:KeraMemory",
    "kafka": "bench.compare.peers.kafka:Kafka",
    "kafka-java": "bench.compare.peers.kafka_java:KafkaJava",
    "nats": "bench.compare.peers.nats:Nats",
    "rabbitmq": "bench.compare.peers.rabbitmq:RabbitMq",
    "redis": "bench.compare.peers.redis:Redis",
}
"""The place of each contestant: a class without arguments. The others are compared with KerA."""
SEVERAL_CLIENTS = {"kera", "kera-memory", "kafka"}
"""Contestants whose workers can be several clients."""


def contestant(name: str) -> Contestant:
    """Make a contestant. Raises `Failed` if it cannot be imported, KeyError for an unknown name."""
    module, _, attribute = REGISTRY[name].partition(":")
    try:
        made: Contestant = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise Failed(f"it cannot be imported: {error}") from error
    return made
