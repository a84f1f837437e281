"""Settings of the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field

from kera.core.settings import GIB, MIB, KeraSettings

DEFAULT_PORT = 7400
REPLICATION_MAX = 16
"""Copies on backups, of a chunk: more protect against nothing that happens, and every write waits for all of them."""


class CoordinatorSettings(KeraSettings):
    """Section ``[coordinator]``, variables ``KERA_COORDINATOR_*``, flags of ``kera coordinator``."""

    section: ClassVar[str] = "coordinator"

    host: str = Field(
        "127.0.0.1", description="Address to listen on. Local by default: there is no access control in this version."
    )
    port: int = Field(
        DEFAULT_PORT, ge=0, le=65535, description="Port of the open interface (gRPC), which everyone has to know."
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of Prometheus metrics; 0 takes any free one, absent serves none: a fixed one by default would"
        " be taken where daemons share a host.",
    )
    data_dir: Path = Field(
        Path("~/.local/share/kera/coordinator"),
        description="Directory of the metadata, one per coordinator. In the home by default, as it must outlive a"
        " reboot and needs no rights; a service would take one of /var/lib.",
    )
    metadata_bytes_max: ByteSize = Field(
        ByteSize(1 * GIB),
        ge=1 * MIB,
        description="Most that the metadata may take on disk, and in address space. Nothing is reserved; a stream takes"
        " about 1 KiB and 20 bytes per streamlet.",
    )
    heartbeat_interval_ms: int = Field(
        1000,
        ge=10,
        description="How often brokers and backups say that they live, in ms; they are told when they register.",
    )
    heartbeats_missed_max: int = Field(
        5,
        ge=1,
        description="After so many intervals without a heartbeat a broker or backup counts as dead: 5 s ride out a slow"
        " disk or a pause of the host, and are short for people.",
    )
    default_replication: int = Field(
        0,
        ge=0,
        le=REPLICATION_MAX,
        description="On how many backups the chunks of a stream are that is created without a word about it; 0: none,"
        " so that a cluster without backups takes streams.",
    )
    broker_timeout_ms: int = Field(
        3000,
        ge=1,
        description="How long a broker may take to open or drop streamlets, in ms: it only changes its memory, and the"
        " client that waits should hear about a dead broker before its own time is up.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log from this level up: debug, info, warning or error."
    )

    @classmethod
    def dev(cls) -> Self:
        """A coordinator on one's own machine: a killed broker is noticed within a second, and metrics are there."""
        return cls(heartbeat_interval_ms=200, metrics_port=0)

    @classmethod
    def for_testing(cls, data_dir: Path) -> Self:
        """Whatever port is free; short times, but brokers of a slow machine stay alive."""
        return cls(
            port=0,
            data_dir=data_dir,
            metadata_bytes_max=ByteSize(64 * MIB),
            heartbeat_interval_ms=100,
            heartbeats_missed_max=50,
            log_level="debug",
        )
