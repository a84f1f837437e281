from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.cluster.validation import (
    ENTRIES_MAX,
    GROUP_SEGMENTS_MAX,
    NAME_CHARS_MAX,
    RETENTION_CONSUMER_GROUPS_MAX,
    RETENTION_MAX,
    SCHEMA_BYTES_MAX,
    STREAMLETS_MAX,
    VIRTUAL_LOGS_MAX,
    altered_config,
    checked_config,
    checked_name,
    checked_schema,
    config_of_store,
    extended_schema,
)
from kera.coordinator.settings import REPLICATION_MAX
from kera.core.errors import InvalidArgument, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA, schema_from_bytes, schema_to_bytes
from kera.v1 import common_pb2
from kera.v1.coordinator_pb2 import AlterStreamRequest, ConsumerGroupNames


@pytest.mark.parametrize("name", ["a", "orders.v2_EU-west", "...", "x" * NAME_CHARS_MAX])
def test_a_name_may_have_letters_digits_dots_underscores_and_hyphens(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "straße", "a\n", "x" * (NAME_CHARS_MAX + 1)])
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="a name has 1 to 249 letters"):
        checked_name(name)


def config(**changes: Any) -> common_pb2.StreamConfig:
    return common_pb2.StreamConfig(**{"streamlets": 1, "entries": 1, "group_segments": 1, **changes})


@pytest.mark.parametrize(
    ("field", "limit"),
    [("streamlets", STREAMLETS_MAX), ("entries", ENTRIES_MAX), ("group_segments", GROUP_SEGMENTS_MAX)],
)
def test_each_number_of_a_configuration_is_limited(field: str, limit: int) -> None:
    for value in (1, limit):
        assert getattr(checked_config(config(**{field: value})), field) == value
    for value in (0, limit + 1):
        with pytest.raises(InvalidArgument, match=f"{field} must be between 1 and {limit}, not {value}"):
            checked_config(config(**{field: value}))


@pytest.mark.parametrize(
    ("replication", "expected"), [(0, common_pb2.DURABILITY_LEADER), (1, common_pb2.DURABILITY_REPLICATED)]
)
def test_the_default_durability_follows_from_the_replication(
    replication: int, expected: common_pb2.Durability.ValueType
) -> None:
    given_config = config(replication=replication)
    assert checked_config(given_config).durability == expected
    assert given_config.durability == common_pb2.DURABILITY_UNSPECIFIED  # the request itself is not changed


@pytest.mark.parametrize("replication", [0, 3])
@pytest.mark.parametrize("durability", [common_pb2.DURABILITY_LEADER, common_pb2.DURABILITY_PERSISTED])
def test_durability_that_needs_no_backups_is_accepted(
    durability: common_pb2.Durability.ValueType, replication: int
) -> None:
    assert checked_config(config(durability=durability, replication=replication)).durability == durability


def test_replicated_durability_needs_replication() -> None:
    replicated = config(durability=common_pb2.DURABILITY_REPLICATED, replication=1)
    assert checked_config(replicated).durability == common_pb2.DURABILITY_REPLICATED
    for refused in (config(durability=common_pb2.DURABILITY_REPLICATED, **more) for more in ({}, {"replication": 0})):
        with pytest.raises(InvalidArgument, match='"replicated" needs replication of at least 1'):
            checked_config(refused)


def test_the_default_replication_is_that_of_the_cluster() -> None:
    for given_config, expected in ((config(), 2), (config(replication=0), 0), (config(replication=1), 1)):
        checked = checked_config(given_config, default_replication=2)
        assert (checked.HasField("replication"), checked.replication) == (True, expected)
    assert checked_config(config()).HasField("replication")


def test_replication_is_limited() -> None:
    assert checked_config(config(replication=REPLICATION_MAX)).replication == REPLICATION_MAX
    with pytest.raises(InvalidArgument, match="replication must be between 0 and 16, not 17"):
        checked_config(config(replication=REPLICATION_MAX + 1))


@pytest.mark.parametrize(
    ("streamlets", "entries", "limit"), [(1, 1, 1), (3, 4, 12), (STREAMLETS_MAX, 1, VIRTUAL_LOGS_MAX)]
)
def test_there_are_at_most_as_many_virtual_logs_as_lanes(streamlets: int, entries: int, limit: int) -> None:
    for virtual_logs, expected in ((0, 1), (1, 1), (limit, limit)):
        given_config = config(streamlets=streamlets, entries=entries, virtual_logs=virtual_logs)
        assert checked_config(given_config).virtual_logs == expected
    with pytest.raises(InvalidArgument, match=f"virtual_logs must be between 1 and {limit}, not {limit + 1}"):
        checked_config(config(streamlets=streamlets, entries=entries, virtual_logs=limit + 1))


def test_a_stored_configuration_of_a_version_without_replication_becomes_complete() -> None:
    assert config_of_store(config()) == config(replication=0, virtual_logs=1, memory_domain="default")
    complete = config(replication=3, virtual_logs=1, memory_domain="eu")
    assert config_of_store(complete) == complete


@pytest.mark.parametrize("field", ["durability", "codec"])
def test_values_of_later_versions_are_refused(field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{field} 99 is not known"):
        checked_config(config(**{field: 99}))


@pytest.mark.parametrize("field", ["retention_ms", "retention_bytes"])
def test_retention_by_age_and_size_is_limited_to_signed_64_bits(field: str) -> None:
    for value in (0, 1, RETENTION_MAX):
        assert getattr(checked_config(config(**{field: value})), field) == value
    with pytest.raises(InvalidArgument, match=f"{field} must be between 0 and {RETENTION_MAX}, not {1 << 63}"):
        checked_config(config(**{field: 1 << 63}))


def test_retention_can_wait_for_64_consumer_groups_with_long_names() -> None:
    names = [f"{number:02}".ljust(NAME_CHARS_MAX, "x") for number in range(RETENTION_CONSUMER_GROUPS_MAX)]
    assert list(checked_config(config(retention_consumer_groups=names)).retention_consumer_groups) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a", ""], "a consumer group cannot be called ''"),
        (["a b"], "a consumer group cannot be called 'a b'"),
        (["x" * (NAME_CHARS_MAX + 1)], "a name has 1 to 249 letters"),
        (["a", "b", "a"], "names 'a' 2 times"),
        ([str(number) for number in range(RETENTION_CONSUMER_GROUPS_MAX + 1)], "65 consumer groups .* the limit is 64"),
    ],
)
def test_invalid_lists_of_consumer_groups_are_refused(names: list[str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        checked_config(config(retention_consumer_groups=names))


def test_retention_by_consumption_needs_consumer_groups() -> None:
    assert checked_config(config(retention_consumed=True, retention_consumer_groups=["a"])).retention_consumed
    with pytest.raises(InvalidArgument, match="needs retention_consumer_groups"):
        checked_config(config(retention_consumed=True))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"durability": common_pb2.DURABILITY_UNSPECIFIED}, {}),
        ({"durability": common_pb2.DURABILITY_LEADER}, {"durability": common_pb2.DURABILITY_LEADER}),
        ({"retention_ms": 0, "retention_bytes": 7}, {"retention_ms": 0, "retention_bytes": 7}),
        ({"virtual_logs": 3}, {"virtual_logs": 3}),
        ({"memory_priority": 9}, {"memory_priority": 9}),
        (
            {"epoch_ms": 10},
            {"epoch_ms": 10, "epoch_grace_ms": 1000, "timestamp_ahead_max_ms": 3_600_000},
        ),
        (
            {"epoch_ms": 10, "punctuation": 1, "epoch_grace_ms": 5, "timestamp_ahead_max_ms": 0},
            {"epoch_ms": 10, "punctuation": 1, "epoch_grace_ms": 5, "timestamp_ahead_max_ms": 0},
        ),
        ({"memory_domain": "eu"}, {"memory_domain": "eu"}),
        ({"memory_domain": ""}, {"memory_domain": "default"}),
        ({"memory_priority": 0, "replication_priority": 1}, {"memory_priority": 0, "replication_priority": 1}),
        ({"durability": common_pb2.DURABILITY_REPLICATED}, {"durability": common_pb2.DURABILITY_REPLICATED}),
        ({"retention_consumer_groups": ConsumerGroupNames(names=["b"])}, {"retention_consumer_groups": ["b"]}),
        (
            {"retention_consumer_groups": ConsumerGroupNames(), "retention_consumed": False},
            {"retention_consumer_groups": [], "retention_consumed": False},
        ),
    ],
)
def test_an_alteration_changes_only_the_fields_that_are_set(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    before: dict[str, Any] = {
        "streamlets": 4,
        "replication": 2,
        "virtual_logs": 2,
        "memory_priority": 4,
        "memory_domain": "us",
        "durability": common_pb2.DURABILITY_PERSISTED,
        "retention_ms": 5,
        "retention_consumer_groups": ["a"],
        "retention_consumed": True,
    }
    given_config = config(**before)

    altered = altered_config(given_config, AlterStreamRequest(name="s", **changes))

    assert altered == config(**before | expected)
    assert given_config == config(**before)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"durability": common_pb2.DURABILITY_REPLICATED}, "needs replication"),
        ({"virtual_logs": 2}, "virtual_logs must be between 1 and 1, not 2"),
        ({"memory_priority": 10}, "memory_priority must be between 0 and 9, not 10"),
        ({"epoch_ms": 1 << 60}, "epoch_ms must be between 0 and"),
        ({"epoch_ms": 1, "epoch_grace_ms": 0}, "epoch_grace_ms must be between 1 and 3600000, not 0"),
        ({"epoch_ms": 1, "timestamp_ahead_max_ms": 1 << 60}, "timestamp_ahead_max_ms must be between 0 and"),
        ({"epoch_ms": 1, "punctuation": 7}, "punctuation 7 is not known to this version, which knows clock, producers"),
        ({"memory_domain": "a/b"}, "a memory domain cannot be called 'a/b'"),
        ({"memory_domain": "x" * 300}, "a memory domain cannot be called"),
        ({"replication_priority": 1 << 31}, "replication_priority must be between 0 and 9"),
        ({"retention_ms": 1 << 63}, "retention_ms must be"),
        ({"retention_consumer_groups": ConsumerGroupNames(names=["."])}, "a consumer group cannot be called"),
        ({"retention_consumed": True}, "needs retention_consumer_groups"),
    ],
)
def test_an_alteration_is_checked_like_a_new_stream(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        altered_config(config(), AlterStreamRequest(name="s", **changes))


def stream_schema(schema: pa.Schema, key: str = "", timestamp: str = "") -> common_pb2.StreamSchema:
    return common_pb2.StreamSchema(
        arrow_schema=schema_to_bytes(schema), key_column=key, timestamp_column=timestamp, schema_id=9
    )


def test_a_stream_without_a_schema_gets_the_default_one() -> None:
    schema = checked_schema(common_pb2.StreamSchema())

    assert schema_from_bytes(schema.arrow_schema) == DEFAULT_SCHEMA
    assert (schema.schema_id, schema.typed, schema.key_column, schema.timestamp_column) == (1, False, "", "")


def test_a_key_column_needs_a_schema() -> None:
    with pytest.raises(InvalidArgument, match="need a schema"):
        checked_schema(common_pb2.StreamSchema(key_column="keys"))


def test_a_stream_with_a_schema_is_typed() -> None:
    arrow = pa.schema(
        [
            pa.field("at", pa.timestamp("ns", tz="Europe/Paris")),
            pa.field("station", pa.string(), nullable=False),
            pa.field("values", pa.list_(pa.struct([("x", pa.float32())]))),
        ],
        metadata={"unit": "°C"},
    )

    schema = checked_schema(stream_schema(arrow, key="station", timestamp="at"))

    assert schema_from_bytes(schema.arrow_schema).equals(arrow, check_metadata=True)
    assert (schema.schema_id, schema.typed) == (1, True)
    assert (schema.key_column, schema.timestamp_column) == ("station", "at")


@given(st.binary(min_size=1, max_size=200))
def test_random_bytes_as_a_schema_are_refused(data: bytes) -> None:
    with pytest.raises((SchemaMismatch, InvalidArgument)):
        checked_schema(common_pb2.StreamSchema(arrow_schema=data))


def test_a_schema_with_names_that_are_not_utf_8_is_refused() -> None:
    for name, schema in (
        (b"some", pa.schema([("some", pa.int8())])),
        (b"some", pa.schema([("a", pa.list_(pa.struct([("some", pa.int8())])))])),
        (b"Europe", pa.schema([("a", pa.timestamp("s", tz="Europe/Paris"))])),
        (b"some", pa.schema([("a", pa.dictionary(pa.int8(), pa.struct([("some", pa.int8())])))])),
    ):
        data = schema_to_bytes(schema)
        assert data.count(name) == 1
        with pytest.raises(SchemaMismatch, match="not an Arrow schema: 'utf-8'"):
            checked_schema(common_pb2.StreamSchema(arrow_schema=data.replace(name, b"\xff" * len(name))))


def test_a_schema_with_types_unknown_to_arrow_is_refused() -> None:
    data = schema_to_bytes(pa.schema([("a", pa.int64())]))
    at = data.rindex((64).to_bytes(4, "little"))

    with pytest.raises(SchemaMismatch, match="Integers with more than 64 bits"):
        checked_schema(common_pb2.StreamSchema(arrow_schema=data[:at] + (128).to_bytes(4, "little") + data[at + 4 :]))


def test_a_truncated_schema_is_refused() -> None:
    data = schema_to_bytes(DEFAULT_SCHEMA)
    for length in range(1, len(data), 7):
        with pytest.raises(SchemaMismatch):
            checked_schema(common_pb2.StreamSchema(arrow_schema=data[:length]))


def test_a_schema_over_the_limit_is_refused() -> None:
    arrow = pa.schema([pa.field("a", pa.int8(), metadata={"doc": "x" * SCHEMA_BYTES_MAX})])

    with pytest.raises(InvalidArgument, match=f"the limit is {SCHEMA_BYTES_MAX}"):
        checked_schema(stream_schema(arrow))


@pytest.mark.parametrize(
    ("fields", "text"),
    [([], "no column"), ([("a", pa.int8()), ("b", pa.int8()), ("a", pa.int16())], "2 columns named 'a'")],
)
def test_a_schema_without_columns_or_with_doubled_names_is_refused(
    fields: list[tuple[str, pa.DataType]], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        checked_schema(stream_schema(pa.schema(fields)))


DICTIONARY = pa.dictionary(pa.int8(), pa.string())


@pytest.mark.parametrize(
    "data_type",
    [
        DICTIONARY,
        pa.list_(DICTIONARY),
        pa.large_list(DICTIONARY),
        pa.list_(DICTIONARY, 3),
        pa.list_view(DICTIONARY),
        pa.struct([("x", pa.struct([("y", DICTIONARY)]))]),
        pa.map_(pa.string(), DICTIONARY),
        pa.dense_union([pa.field("x", DICTIONARY)]),
        pa.run_end_encoded(pa.int32(), DICTIONARY),
    ],
    ids=str,
)
def test_dictionaries_are_refused_at_any_depth(data_type: pa.DataType) -> None:
    with pytest.raises(InvalidArgument, match="column 'd' is dictionary-encoded"):
        checked_schema(stream_schema(pa.schema([("ok", pa.int8()), ("d", data_type)])))


@pytest.mark.parametrize(
    "data_type",
    [
        pa.list_(pa.int8()),
        pa.list_(pa.int8(), 2),
        pa.list_view(pa.int8()),
        pa.map_(pa.string(), pa.int8()),
        pa.dense_union([pa.field("x", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.uuid(),
        pa.null(),
    ],
    ids=str,
)
def test_columns_can_have_other_nested_and_special_types(data_type: pa.DataType) -> None:
    assert checked_schema(stream_schema(pa.schema([("c", data_type)]))).typed


@pytest.mark.parametrize(
    "data_type",
    [
        pa.int64(),
        pa.string(),
        pa.large_binary(),
        pa.binary(16),
        pa.bool_(),
        pa.date32(),
        pa.decimal128(9, 2),
        pa.timestamp("us"),
    ],
    ids=str,
)
def test_a_key_can_have_any_type_with_exact_equality(data_type: pa.DataType) -> None:
    assert checked_schema(stream_schema(pa.schema([("k", data_type)]), key="k")).key_column == "k"


@pytest.mark.parametrize(
    "data_type",
    [pa.float64(), pa.float16(), pa.null(), pa.list_(pa.int8()), pa.struct([("x", pa.int8())])],
    ids=str,
)
def test_a_key_of_another_type_is_refused(data_type: pa.DataType) -> None:
    with pytest.raises(InvalidArgument, match="key_column 'k' has type"):
        checked_schema(stream_schema(pa.schema([("k", data_type)]), key="k"))


@pytest.mark.parametrize("data_type", [pa.int64(), pa.date32(), pa.string()], ids=str)
def test_a_timestamp_column_must_have_a_timestamp_type(data_type: pa.DataType) -> None:
    with pytest.raises(InvalidArgument, match=r"timestamp_column 't' has type \w+.*, it must be a timestamp"):
        checked_schema(stream_schema(pa.schema([("t", data_type)]), timestamp="t"))


@pytest.mark.parametrize("setting", ["key", "timestamp"])
def test_the_error_of_a_missing_key_or_timestamp_column_names_the_columns(setting: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{setting}_column 'x' is not in the schema; it has 'a', 'b'"):
        checked_schema(stream_schema(pa.schema([("a", pa.int8()), ("b", pa.int8())]), **{setting: "x"}))


COLUMNS = pa.schema([pa.field("at", pa.timestamp("us")), pa.field("fare", pa.int32(), nullable=False)])


def typed_stream(*versions: pa.Schema) -> common_pb2.StreamInfo:
    return common_pb2.StreamInfo(
        name="trips",
        schemas=[
            common_pb2.StreamSchema(
                schema_id=number, arrow_schema=schema_to_bytes(each), timestamp_column="at", typed=True
            )
            for number, each in enumerate(versions, 1)
        ],
    )


def test_added_columns_come_after_the_existing_ones_in_a_new_version() -> None:
    (version,) = extended_schema(
        typed_stream(COLUMNS), schema_to_bytes(pa.schema([("tip", pa.float64())])), lambda last: last + 1
    )

    assert schema_from_bytes(version.arrow_schema) == pa.schema([*COLUMNS, ("tip", pa.float64())])
    assert (version.schema_id, version.timestamp_column, version.typed) == (2, "at", True)


def test_existing_columns_of_the_same_type_are_not_added_again() -> None:
    added = schema_to_bytes(pa.schema([("tip", pa.float64()), pa.field("fare", pa.int32())]))
    (version,) = extended_schema(typed_stream(COLUMNS), added, lambda last: last + 1)
    stream = typed_stream(COLUMNS)
    stream.schemas.append(version)

    assert schema_from_bytes(version.arrow_schema).names == ["at", "fare", "tip"]
    assert extended_schema(stream, added, lambda last: last + 1) == []


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (pa.schema([pa.field("tip", pa.float64(), nullable=False)]), "'tip' cannot be added: it must be nullable"),
        (pa.schema([]), "has no column"),
        (pa.schema([("tip", pa.int8()), ("tip", pa.int8())]), "2 columns named 'tip'"),
        (pa.schema([("tip", pa.dictionary(pa.int8(), pa.string()))]), "dictionary-encoded"),
        (pa.schema([("x" * SCHEMA_BYTES_MAX, pa.int8())]), f"the limit is {SCHEMA_BYTES_MAX}"),
    ],
)
def test_columns_that_cannot_be_added_are_refused(added: pa.Schema, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        extended_schema(typed_stream(COLUMNS), schema_to_bytes(added), lambda last: last + 1)


def test_a_column_cannot_change_its_type() -> None:
    with pytest.raises(SchemaMismatch, match="'fare' already, which is int32, not int64"):
        extended_schema(
            typed_stream(COLUMNS), schema_to_bytes(pa.schema([("fare", pa.int64())])), lambda last: last + 1
        )


def test_column_names_in_settings_count_towards_the_size_of_each_version() -> None:
    name = "x" * (SCHEMA_BYTES_MAX // 4)
    schema = pa.schema([(name, pa.timestamp("us"))])
    with pytest.raises(InvalidArgument, match=f"the limit is {SCHEMA_BYTES_MAX}"):
        checked_schema(stream_schema(pa.schema([("k" + 2 * name, pa.int8())]), key="k" + 2 * name))
    stream = common_pb2.StreamInfo(name="s", schemas=[checked_schema(stream_schema(schema, timestamp=name))])
    with pytest.raises(InvalidArgument, match="the 2 versions of the schema"):
        extended_schema(stream, schema_to_bytes(pa.schema([("tip", pa.float64())])), lambda last: last + 1)


def test_the_default_schema_cannot_be_extended() -> None:
    stream = common_pb2.StreamInfo(name="s", schemas=[checked_schema(common_pb2.StreamSchema())])
    with pytest.raises(InvalidArgument, match="default schema, which takes no further columns"):
        extended_schema(stream, schema_to_bytes(pa.schema([("tip", pa.float64())])), lambda last: last + 1)
