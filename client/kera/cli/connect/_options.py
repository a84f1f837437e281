"""The options of ``kera connect copy``."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class Begin(enum.StrEnum):
    """The values of ``--from``: the start of a new copy."""

    EARLIEST = "earliest"
    LATEST = "latest"


class ValueFormat(enum.StrEnum):
    """The encodings of values; each value follows the id of its schema."""

    AVRO = "avro"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """One field for each option; a default means that the option is not given."""

    source: str
    target: str
    name: str | None = None
    create: bool = False
    streamlets: int | None = None
    key: str | None = None
    time: str | None = None
    value: ValueFormat | None = None
    subject: str | None = None
    partitioner: str | None = None
    """Partitioner of a copy into a stream; None: the setting of producers."""
    follow: bool = False
    from_latest: bool = False
    file_format: str | None = None
    file_bytes: int | None = None
    kafka_config: Path | None = None
    skip_lost: bool = False
    as_json: bool = False
    bootstrap: str = ""
    bootstrap_given: bool = False
    """Whether ``--bootstrap`` is on the command line, rather than in a variable or a context."""
