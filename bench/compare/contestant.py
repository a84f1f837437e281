"""The contestants of a comparison: each brings its servers, names their processes, and says how its workers start.

A contestant is a module's class, known by name to `REGISTRY`; it is imported when it is asked for. What it needs and
does not find is a reason in the report (`Contestant.missing`), never an error. All calls are synchronous, and made by
one thread; `Running.worker` may be called while nothing runs yet.
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
    """A contestant or a worker of it could not do what was asked; the message is for the report."""


@dataclass(frozen=True)
class Command:
    """How a worker process is started."""

    argv: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that its worker needs besides the workload: addresses, names of streams, partitions. Comes as
    `Task.settings`."""
    env: dict[str, str] = field(default_factory=dict)
    """In addition to ours."""


class Running(Protocol):
    """A contestant whose servers run."""

    def processes(self) -> dict[str, int]:
        """Servers by name, with their process ids: what the contestant costs."""

    def prepare(self, number: int, /) -> None:
        """Make the streams of round `number`, and remove those of the one before with all they take. Raises `Failed`.

        Round 0 is the warm-up.
        """

    def worker(self, role: Role, index: int, /) -> Command:
        """The producer or consumer `index` of the round that was prepared."""


class Contestant(Protocol):
    """One of those that are compared."""

    name: str
    """As on the command line: kafka."""

    @property
    def title(self) -> str:
        """As in tables: Kafka 4.3.1 (librdkafka)."""

    def missing(self) -> str | None:
        """Bring what it needs, which may take minutes the first time. None: it can run; else why it cannot."""

    def versions(self) -> dict[str, str]:
        """Versions of server and client, by name. Called when nothing is missing."""

    def supports(self, workload: Workload) -> str | None:
        """Why it cannot do this workload; None: it can."""

    def durability(self, workload: Workload) -> str:
        """With which settings it gives the workload's level, for the report: acks=all, min.insync.replicas=2."""

    def start(self, workload: Workload, folder: Path) -> AbstractContextManager[Running]:
        """Servers for the workload, with all they keep below the new `folder`; gone at the end. Raises `Failed`.

        Idle they take no processor time worth mentioning: they stay while others are measured.
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
"""Where each is: a class that is made without arguments. KerA is the one that others are compared with."""
SEVERAL_CLIENTS = {"kera", "kera-memory", "kafka"}
"""Those whose workers can be several clients."""


def contestant(name: str) -> Contestant:
    """Make one. Raises `Failed` where it cannot be imported, KeyError for a name that nobody has."""
    module, _, attribute = REGISTRY[name].partition(":")
    try:
        made: Contestant = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise Failed(f"it cannot be imported: {error}") from error
    return made
