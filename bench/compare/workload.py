"""A workload: the records, the numbers of producers and consumers, and the required durability. One TOML file each.

The files are in ``bench/workloads``, and are independent of contestants, except for a table ``[settings.NAME]`` with
settings for one of them. They are made in the manner of the OpenMessaging benchmark.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

FOLDER = Path(__file__).parent.parent / "workloads"

Durability = Literal["leader", "replicated", "persisted"]
"""The condition for a record's acknowledgement.

leader: the one server has it, in memory or in the page cache.
replicated: another server has it in memory, too.
persisted: it is flushed to disk, on as many servers as have it.
"""
Send = Literal["batch", "record"]
"""batch: the fastest way that a client has, with records prepared before; record: one call for each record."""
Read = Literal["push", "pull", "records"]
"""push: the fastest way, batches as they come; pull: batches over a connection, as from another host; records: each
record as an object of the language.
"""
DUE_BYTES = 8
"""The beginning of each value of a workload with a rate: its due time, see `bench.compare.worker`."""


class BadWorkload(Exception):
    """A file is not a workload; the message gives the file and the reason."""


class Workload(BaseModel):
    """See the head of this module. All sizes are of one round."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="the file's name, without its end")
    title: str
    record_bytes: int = Field(ge=DUE_BYTES, description="length of a value; keys come on top and do not count")
    streams: int = Field(1, ge=1, description="streams, or topics; producers and consumers are spread over them")
    streamlets: int = Field(1, ge=1, description="partitions of each stream")
    producers: int = Field(1, ge=1, description="processes that write")
    clients: int = Field(1, ge=1, description="clients of each of these processes, with connections of their own")
    consumers: int = Field(0, ge=0, description="processes that read; they share the streams: each record goes to one")
    rate: float = Field(0.0, ge=0, description="records per second of all producers together; 0: as fast as it goes")
    keys: Literal["none", "random", "zipf"] = "none"
    key_count: int = Field(10_000, ge=1, description="different keys, where there are any")
    durability: Durability = "leader"
    replicas: int = Field(0, ge=0, description="copies besides the leader's")
    backlog_bytes: ByteSize = Field(
        ByteSize(0),
        description="above 0: so much is written first, which is not measured; then only reading is, until all is read"
        " or the seconds are over",
    )
    send: Send = "batch"
    read: Read = "push"
    batch_bytes: ByteSize = Field(ByteSize(256 << 10), description="a full chunk or batch")
    batch_records: int = Field(
        0, ge=0, description="records that are given to a client at once, if it takes batches; 0: as it does best"
    )
    linger_ms: float = Field(0.0, ge=0, description="how long an unfilled one waits")
    seconds: float = Field(gt=0, description="measured")
    warm_up_seconds: float = Field(1.0, ge=0, description="before, in each round; not counted")
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="by contestant: what only that one understands"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.durability == "replicated") and not self.replicas:
            raise ValueError("level replicated needs replicas")
        if self.clients > 1 and (self.rate or self.backlog_bytes or self.send != "batch"):
            raise ValueError("several clients of a process send batches, as fast as they go")
        if self.backlog_bytes and not self.consumers:
            raise ValueError("a backlog is for consumers, and there are none")
        if self.backlog_bytes and self.rate:
            raise ValueError("a backlog is written as fast as it goes: it has no rate")
        if self.consumers > self.partitions:
            raise ValueError(f"{self.consumers} consumers cannot share {self.partitions} partitions")
        return self

    @property
    def partitions(self) -> int:
        """The number of partitions of all streams together."""
        return self.streams * self.streamlets

    @property
    def backlog_records(self) -> int:
        """The backlog of all producers together."""
        return int(self.backlog_bytes) // self.record_bytes

    @property
    def kind(self) -> Literal["throughput", "latency", "backlog"]:
        """The kind of its figure."""
        if self.backlog_bytes:
            return "backlog"
        return "latency" if self.rate else "throughput"

    def shorter(self, seconds: float, warm_up_seconds: float) -> Workload:
        """The same workload for less time, if possible."""
        return self.model_copy(
            update={
                "seconds": min(self.seconds, seconds),
                "warm_up_seconds": min(self.warm_up_seconds, warm_up_seconds),
            }
        )


def load(path: Path) -> Workload:
    """Read one file. Raises `BadWorkload`."""
    try:
        return Workload(**{"name": path.stem} | tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise BadWorkload(f"{path}: {error}") from error


def find(names: Sequence[str]) -> list[Workload]:
    """Workloads by name, as in ``bench/workloads``, or by path, also of a folder of them. Raises `BadWorkload`."""
    return [load(path) for name in names for path in _paths_of(name)]


def names() -> list[str]:
    """All workloads in ``bench/workloads``."""
    return sorted(_stems(FOLDER.glob("*.toml")))


def _stems(paths: Iterable[Path]) -> list[str]:
    return [path.stem for path in paths]


def _paths_of(name: str) -> list[Path]:
    if Path(name).is_dir():
        return sorted(Path(name).glob("*.toml"))
    return [Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"]
