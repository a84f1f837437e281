"""What ``kera connect copy`` was told."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class Begin(enum.StrEnum):
    """Where a copy that has not begun yet begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """One field for each option."""

    source: str
    target: str
    name: str | None
    create: bool
    streamlets: int | None
    key: str | None
    time: str | None
    follow: bool
    from_latest: bool
    file_format: str | None
    file_bytes: int | None
    kafka_config: Path | None
    skip_lost: bool
    as_json: bool
    bootstrap: str
