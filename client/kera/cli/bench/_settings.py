"""Flags of ``kera bench …``."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, model_validator

from kera.core.base.settings import GIB, KIB, MIB, KeraSettings

MB = 10**6
_OF_TEMPORARY_CLUSTER = ("brokers", "arena_bytes", "backups", "backup_memory_bytes")
"""Settings that only apply to a temporary cluster."""


class BenchSettings(KeraSettings):
    """Flags of ``kera bench produce``, which the other benchmarks extend or override."""

    section: ClassVar[str] = "bench_produce"

    record_bytes: tuple[ByteSize, ...] = Field(
        (ByteSize(100),),
        min_length=1,
        description="Size of a record's value; repeat it to measure several.",
    )
    chunk_bytes: ByteSize = Field(ByteSize(256 * KIB), ge=1 * KIB, description="Size of a full chunk.")
    request_bytes: ByteSize = Field(ByteSize(1 * MIB), description="Maximum size of the chunks in a request.")
    streamlets: int = Field(1, ge=1, description="M: number of streamlets of the stream.")
    entries: int = Field(1, ge=1, description="Q: number of entries per streamlet.")
    replication: int | None = Field(
        None,
        ge=0,
        description="R: backups per chunk. Default: the cluster's; 0 in a temporary one.",
    )
    virtual_logs: int = Field(1, ge=1, description="V: virtual logs of the stream, at most streamlets × entries.")
    durability: Literal["leader", "replicated", "persisted"] | None = Field(
        None,
        description="Level at which a chunk is acknowledged and readable. Default: replicated with --replication, else"
        " leader.",
    )
    codec: Literal["none", "lz4", "zstd"] = Field("none", description="Compression; values are random hex digits.")
    producers: int = Field(1, ge=1, description="Number of producers, each a process.")
    mode: Literal["send_batch", "send"] = Field(
        "send_batch",
        description="Method that producers call: send_batch with a ready Arrow batch, or send per record.",
    )
    buffer_bytes: ByteSize = Field(
        ByteSize(64 * MIB),
        description="Buffer of a producer; without --rate, latency is mostly time spent in it.",
    )
    requests_in_flight: int = Field(5, ge=1, description="Maximum requests in flight from a producer to a broker.")
    linger_ms: float | None = Field(None, ge=0, description="How long an unfilled chunk waits for more records.")
    latency_target_ms: float | None = Field(
        None, gt=0, description="Within how many ms records are to be acknowledged; without --linger-ms."
    )
    rate: float = Field(0.0, ge=0, description="Records per second of all producers together; 0: as fast as possible.")
    bytes: ByteSize | None = Field(
        None, description="Record bytes of a round; default: 1 GB, or as many as fit into --seconds."
    )
    records: int | None = Field(None, ge=1, description="Records of a round, instead of --bytes.")
    seconds: float | None = Field(None, gt=0, description="End a round after this time, even if records are left.")
    rounds: int = Field(3, ge=1, description="Number of rounds; median, minimum and maximum are reported.")
    transport: Literal["auto", "unix", "tcp", "grpc"] = Field(
        "auto", description="How clients reach brokers; auto: unix socket, else frames over TCP, else gRPC."
    )
    bootstrap: str | None = Field(
        None, description="Coordinators of the cluster to measure. Default: start a temporary one on this machine."
    )
    brokers: int = Field(1, ge=1, description="Brokers of the temporary cluster.")
    arena_bytes: ByteSize | None = Field(
        None, description="Memory of each broker of the temporary cluster; default: as much as a round needs."
    )
    backups: int = Field(0, ge=0, description="Backups of the temporary cluster.")
    backup_memory_bytes: ByteSize | None = Field(
        None, description="Memory of each backup of the temporary cluster; default: as much as a round needs."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.records is not None and self.bytes is not None:
            raise ValueError("records and bytes are mutually exclusive")
        if self.records_of(min(self.record_bytes)) < self.producers:
            raise ValueError("a round has fewer records than producers")
        if self.bootstrap is None and (self.replication or 0) > self.backups:
            raise ValueError(f"replication {self.replication} needs as many backups, and there are {self.backups}")
        of_temporary = [name for name in _OF_TEMPORARY_CLUSTER if name in self.model_fields_set]
        if self.bootstrap is not None and of_temporary:
            raise ValueError(f"{of_temporary[0]} is for a temporary cluster, and bootstrap names one that runs")
        if self.backup_memory_bytes is not None and not self.backups:
            raise ValueError("backup_memory_bytes needs backups: without, there is no backup")
        return self

    def records_of(self, record_bytes: int) -> int:
        """Return the number of records in a round with records of this size."""
        if self.records is not None:
            return self.records
        if self.rate and self.seconds is not None and self.bytes is None:
            return round(self.rate * self.seconds)
        return int(self.bytes or 1000 * MB) // record_bytes


class ConsumeSettings(BenchSettings):
    """Flags of ``kera bench consume``."""

    section: ClassVar[str] = "bench_consume"

    read: Literal["batches", "records"] = Field(
        "batches",
        description="How the consumer iterates: Arrow batches in place, or records as Python objects.",
    )
    shared_memory: Literal["auto", "never", "always"] = Field(
        "auto", description="Whether the consumer reads from the broker's shared memory."
    )
    verify_checksums: bool = Field(
        default=True, description="Whether the consumer verifies the checksum of each chunk."
    )


class E2eSettings(ConsumeSettings):
    """Flags of ``kera bench e2e``: a fixed rate, record by record, by default."""

    section: ClassVar[str] = "bench_e2e"

    mode: Literal["send_batch", "send"] = Field(
        "send", description="Method that producers call: send per record, or send_batch with a ready Arrow batch."
    )
    rate: float = Field(1000.0, ge=0, description="Records per second of all producers; 0: as fast as possible.")
    seconds: float | None = Field(5.0, gt=0, description="End a round after this time, even if records are left.")


SETTINGS: dict[str, type[BenchSettings]] = {
    "produce": BenchSettings,
    "consume": ConsumeSettings,
    "e2e": E2eSettings,
}


def arena_bytes_of(settings: BenchSettings, segment_bytes: int) -> int:
    """Return the memory that each broker needs for a round: records, overhead of Arrow and chunks, and open segments.

    Streams are deleted between rounds, so the memory of one round is enough.
    """
    if settings.arena_bytes is not None:
        return int(settings.arena_bytes)
    entries = settings.streamlets * settings.entries
    return _in_segments(_chunk_bytes_of_round(settings) // settings.brokers, entries * 2 + 4, segment_bytes)


def backup_memory_bytes_of(settings: BenchSettings, segment_bytes: int) -> int:
    """Return the memory that each backup needs for a round: its share of all replicas, and open segments."""
    if settings.backup_memory_bytes is not None:
        return int(settings.backup_memory_bytes)
    copies = settings.replication or 0
    shared_bytes = _chunk_bytes_of_round(settings) * copies // max(settings.backups, 1)
    open_segments = settings.brokers * settings.virtual_logs * copies
    return _in_segments(shared_bytes, open_segments * 2 + 4, segment_bytes)


def _chunk_bytes_of_round(settings: BenchSettings) -> int:
    """Return the bytes of all chunks of a round, and a quarter more."""
    needed = 0
    for record_bytes in settings.record_bytes:
        records = settings.records_of(record_bytes)
        chunk_share = KIB if settings.rate else 4  # at a fixed rate a chunk may hold a single record
        needed = max(needed, records * (record_bytes + 32 + chunk_share))
    return needed * 5 // 4


def _in_segments(needed_bytes: int, segments_more: int, segment_bytes: int) -> int:
    needed_bytes += segments_more * segment_bytes
    return min(-(-needed_bytes // segment_bytes) * segment_bytes, 64 * GIB)
