"""Settings of the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field

from kera.core.base.settings import GIB, MIB
from kera.server.network import NetworkSettings

DEFAULT_PORT = 7400
REPLICATION_MAX = 16
"""Maximum of replicas of a chunk on backups.

More would protect against nothing that happens in practice, and every write waits for all of them.
"""


class CoordinatorSettings(NetworkSettings):
    """Section ``[coordinator]``, variables ``KERA_COORDINATOR_*``, flags of ``kera coordinator``."""

    section: ClassVar[str] = "coordinator"

    port: int = Field(
        DEFAULT_PORT, ge=0, le=65535, description="Port of the open interface (gRPC), which everyone has to know."
    )
    data_dir: Path = Field(
        Path("~/.local/share/kera/coordinator"),
        description="Directory of the metadata, one per coordinator. In the home by default, as it must outlive a"
        " reboot and needs no rights; a service would take one of /var/lib.",
    )
    zookeeper: str = Field(
        "",
        description="Addresses of a ZooKeeper ensemble, host:port separated by commas, with a path behind them if"
        " /kera is another cluster's. Metadata are kept there, and one of the coordinators that share it leads. Empty:"
        " one coordinator, with its metadata in data_dir.",
    )
    zookeeper_session_timeout_ms: int = Field(
        4000,
        ge=500,
        le=40_000,
        description="After this time without a sign of the leading coordinator another one takes over, in ms. Not"
        " less than two ticks of ZooKeeper, and not more than twenty: it takes no others.",
    )
    zookeeper_tls: bool = Field(
        default=False,
        description="Connections to ZooKeeper are encrypted, with tls_ca, tls_cert and tls_key; zookeeper then names"
        " its secureClientPort.",
    )
    advertised_address: str = Field(
        "",
        description="host:port at which clients, daemons and other coordinators reach this one. Empty: the address"
        " it listens on.",
    )
    metadata_bytes_max: ByteSize = Field(
        ByteSize(1 * GIB),
        ge=1 * MIB,
        description="Maximum size of the metadata on disk, and in address space. No space is reserved; a stream"
        " takes about 1 KiB and 20 bytes per streamlet.",
    )
    heartbeat_interval_ms: int = Field(
        1000,
        ge=10,
        description="Interval of heartbeats of brokers and backups, in ms; they get it when they register.",
    )
    heartbeats_missed_max: int = Field(
        8,
        ge=1,
        description="After this many intervals without a heartbeat a broker or backup counts as dead, and a broker"
        " without contact to the coordinator accepts no more chunks for replicated streams: 8 s ride out a pause of"
        " the host and a change of the coordinator. A daemon that clients cannot reach counts as dead sooner.",
    )
    default_replication: int = Field(
        0,
        ge=0,
        le=REPLICATION_MAX,
        description="Replication factor (backups) of streams that are created without one of their own; 0: none,"
        " so that a cluster without backups takes streams.",
    )
    broker_timeout_ms: int = Field(
        3000,
        ge=1,
        description="How long a broker may take to open or drop streamlets, in ms: it only changes its memory, and the"
        " client that waits should hear about a dead broker before its own time is up.",
    )
    report_grace_ms: int = Field(
        1000,
        ge=0,
        description="Time between two refused connections after which a broker that clients cannot reach counts as"
        " dead at once, in ms: enough for a restart of its process.",
    )
    seal_wait_ms: int = Field(
        2000,
        ge=1,
        description="How long a streamlet that moves may wait for chunks that are not durable yet, in ms; then it"
        " stays where it is. No chunk is taken for it meanwhile.",
    )
    restart_grace_ms: int = Field(
        60_000,
        ge=0,
        description="Time, in ms, that a broker or backup may be away for an announced restart before it counts as"
        " lost: then its data are recovered, or replicated again. Set it longer than its stop and its start take"
        " together.",
    )
    unnamed_group_retention_ms: int = Field(
        7 * 24 * 3_600_000,
        ge=0,
        description="Time without use after which consumer groups without a chosen name, such as those of Spark"
        " queries without kera.group.id, are forgotten, in ms; 0: never. Time counts only while a coordinator leads.",
    )
    group_lag_interval_ms: int = Field(
        10_000,
        ge=0,
        description="How often brokers are asked how far consumer groups are behind, in ms, for the metrics of a"
        " coordinator that has a metrics_port; 0: never.",
    )
    principal_share_percent: int = Field(
        25,
        ge=1,
        le=100,
        description="Share of the cluster's limits that one principal may use, in percent. The limits: room for"
        " descriptions of streams (16 MiB) and for schemas (24 MiB), memory domains (64), consumer groups (10,000),"
        " names of producers (100,000), latency constraints and streams on their paths (1,000 each). Administrators"
        " of the cluster may use more. Without security there is no such limit.",
    )
    moves_in_flight_max: int = Field(8, ge=1, description="How many streamlets move at the same time.")
    rebalance_interval_ms: int = Field(
        0,
        ge=0,
        description="How often streamlets are moved so that brokers have about the same load, in ms; 0: only when asked"
        " (kera cluster rebalance).",
    )
    move_rest_ms: int = Field(
        60_000,
        ge=0,
        description="How long rebalancing leaves alone a streamlet that was moved, in ms: its load has to be"
        " measured where it is now.",
    )
    feature_level_max: int | None = Field(
        None,
        ge=0,
        description="Maximum of the automatic rise of the cluster's feature level, so that a downgrade to the"
        " version before remains possible. Absent: the level of all its daemons.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log from this level up: debug, info, warning or error."
    )

    @property
    def lease_ms(self) -> int:
        """The time after a broker's last answered heartbeat during which it is not declared lost."""
        return self.heartbeat_interval_ms * self.heartbeats_missed_max

    @classmethod
    def dev(cls) -> Self:
        """Return settings for a developer's machine: with metrics, and a killed broker is noticed within a second."""
        return cls(heartbeat_interval_ms=200, heartbeats_missed_max=5, report_grace_ms=200, metrics_port=0)

    @classmethod
    def for_testing(cls, data_dir: Path) -> Self:
        """Return settings for tests: any free port, and short times that brokers on a slow machine still survive."""
        return cls(
            port=0,
            data_dir=data_dir,
            metadata_bytes_max=ByteSize(64 * MIB),
            heartbeat_interval_ms=100,
            heartbeats_missed_max=50,
            report_grace_ms=50,
            log_level="debug",
        )
