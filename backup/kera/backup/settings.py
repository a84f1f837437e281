"""Settings of the backup."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import ByteSize, Field, model_validator

from kera.core.base.blocks import BLOCK_BYTES
from kera.core.base.settings import KIB, MIB
from kera.server.daemon import HANDOVER_MS, STOP_FLUSH_MS, STOP_TIMEOUT_S
from kera.server.network import MemberSettings

SEGMENTS_MIN = 2
"""One segment to append to, and one that is being written to disk."""
SEGMENT_BYTES_MAX = 512 * MIB


class BackupSettings(MemberSettings):
    """Section ``[backup]``, variables ``KERA_BACKUP_*``, flags of ``kera backup``."""

    section: ClassVar[str] = "backup"

    backup_id: int = Field(
        0,
        ge=0,
        description="Id of a new backup; 0: the next one that is free. Its data directory keeps it from then on.",
    )
    data_dir: Path = Field(
        Path("~/.local/share/kera/backup"),
        description="Directory of the backup's identity; each backup needs one of its own.",
    )
    log_dirs: list[Path] = Field(
        [], description="Directories of replicas, one on each disk; none given: `log` in the data directory."
    )
    memory_bytes: ByteSize = Field(
        ByteSize(256 * MIB),
        description="Memory for replicas that are not on disk yet, reserved at the start, and never more.",
    )
    segment_bytes: ByteSize = Field(
        ByteSize(8 * MIB),
        description="Maximum size of a replica: at least the brokers' segment_bytes; fixed once there are replicas.",
    )
    flush_delay_ms: int = Field(
        0,
        ge=0,
        description="How long a finished replica may wait to be written to disk, in ms, while a quarter of the memory"
        " is free: a replica that brokers free by then is never written. Level persisted does not wait.",
    )
    headers_bytes_max: ByteSize = Field(
        ByteSize(64 * MIB),
        description="Memory for headers of chunks that are on disk only, 128 bytes each. A recovery reads headers"
        " first, while producers wait; headers that are not in memory are read from disk.",
    )
    disk_bytes_max: ByteSize | None = Field(
        None, description="Room for replicas on each disk; absent: the size of its file system, less a reserve."
    )
    rack: str = Field("", description="Failure domain: replicas are spread over backups with different names here.")
    handover_ms: int = Field(
        HANDOVER_MS,
        ge=0,
        description="How long a stop waits until brokers have gone on at other backups, in ms. 0: a stop is not"
        " announced, and counts as a crash.",
    )
    stop_flush_ms: int = Field(
        STOP_FLUSH_MS,
        ge=0,
        description="How long a stop may take to write the memory to disk, in ms; the rest is lost here, and restored"
        " from other replicas. A supervisor that stops the backup has to wait longer: this, handover_ms and"
        f" {STOP_TIMEOUT_S:g} s.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.segment_bytes < BLOCK_BYTES or self.segment_bytes % BLOCK_BYTES:
            raise ValueError(f"segment_bytes must be a multiple of {BLOCK_BYTES}, and not 0")
        if self.segment_bytes > SEGMENT_BYTES_MAX:
            raise ValueError(f"segment_bytes must be at most {SEGMENT_BYTES_MAX}")
        if self.memory_bytes < SEGMENTS_MIN * self.segment_bytes:
            raise ValueError(f"memory_bytes must have room for {SEGMENTS_MIN} segments at least")
        if self.message_bytes_max < self.segment_bytes:
            raise ValueError("message_bytes_max must have room for a chunk that fills a segment")
        if len(set(self.log_dirs)) < len(self.log_dirs):
            raise ValueError("log_dirs must differ from each other")
        return self

    @classmethod
    def dev(cls, data_dir: Path, coordinator: str) -> Self:
        """Return settings for development on a local machine: half the memory, and any free ports."""
        return cls(data_dir=data_dir, coordinator=coordinator, memory_bytes=ByteSize(128 * MIB))

    @classmethod
    def for_testing(cls, data_dir: Path, coordinator: str) -> Self:
        """Return settings for tests: small segments, so that there are many of them, and nothing left at the end."""
        return cls(
            data_dir=data_dir,
            coordinator=coordinator,
            memory_bytes=ByteSize(16 * MIB),
            segment_bytes=ByteSize(64 * KIB),
            ephemeral=True,
            coordinator_timeout_ms=2000,
        )
