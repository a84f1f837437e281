"""Settings of the broker."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from kera.broker.replication.limits import ReplicationLimits
from kera.broker.storage.disk import BLOCK_BYTES
from kera.core.base.cpus import format_cpus, parse_cpus
from kera.core.base.settings import KIB, MIB
from kera.core.errors import InvalidArgument
from kera.core.format.chunk import HEADER_BYTES
from kera.core.rpc.unix_socket import ANY_USER, OWN_USER
from kera.core.tracing import TracesSettings
from kera.server.daemon import HANDOVER_MS, STOP_FLUSH_MS, STOP_TIMEOUT_S
from kera.server.network import MemberSettings

SEGMENT_BYTES_MIN = 4 * KIB
ARENA_SEGMENTS_MIN = 2
"""One segment to write to, and one that is written to disk or loaded from there."""
SEGMENT_BYTES_MAX = 512 * MIB
"""A chunk may be as large as a segment, and passes through memory as one piece."""


class BrokerSettings(MemberSettings, TracesSettings):
    """Section ``[broker]``, variables ``KERA_BROKER_*``, flags of ``kera broker``."""

    section: ClassVar[str] = "broker"

    broker_id: int = Field(
        0,
        ge=0,
        description="Id of a new broker; 0: the next one that is free. Its data directory keeps it from then on.",
    )
    data_dir: Path = Field(
        Path("~/.local/share/kera/broker"),
        description="Directory of the broker's identity and log; each broker needs one of its own.",
    )
    shm_dir: Path = Field(
        Path("/dev/shm"),  # noqa: S108 - shared memory is the point
        description="Directory of the arena: must be on shared memory (tmpfs), so that readers can map it.",
    )
    unix_socket_users: Literal["own", "any"] = Field(
        "own",
        description="Processes of this host that may use the broker's unix sockets, and with them its shared memory:"
        " own, those of its own user and root; any, all that authenticate, as far as their rights go. The sockets"
        " are in data_dir, which those users have to be able to enter; with any, security must be on.",
    )
    arena_bytes: ByteSize = Field(
        ByteSize(512 * MIB),
        description="Memory for segments, reserved at the start, and never more. Segments that do not fit are on"
        " disk only.",
    )
    segment_bytes: ByteSize = Field(
        ByteSize(8 * MIB),
        description="Size of a segment, and so the limit of a chunk: 8 MiB keep metadata small and disk writes large.",
    )
    idle_close_ms: int = Field(
        60_000,
        ge=100,
        description="After this time without a write, in ms, a segment is written to disk and its memory freed.",
    )
    flush_delay_ms: int = Field(
        0,
        ge=0,
        description="How long a full segment may wait to be written to disk, in ms, while a quarter of the memory is"
        " free: a segment that retention removes by then is never written. A crash of the host loses waiting segments,"
        " unless they are persisted or replicated.",
    )
    reader_grace_ms: int = Field(
        60_000,
        ge=0,
        description="After a crash: how long readers of the launch before may use the shared memory that they had"
        " mapped, in ms; then the memory is used again, and chunks that they still hold are no longer intact.",
    )
    cpus: str = Field(
        "",
        description="CPUs of the host on which the broker runs, as 0-3,8; empty: on all. A broker is one event loop;"
        " kera node starts one for each core or NUMA node.",
    )
    handover_ms: int = Field(
        HANDOVER_MS,
        ge=0,
        description="Time, in ms, that a stop waits for other brokers to take this one's streamlets until it is"
        " back. 0: a stop is not announced, and counts as a crash.",
    )
    stop_flush_ms: int = Field(
        STOP_FLUSH_MS,
        ge=0,
        description="How long a stop may take to write the memory to disk, in ms. The rest stays in shared memory for"
        " the next start. A supervisor that stops the broker has to wait longer: this, handover_ms and"
        f" {STOP_TIMEOUT_S:g} s.",
    )
    replication_lag_bytes_max: ByteSize = Field(
        ByteSize(64 * MIB),
        description="How much of a virtual log may wait for backups; then its writers wait, too.",
    )
    backup_timeout_ms: int = Field(
        2_000, ge=10, description="A backup that does not answer a request within this time counts as failed, in ms."
    )
    repair_delay_ms: int = Field(
        10_000,
        ge=0,
        description="Time, in ms, that a backup may be away before its replicas are restored on other backups.",
    )
    repair_bytes_per_s: ByteSize = Field(
        ByteSize(64 * MIB), ge=64 * KIB, description="Maximum rate of making replicas again, per second."
    )
    recovery_bytes_per_s: ByteSize = Field(
        ByteSize(256 * MIB),
        ge=64 * KIB,
        description="The same while data of a crashed broker is being recovered, per second: until it has its replicas,"
        " another crash would have to begin with those that are left of the first.",
    )

    @field_validator("cpus")
    @classmethod
    def _cpus(cls, value: str) -> str:
        try:
            return format_cpus(parse_cpus(value)) if value else value
        except InvalidArgument as error:
            raise ValueError(error.message) from error

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.segment_bytes < SEGMENT_BYTES_MIN or self.segment_bytes % BLOCK_BYTES:
            raise ValueError(f"segment_bytes must be a multiple of {BLOCK_BYTES}, at least {SEGMENT_BYTES_MIN}")
        if self.segment_bytes > SEGMENT_BYTES_MAX:
            raise ValueError(f"segment_bytes must be at most {SEGMENT_BYTES_MAX}")
        if self.unix_socket_users == "any" and not self.security:
            raise ValueError(
                "unix_socket_users any needs security, which checks the identity and rights of other users; turn it"
                " on, or leave unix_socket_users out"
            )
        if self.arena_bytes < ARENA_SEGMENTS_MIN * self.segment_bytes:
            raise ValueError(f"arena_bytes must have room for {ARENA_SEGMENTS_MIN} segments at least")
        if self.message_bytes_max < self.segment_bytes + HEADER_BYTES:
            raise ValueError("message_bytes_max must have room for a chunk that fills a segment")
        return self

    @property
    def unix_socket_mode(self) -> int:
        """The mode of the broker's unix sockets, which decides which users may connect."""
        return ANY_USER if self.unix_socket_users == "any" else OWN_USER

    def replication_limits(self) -> ReplicationLimits:
        """Return the limits of replication."""
        return ReplicationLimits(
            segment_bytes=self.segment_bytes,
            lag_bytes_max=self.replication_lag_bytes_max,
            idle_close_ms=self.idle_close_ms,
            repair_delay_ms=self.repair_delay_ms,
        )

    @classmethod
    def dev(cls, data_dir: Path, coordinator: str) -> Self:
        """Return the settings of a broker on a developer's machine: half the memory, and any free ports."""
        return cls(data_dir=data_dir, coordinator=coordinator, arena_bytes=ByteSize(256 * MIB))

    @classmethod
    def for_testing(cls, data_dir: Path, coordinator: str) -> Self:
        """Return the settings for tests: small segments, so that there are many; the broker leaves nothing behind."""
        return cls(
            data_dir=data_dir,
            coordinator=coordinator,
            arena_bytes=ByteSize(16 * MIB),
            segment_bytes=ByteSize(64 * KIB),
            ephemeral=True,
            coordinator_timeout_ms=2000,
        )
