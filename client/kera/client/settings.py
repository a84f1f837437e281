"""Settings of the SDK: sections ``[client]``, ``[producer]`` and ``[consumer]``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ByteSize, Field

from kera.core.base.settings import KIB, MIB, KeraSettings
from kera.core.credential_settings import CredentialSettings
from kera.core.native import native
from kera.core.tracing import TracesSettings

Durability = Literal["leader", "replicated", "persisted"]
Transport = Literal["auto", "unix", "tcp", "grpc"]
SharedMemory = Literal["auto", "never", "always"]
PartitionerName = Literal["crc32c", "murmur2_random", "consistent_random"]


class ClientSettings(CredentialSettings, TracesSettings):
    """How to reach the cluster. Variables ``KERA_CLIENT_*``."""

    section: ClassVar[str] = "client"

    transport: Transport = Field(
        "auto",
        description="How to reach brokers. auto: a unix socket on the same node, else frames over TCP, else gRPC.",
    )
    connect_timeout_ms: int = Field(5_000, gt=0, description="How long to wait for one connection, in ms.")
    request_timeout_ms: int = Field(10_000, gt=0, description="How long to wait for one answer, in ms.")
    retry_timeout_ms: int = Field(
        30_000, ge=0, description="How long to repeat requests that fail for a passing reason, in ms."
    )
    recovery_timeout_ms: int = Field(
        600_000,
        ge=0,
        description="How long to wait for data that are being recovered, in ms; retry_timeout_ms counts from the last"
        " answer of a broker that says so.",
    )
    retry_backoff_ms: int = Field(50, gt=0, description="Pause before the first retry, in ms; doubles up to 1 s.")
    message_bytes_max: ByteSize = Field(
        ByteSize(32 * MIB), description="Largest request or response; not below the brokers' segment size."
    )


class ProducerSettings(KeraSettings):
    """How records become chunks and requests. Variables ``KERA_PRODUCER_*``."""

    section: ClassVar[str] = "producer"

    name: str = Field(
        "",
        description="Name that the producer keeps over restarts: a new producer of the name shuts out the one before."
        " Empty: a producer of its own.",
    )
    chunk_bytes_max: ByteSize = Field(
        ByteSize(256 * KIB),
        description="A chunk of a streamlet closes at this size; larger ones cost less per record, smaller wait less.",
    )
    request_bytes_max: ByteSize = Field(
        ByteSize(1 * MIB), description="A request to a broker takes chunks up to this size; at least one."
    )
    linger_ms: float | None = Field(
        None,
        ge=0,
        description="How long an unfilled chunk waits for more records, in ms; it wins over latency_target_ms. 0, or"
        " absent where there is no target: it goes when no other request to its broker waits for an answer, so chunks"
        " grow by themselves under load.",
    )
    latency_target_ms: float | None = Field(
        None,
        gt=0,
        le=3_600_000,
        description="Time within which records have to be acknowledged, in ms: an unfilled chunk waits for more"
        " records for that time, less the time of requests and a tenth. Absent: linger_ms decides.",
    )
    requests_in_flight_max: int = Field(
        5, ge=1, description="Requests per broker that wait for an answer; order is kept whatever the number."
    )
    buffer_bytes_max: ByteSize = Field(
        ByteSize(64 * MIB), gt=0, description="Records accepted and not yet acknowledged; beyond it senders wait."
    )
    delivery_timeout_ms: int = Field(
        60_000, gt=0, description="How long a record may take until it is acknowledged, retries included, in ms."
    )
    payload: Literal["auto", "arrow", "lean"] = Field(
        "auto",
        description="How the records of a chunk are written. arrow: an Arrow message, 600 bytes and more beside the"
        " records; lean: only the parts that differ from chunk to chunk, far less where chunks are small; auto: lean"
        " where the native core is there, which makes it as quickly.",
    )
    partitioner: PartitionerName = Field(
        "crc32c",
        description="Hash of a record's first key, which decides its streamlet; all producers of a stream should"
        " have the same. crc32c: CRC-32C of the key. murmur2_random: as Kafka's client in Java does by default."
        " consistent_random: as librdkafka does by default; an empty key counts as no key.",
    )
    durability: Durability | None = Field(
        None,
        description="Level to acknowledge at: leader, replicated or persisted; absent: the stream's own. A lower one is"
        " answered sooner, and read no sooner than the stream's own says.",
    )

    register_schemas: bool = Field(
        default=True,
        description="Register the schemas of the producer's serializers where they are not yet. false: a schema that is"
        " not registered is an error.",
    )

    @property
    def lean(self) -> bool:
        """Whether payloads are lean, see `payload`."""
        return self.payload == "lean" or (self.payload == "auto" and native is not None)


class ConsumerSettings(KeraSettings):
    """How chunks are read. Variables ``KERA_CONSUMER_*``."""

    section: ClassVar[str] = "consumer"

    consumer_group: str = Field("", description="Name of the consumer group, as brokers see it.")
    fetch_bytes_max: ByteSize = Field(ByteSize(2 * MIB), description="Maximum of one response of a broker to a pull.")
    fetch_wait_ms: int = Field(
        500, ge=0, le=60_000, description="How long a broker waits for records when a fetch finds none, in ms."
    )
    prefetch_bytes_max: ByteSize = Field(
        ByteSize(8 * MIB),
        gt=0,
        description="Limit of fetched data that are not delivered yet; fetching pauses beyond it. Pushed data count"
        " per broker, and a broker may have a lower limit.",
    )
    shared_memory: SharedMemory = Field(
        "auto",
        description="Read chunks in place in the broker's memory, which then pushes them. auto: when the broker is on"
        " the same node and its memory can be reached; always: or fail; never: pull copies.",
    )
    corrupt_chunks: Literal["fail", "skip"] = Field(
        "fail",
        description="How to treat a chunk whose records cannot be read, though its header can. skip: it counts as"
        " one without records, and a warning names it.",
    )
    on_data_lost: Literal["raise", "skip"] = Field(
        "raise",
        description="When records are gone that should come next (retention, truncation, lost hosts): raise DataLost,"
        " after which a consumer of a consumer group goes on behind the gap if asked for more; or skip it with a"
        " warning.",
    )
    undecodable_records: Literal["fail", "skip"] = Field(
        "fail",
        description="How to treat a record that the consumer's deserializer cannot read. fail: CannotDecode is raised,"
        " and the next call continues behind it; skip: it is left out, and a warning says how many were.",
    )
    joined_bytes_max: ByteSize = Field(
        ByteSize(256 * KIB),
        description="Maximum size of a batch that joins consecutive lean chunks of up to 16 KiB; the batch is a"
        " copy. 0: each chunk is a batch.",
    )
    decompressed_bytes_max: ByteSize = Field(
        ByteSize(128 * MIB),
        gt=0,
        description="Maximum size of a chunk when it is decompressed, or when each of its values is written out:"
        " a larger one cannot be read.",
    )
    verify_checksums: bool = Field(
        default=True, description="Check each chunk's checksums before its records are used; about 0.04 s per GB."
    )
    validate_chunks: bool = Field(
        default=True,
        description="Check that each chunk's payload is a whole record batch before its records are used; about 2 us"
        " a chunk and 0.01 s per GB. false: only where all writers of the stream are trusted, as a malicious chunk can"
        " then end the process.",
    )
