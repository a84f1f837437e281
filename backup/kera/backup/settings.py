"""Settings of the backup."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import ByteSize, Field, model_validator

from kera.core.base.blocks import BLOCK_BYTES
from kera.core.base.settings import KIB, MIB
from kera.core.rpc.arriving import ARRIVING_BYTES_MAX
from kera.server.access.settings import DaemonAccessSettings
from kera.server.daemon import HANDOVER_MS, STOP_FLUSH_MS, STOP_TIMEOUT_S

SEGMENTS_MIN = 2
"""One to write to, one to go to disk."""
SEGMENT_BYTES_MAX = 512 * MIB
MESSAGE_BYTES_MAX = 1024 * MIB
"""gRPC counts bytes of a message in 31 bits."""


class BackupSettings(DaemonAccessSettings):
    """Section ``[backup]``, variables ``KERA_BACKUP_*``, flags of ``kera backup``."""

    section: ClassVar[str] = "backup"

    coordinator: str = Field(
        "127.0.0.1:7400",
        description="host:port of the coordinator; of each, separated by commas, if there are several.",
    )
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. Local by default: elsewhere, set tls_cert and tls_client_auth.",
    )
    port: int = Field(0, ge=0, le=65535, description="Port of the open interface (gRPC); 0 takes any free one.")
    frames_port: int = Field(
        0, ge=0, le=65535, description="Port of framed transport, which brokers use; 0 takes any free one."
    )
    advertised_address: str = Field(
        "",
        description="host, or host:port, at which others reach the open interface, if it is not where the backup"
        " listens. Needed with --host 0.0.0.0.",
    )
    advertised_frames_address: str = Field(
        "",
        description="The same for framed transport. Empty: the host of advertised_address, with the port on which the"
        " backup listens.",
    )
    backup_id: int = Field(
        0,
        ge=0,
        description="Id of a new backup; 0: the next one that is free. Its data directory keeps it from then on.",
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of Prometheus metrics; 0 takes any free one, absent serves none."
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
        description="Memory for headers of chunks that are on disk only, 128 bytes each: who takes over from a broker"
        " reads these first, while producers wait; the disk, where they are not kept.",
    )
    disk_bytes_max: ByteSize | None = Field(
        None, description="Room for replicas on each disk; absent: the size of its file system, less a reserve."
    )
    rack: str = Field("", description="Failure domain: replicas are spread over backups with different names here.")
    ephemeral: bool = Field(
        default=False, description="The backup never starts again: it writes nothing to disk at its end."
    )
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
    coordinator_timeout_ms: int = Field(
        10_000, ge=0, description="How long to wait at the start for a coordinator that cannot be reached, in ms."
    )
    message_bytes_max: ByteSize = Field(
        ByteSize(32 * MIB), description="Largest request or response: bounds the memory of one connection."
    )
    arriving_bytes_max: ByteSize = Field(
        ByteSize(ARRIVING_BYTES_MAX),
        ge=1 * MIB,
        description="Memory of large requests that are arriving over frames, of all connections together; others wait.",
    )
    connections_max: int | None = Field(
        None,
        ge=8,
        description="Connections served at once, three quarters of them over frames, the others over gRPC. Absent:"
        " the limit of open files (ulimit -n) without the daemon's own files, at most 10,000.",
    )
    log_level: str = Field("info", description="debug, info, warning or error.")

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
        if self.message_bytes_max > MESSAGE_BYTES_MAX:
            raise ValueError(f"message_bytes_max must be at most {MESSAGE_BYTES_MAX}")
        if len(set(self.log_dirs)) < len(self.log_dirs):
            raise ValueError("log_dirs must differ from each other")
        return self

    @property
    def stop_timeout_s(self) -> float:
        """After so long a stop ends the hard way."""
        return STOP_TIMEOUT_S + (0 if self.ephemeral else (self.handover_ms + self.stop_flush_ms) / 1000)

    @classmethod
    def dev(cls, data_dir: Path, coordinator: str) -> Self:
        """A backup on one's own machine: half the memory, whatever ports are free."""
        return cls(data_dir=data_dir, coordinator=coordinator, memory_bytes=ByteSize(128 * MIB))

    @classmethod
    def for_testing(cls, data_dir: Path, coordinator: str) -> Self:
        """Small segments, so that tests see many of them; goes without a trace."""
        return cls(
            data_dir=data_dir,
            coordinator=coordinator,
            memory_bytes=ByteSize(16 * MIB),
            segment_bytes=ByteSize(64 * KIB),
            ephemeral=True,
            coordinator_timeout_ms=2000,
        )
