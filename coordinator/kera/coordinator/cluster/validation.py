"""Checks the limits of a stream: its name, configuration and schema, before anything is written. Pure.

Each check names the limit and the reason, since the reader may have chosen the value a minute ago.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import pyarrow as pa

from kera.coordinator.settings import REPLICATION_MAX
from kera.coordinator.store.metadata import VALUE_BYTES_MAX
from kera.core.errors import InvalidArgument, SchemaMismatch, invariant
from kera.core.format.punctuation import EPOCH_GRACE_MS, TIMESTAMP_AHEAD_MAX_MS
from kera.core.format.schema import DEFAULT_SCHEMA, schema_from_bytes, schema_to_bytes
from kera.core.push import DEFAULT_DOMAIN
from kera.v1 import common_pb2, coordinator_pb2

NAME_CHARS_MAX = 249
"""Maximum of the name of a stream or a consumer group. As in Kafka, so that a topic's name can be a stream's."""
_NAME = re.compile(r"[a-zA-Z0-9._-]+")

STREAMLETS_MAX = 16_384
"""Maximum of streamlets, so that a stream's record, which lists the owner of each, fits into the metadata store.

The invariant at the end of this file checks it.
"""
ENTRIES_MAX = 64
"""Maximum of entries per streamlet: each one with writes holds an open segment, so more would only use up memory."""
GROUP_SEGMENTS_MAX = 1024
"""Maximum of segments per group: a consumer gets one group at a time, and larger ones would be work that cannot be
shared.
"""
PRIORITY_MAX = 9
VIRTUAL_LOGS_MAX = 1024
"""Maximum of virtual logs: each has an open virtual segment on each broker of the stream, and a replica in the memory
of R backups.
"""
SCHEMA_BYTES_MAX = 256 << 10
"""Maximum of all versions of a stream's Arrow schema: some thousand columns. They are kept in the stream's record."""
FIRST_SCHEMA_ID = 1
RETENTION_CONSUMER_GROUPS_MAX = 64
"""Maximum of groups that hold back retention: removal checks each of them, and the stream's record lists their names.
"""
CREATION_ID_CHARS_MAX = 64
"""Maximum of the client's id for its request to create a stream: it is kept in the stream's record."""
CHANGED_AS_THEY_ARE: tuple[
    Literal[
        "memory_priority",
        "replication_priority",
        "epoch_ms",
        "punctuation",
        "epoch_grace_ms",
        "timestamp_ahead_max_ms",
    ],
    ...,
] = (
    "memory_priority",
    "replication_priority",
    "epoch_ms",
    "punctuation",
    "epoch_grace_ms",
    "timestamp_ahead_max_ms",
)
"""Settings that have the same name in a request to alter a stream."""
EPOCH_MS_MAX = 366 * 86_400_000
EPOCH_GRACE_MS_MAX = 3_600_000
RETENTION_MAX = (1 << 63) - 1
"""Maximum of ages in milliseconds and sizes in bytes: brokers may add them up in signed 64-bit integers."""


def checked_name(name: str) -> str:
    """Return `name`. Raises `InvalidArgument` if a stream cannot have it."""
    _check_name("a stream", name)
    return name


def checked_producer_name(name: str) -> str:
    """Return `name`. Raises `InvalidArgument` if a producer cannot have it."""
    _check_name("a producer", name)
    return name


def _check_name(whose: str, name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX or name in {".", ".."}:
        raise InvalidArgument(
            f"{whose} cannot be called {name[: NAME_CHARS_MAX + 1]!r}:"
            f" a name has 1 to {NAME_CHARS_MAX} letters, digits, dots, underscores and hyphens, and is not . or ..",
            name=name[: NAME_CHARS_MAX + 1],
        )


def checked_creation_id(creation_id: str) -> str:
    """Return `creation_id`. Raises `InvalidArgument` if it is too long."""
    if len(creation_id) > CREATION_ID_CHARS_MAX:
        raise InvalidArgument(f"a creation_id has at most {CREATION_ID_CHARS_MAX} characters, not {len(creation_id)}")
    return creation_id


def checked_config(config: common_pb2.StreamConfig, *, default_replication: int = 0) -> common_pb2.StreamConfig:
    """Return a copy of `config` with all defaults filled in. Raises `InvalidArgument`."""
    _check_range("streamlets", config.streamlets, STREAMLETS_MAX)
    _check_range("entries", config.entries, ENTRIES_MAX)
    _check_range("group_segments", config.group_segments, GROUP_SEGMENTS_MAX)
    checked = common_pb2.StreamConfig()
    checked.CopyFrom(config)
    if not config.HasField("replication"):
        checked.replication = default_replication
    _check_range("replication", checked.replication, REPLICATION_MAX, value_min=0)
    checked.virtual_logs = config.virtual_logs or 1
    _check_virtual_logs(checked)
    for field in ("memory_priority", "replication_priority"):
        _check_range(field, getattr(config, field), PRIORITY_MAX, value_min=0)
    checked.memory_domain = config.memory_domain or DEFAULT_DOMAIN
    _check_name("a memory domain", checked.memory_domain)
    checked.durability = _checked_durability(config.durability, checked.replication)
    if config.codec not in common_pb2.Codec.values():
        raise InvalidArgument(f"codec {config.codec} is not known to this version", codec=int(config.codec))
    _check_retention(config)
    _complete_epochs(checked)
    checked.clock_until_us = 0  # only the coordinator sets it
    return checked


def _complete_epochs(config: common_pb2.StreamConfig) -> None:
    """Fill in the defaults of a stream's epochs. Raises `InvalidArgument`."""
    if config.punctuation not in common_pb2.Punctuation.values():
        known = ", ".join(name.removeprefix("PUNCTUATION_").lower() for name, _ in common_pb2.Punctuation.items())
        raise InvalidArgument(
            f"punctuation {config.punctuation} is not known to this version, which knows {known}",
            punctuation=int(config.punctuation),
        )
    _check_range("epoch_ms", config.epoch_ms, EPOCH_MS_MAX, value_min=0)
    if config.HasField("epoch_grace_ms"):  # also of a stream without epochs: it may get them later
        _check_range("epoch_grace_ms", config.epoch_grace_ms, EPOCH_GRACE_MS_MAX)
    elif config.epoch_ms:
        config.epoch_grace_ms = EPOCH_GRACE_MS
    if config.HasField("timestamp_ahead_max_ms"):
        _check_range("timestamp_ahead_max_ms", config.timestamp_ahead_max_ms, EPOCH_MS_MAX, value_min=0)
    elif config.epoch_ms:
        config.timestamp_ahead_max_ms = TIMESTAMP_AHEAD_MAX_MS


def _checked_durability(
    durability: common_pb2.Durability.ValueType, replication: int
) -> common_pb2.Durability.ValueType:
    match durability:
        case common_pb2.DURABILITY_UNSPECIFIED:
            return common_pb2.DURABILITY_REPLICATED if replication else common_pb2.DURABILITY_LEADER
        case common_pb2.DURABILITY_LEADER | common_pb2.DURABILITY_PERSISTED:
            return durability
        case common_pb2.DURABILITY_REPLICATED:
            if not replication:
                raise InvalidArgument(
                    'durability "replicated" needs replication of at least 1, which is fixed when a stream is created;'
                    ' this one has 0, so use "leader" or "persisted"',
                    durability="replicated",
                    replication=0,
                )
            return durability
        case unknown:
            raise InvalidArgument(f"durability {unknown} is not known to this version", durability=int(unknown))


def _check_virtual_logs(config: common_pb2.StreamConfig) -> None:
    entries = config.streamlets * config.entries
    if config.virtual_logs > min(entries, VIRTUAL_LOGS_MAX):
        raise InvalidArgument(
            f"virtual_logs must be between 1 and {min(entries, VIRTUAL_LOGS_MAX)}, not {config.virtual_logs}:"
            f" {config.streamlets} streamlets with {config.entries} entries share them, and no stream has more than"
            f" {VIRTUAL_LOGS_MAX}",
            field="virtual_logs",
            value=config.virtual_logs,
            limit=min(entries, VIRTUAL_LOGS_MAX),
        )


def config_of_store(config: common_pb2.StreamConfig) -> common_pb2.StreamConfig:
    """Return a copy of a stored `config`, with the fields that earlier versions did not write."""
    complete = common_pb2.StreamConfig()
    complete.CopyFrom(config)
    complete.replication = config.replication
    complete.virtual_logs = config.virtual_logs or 1
    complete.memory_domain = config.memory_domain or DEFAULT_DOMAIN
    return complete


def check_alteration(request: coordinator_pb2.AlterStreamRequest) -> None:
    """Refuse a request with too many names before it waits for its turn. Raises `InvalidArgument`."""
    _check_count(request.retention_consumer_groups.names)


def altered_config(
    config: common_pb2.StreamConfig, request: coordinator_pb2.AlterStreamRequest
) -> common_pb2.StreamConfig:
    """A copy of `config` with what `request` sets. Raises `InvalidArgument`."""
    altered = common_pb2.StreamConfig()
    altered.CopyFrom(config)
    if request.durability != common_pb2.DURABILITY_UNSPECIFIED:
        altered.durability = request.durability
    if request.HasField("retention_ms"):
        altered.retention_ms = request.retention_ms
    if request.HasField("retention_bytes"):
        altered.retention_bytes = request.retention_bytes
    if request.HasField("retention_consumer_groups"):
        altered.retention_consumer_groups[:] = request.retention_consumer_groups.names
    if request.HasField("retention_consumed"):
        altered.retention_consumed = request.retention_consumed
    if request.HasField("virtual_logs"):
        altered.virtual_logs = request.virtual_logs
    for field in CHANGED_AS_THEY_ARE:
        if request.HasField(field):
            setattr(altered, field, getattr(request, field))
    if request.HasField("memory_domain"):
        altered.memory_domain = request.memory_domain
    if request.HasField("brokers"):
        _check_range("brokers", request.brokers, config.streamlets, value_min=0)
        altered.brokers = request.brokers
    return checked_config(altered)


def note_clock(config: common_pb2.StreamConfig, before: common_pb2.StreamConfig, until_us: int) -> None:
    """Record in the altered `config` until when brokers may have made promises by their clocks.

    `until_us`: the end of promises by the clock, if brokers stop making them now.
    """
    if _goes_by_clock(config):
        return
    config.clock_until_us = until_us if _goes_by_clock(before) else before.clock_until_us


def _goes_by_clock(config: common_pb2.StreamConfig) -> bool:
    return config.epoch_ms > 0 and config.punctuation == common_pb2.PUNCTUATION_CLOCK


def _check_range(field: str, value: int, value_max: int, *, value_min: int = 1) -> None:
    if not value_min <= value <= value_max:
        raise InvalidArgument(
            f"{field} must be between {value_min} and {value_max}, not {value}",
            field=field,
            value=value,
            limit=value_max,
        )


def _check_count(retention_consumer_groups: Sequence[str]) -> None:
    if len(retention_consumer_groups) > RETENTION_CONSUMER_GROUPS_MAX:
        raise InvalidArgument(
            f"{len(retention_consumer_groups)} consumer groups cannot hold back retention,"
            f" the limit is {RETENTION_CONSUMER_GROUPS_MAX}",
            limit=RETENTION_CONSUMER_GROUPS_MAX,
        )


def _check_retention(config: common_pb2.StreamConfig) -> None:
    _check_range("retention_ms", config.retention_ms, RETENTION_MAX, value_min=0)
    _check_range("retention_bytes", config.retention_bytes, RETENTION_MAX, value_min=0)
    _check_count(config.retention_consumer_groups)
    for name, count in Counter(config.retention_consumer_groups).items():
        _check_name("a consumer group", name)
        if count > 1:
            raise InvalidArgument(f"retention_consumer_groups names {name!r} {count} times", consumer_group=name)
    if config.retention_consumed and not config.retention_consumer_groups:
        raise InvalidArgument(
            "retention_consumed needs retention_consumer_groups, whose consumed records it removes; name at least one"
        )


def checked_schema(schema: common_pb2.StreamSchema) -> common_pb2.StreamSchema:
    """Return the first schema of a stream: the default one, or a typed one if `schema` has Arrow bytes.

    Raises `SchemaMismatch` if the bytes are not an Arrow schema, `InvalidArgument` if a stream cannot have the schema.
    """
    if not schema.arrow_schema:
        if schema.key_column or schema.timestamp_column:
            raise InvalidArgument("key_column and timestamp_column need a schema; the default one has columns for both")
        return common_pb2.StreamSchema(schema_id=FIRST_SCHEMA_ID, arrow_schema=schema_to_bytes(DEFAULT_SCHEMA))
    checked = common_pb2.StreamSchema(
        schema_id=FIRST_SCHEMA_ID,
        arrow_schema=schema.arrow_schema,
        key_column=schema.key_column,
        timestamp_column=schema.timestamp_column,
        typed=True,
    )
    length = _schema_bytes([checked])
    if length > SCHEMA_BYTES_MAX:
        raise InvalidArgument(
            f"the schema takes {length} bytes, the limit is {SCHEMA_BYTES_MAX}", limit_bytes=SCHEMA_BYTES_MAX
        )
    arrow = schema_from_bytes(schema.arrow_schema)
    _check_columns(arrow)
    if schema.key_column:
        _check_key(arrow, schema.key_column)
    if schema.timestamp_column:
        _check_timestamp(arrow, schema.timestamp_column)
    return checked


def _schema_bytes(versions: Iterable[common_pb2.StreamSchema]) -> int:
    """Return how much of a stream's record the versions of its schema take: each names the columns of its settings."""
    return common_pb2.StreamInfo(schemas=versions).ByteSize()


def extended_schema(
    stream: common_pb2.StreamInfo, add_columns: bytes, number_after: Callable[[int], int]
) -> list[common_pb2.StreamSchema]:
    """Return the version of `stream`'s schema that also has the columns of `add_columns`; empty if the newest has them.

    So a repeated request adds nothing. Raises `InvalidArgument`, and `SchemaMismatch` if a column of that name has
    another type, or the bytes are not an Arrow schema.
    """
    newest = max(stream.schemas, key=lambda version: version.schema_id)
    if not newest.typed:
        raise InvalidArgument(
            f"stream {stream.name!r} has the default schema, which takes no further columns: use headers, or a"
            " stream that is created with columns of its own",
            stream=stream.name,
        )
    added, there = schema_from_bytes(add_columns), schema_from_bytes(newest.arrow_schema)
    _check_columns(added)
    new = [field for field in added if _is_new(stream.name, field, there)]
    if not new:
        return []
    version = common_pb2.StreamSchema()
    version.CopyFrom(newest)
    version.schema_id = number_after(newest.schema_id)  # never given before: a chunk that names it means no other
    version.arrow_schema = schema_to_bytes(pa.schema([*there, *new], metadata=there.metadata))
    length = _schema_bytes([*stream.schemas, version])
    if length > SCHEMA_BYTES_MAX:
        raise InvalidArgument(
            f"with these columns the {len(stream.schemas) + 1} versions of the schema of stream {stream.name!r} would"
            f" take {length} bytes, the limit is {SCHEMA_BYTES_MAX}; add several columns at once, or make a new stream",
            stream=stream.name,
            limit_bytes=SCHEMA_BYTES_MAX,
        )
    return [version]


def _is_new(stream: str, field: pa.Field, there: pa.Schema) -> bool:
    if field.name in there.names:
        known = there.field(field.name)
        if known.type != field.type:
            raise SchemaMismatch(
                f"stream {stream!r} has a column {field.name!r} already, which is {known.type}, not {field.type}; add"
                " it under another name",
                stream=stream,
                column=field.name,
            )
        return False
    if not field.nullable:
        raise InvalidArgument(
            f"column {field.name!r} cannot be added: it must be nullable, as the records that are there have no value"
            " for it",
            stream=stream,
            column=field.name,
        )
    return True


def _check_columns(schema: pa.Schema) -> None:
    if not schema.names:
        raise InvalidArgument("the schema has no column")
    name, count = Counter(schema.names).most_common(1)[0]
    if count > 1:
        raise InvalidArgument(f"the schema has {count} columns named {name!r}", column=name)
    for field in schema:
        if _has_dictionary(field.type):
            raise InvalidArgument(
                f"column {field.name!r} is dictionary-encoded ({field.type}): a chunk has to stand alone, without a"
                " dictionary sent earlier; use the type of its values, and a codec to save the space",
                column=field.name,
            )


def _has_dictionary(data_type: pa.DataType) -> bool:
    if isinstance(data_type, pa.BaseExtensionType):
        return _has_dictionary(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return True
    return any(_has_dictionary(data_type.field(index).type) for index in range(data_type.num_fields))


def _column_type(schema: pa.Schema, setting: str, column: str) -> pa.DataType:
    if column not in schema.names:
        raise InvalidArgument(
            f"{setting} {column!r} is not in the schema; it has {', '.join(map(repr, schema.names))}", column=column
        )
    return schema.field(column).type


def _check_key(schema: pa.Schema, column: str) -> None:
    data_type = _column_type(schema, "key_column", column)
    if pa.types.is_nested(data_type) or pa.types.is_null(data_type) or pa.types.is_floating(data_type):
        raise InvalidArgument(
            f"key_column {column!r} has type {data_type}: a key partitions rows, so its values must be single ones that"
            " are equal or not, such as integers, strings or binary",
            column=column,
        )


def _check_timestamp(schema: pa.Schema, column: str) -> None:
    data_type = _column_type(schema, "timestamp_column", column)
    if not pa.types.is_timestamp(data_type):
        raise InvalidArgument(
            f"timestamp_column {column!r} has type {data_type}, it must be a timestamp", column=column
        )


_ASSIGNMENT_BYTES_MAX = 40
"""Maximum size of an assignment at one broker.

Four varints of at most 3 + 5 + 10 + 10 bytes, their tags, and the tag and length around them. A streamlet that is at
several brokers takes more; moves leave room for that (``migration``).
"""
_CONSUMER_GROUP_BYTES_MAX = NAME_CHARS_MAX + 3
"""Maximum size of a consumer group: its name, the tag and the length."""
invariant(
    STREAMLETS_MAX * _ASSIGNMENT_BYTES_MAX
    + SCHEMA_BYTES_MAX
    + RETENTION_CONSUMER_GROUPS_MAX * _CONSUMER_GROUP_BYTES_MAX
    + 4096
    <= VALUE_BYTES_MAX,
    "the largest stream fits into a record, whatever happens to its assignments",
)
