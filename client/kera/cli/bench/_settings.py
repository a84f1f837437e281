"""What to measure: the flags of ``kera bench …``."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, model_validator

from kera.core.settings import GIB, KIB, MIB, KeraSettings

MB = 10**6


class BenchSettings(KeraSettings):
    """Flags of ``kera bench produce``, and of the others where they do not differ."""

    section: ClassVar[str] = "bench_produce"

    record_bytes: tuple[ByteSize, ...] = Field(
        (ByteSize(100),),
        min_length=1,
        description="Length of a record's value; repeat it to measure several.",
    )
    chunk_bytes: ByteSize = Field(ByteSize(256 * KIB), ge=1 * KIB, description="Size of a full chunk.")
    request_bytes: ByteSize = Field(ByteSize(1 * MIB), description="A request takes chunks up to this size.")
    streamlets: int = Field(1, ge=1, description="M: streamlets of the stream.")
    entries: int = Field(1, ge=1, description="Q: entries per streamlet.")
    replication: int | None = Field(
        None,
        ge=0,
        description="R: backups that have each chunk, too; absent: the cluster's default, of a temporary one 0.",
    )
    virtual_logs: int = Field(1, ge=1, description="V: virtual logs of the stream, at most streamlets times entries.")
    durability: Literal["leader", "replicated", "persisted"] | None = Field(
        None,
        description="Level of the stream: when a chunk is acknowledged and can be read; absent: replicated with"
        " --replication, else leader.",
    )
    codec: Literal["none", "lz4", "zstd"] = Field("none", description="Compression; values are random hex digits.")
    producers: int = Field(1, ge=1, description="Producers, each a process.")
    mode: Literal["send_batch", "send"] = Field(
        "send_batch",
        description="What producers call: send_batch with a ready Arrow batch, or send per record.",
    )
    buffer_bytes: ByteSize = Field(
        ByteSize(64 * MIB),
        description="What a producer may have waiting; latency without --rate is time in it.",
    )
    requests_in_flight: int = Field(5, ge=1, description="Requests of a producer to a broker that wait for an answer.")
    linger_ms: float = Field(0.0, ge=0, description="How long an unfilled chunk waits for more records.")
    rate: float = Field(0.0, ge=0, description="Records per second of all producers together; 0: as fast as it goes.")
    bytes: ByteSize | None = Field(None, description="Record bytes of a round; default 1 GB, or what --seconds allow.")
    records: int | None = Field(None, ge=1, description="Records of a round, in place of --bytes.")
    seconds: float | None = Field(None, gt=0, description="End a round after this time, whatever is left.")
    rounds: int = Field(3, ge=1, description="Rounds measured; the median, the least and the most are reported.")
    transport: Literal["auto", "unix", "tcp", "grpc"] = Field(
        "auto", description="How clients reach brokers; auto: unix socket, else frames over TCP, else gRPC."
    )
    bootstrap: str | None = Field(
        None, description="Coordinators of the cluster to measure; absent: a temporary one on this machine."
    )
    brokers: int = Field(1, ge=1, description="Brokers of the temporary cluster.")
    arena_bytes: ByteSize | None = Field(
        None, description="Memory of each broker of the temporary cluster; default: what a round needs."
    )
    backups: int = Field(0, ge=0, description="Backups of the temporary cluster.")
    backup_memory_bytes: ByteSize | None = Field(
        None, description="Memory of each backup of the temporary cluster; default: what a round needs."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.records is not None and self.bytes is not None:
            raise ValueError("records and bytes exclude each other")
        if self.records_of(min(self.record_bytes)) < self.producers:
            raise ValueError("a round has fewer records than producers")
        if self.bootstrap is None and (self.replication or 0) > self.backups:
            raise ValueError(f"replication {self.replication} needs as many backups, and there are {self.backups}")
        return self

    def records_of(self, record_bytes: int) -> int:
        """Records of a round with records of this size."""
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
        "auto", description="Whether the consumer reads in the broker's memory."
    )
    verify_checksums: bool = Field(default=True, description="Whether the consumer checks each chunk.")


class E2eSettings(ConsumeSettings):
    """Flags of ``kera bench e2e``: a fixed rate, record by record, unless it is told otherwise."""

    section: ClassVar[str] = "bench_e2e"

    mode: Literal["send_batch", "send"] = Field(
        "send", description="What producers call: send per record, or send_batch with a ready Arrow batch."
    )
    rate: float = Field(1000.0, ge=0, description="Records per second of all producers; 0: as fast as it goes.")
    seconds: float | None = Field(5.0, gt=0, description="End a round after this time, whatever is left.")


SETTINGS: dict[str, type[BenchSettings]] = {
    "produce": BenchSettings,
    "consume": ConsumeSettings,
    "e2e": E2eSettings,
}


def arena_bytes_of(settings: BenchSettings, segment_bytes: int) -> int:
    """Memory that each broker needs for a round: records, what Arrow and chunks add, and open segments.

    Streams are deleted between rounds, so that the memory of one round is all there has to be.
    """
    if settings.arena_bytes is not None:
        return int(settings.arena_bytes)
    lanes = settings.streamlets * settings.entries
    return _in_segments(_chunk_bytes_of_round(settings) // settings.brokers, lanes * 2 + 4, segment_bytes)


def backup_memory_bytes_of(settings: BenchSettings, segment_bytes: int) -> int:
    """Memory that each backup needs for a round: its share of all replicas, and of the open ones of each broker."""
    if settings.backup_memory_bytes is not None:
        return int(settings.backup_memory_bytes)
    copies = settings.replication or 0
    shared_bytes = _chunk_bytes_of_round(settings) * copies // max(settings.backups, 1)
    open_segments = settings.brokers * settings.virtual_logs * copies
    return _in_segments(shared_bytes, open_segments * 2 + 4, segment_bytes)


def _chunk_bytes_of_round(settings: BenchSettings) -> int:
    """All chunks of a round, and a quarter more."""
    needed = 0
    for record_bytes in settings.record_bytes:
        records = settings.records_of(record_bytes)
        chunk_share = KIB if settings.rate else 4  # at a fixed rate a chunk may hold a single record
        needed = max(needed, records * (record_bytes + 32 + chunk_share))
    return needed * 5 // 4


def _in_segments(needed_bytes: int, segments_more: int, segment_bytes: int) -> int:
    needed_bytes += segments_more * segment_bytes
    return min(-(-needed_bytes // segment_bytes) * segment_bytes, 64 * GIB)
