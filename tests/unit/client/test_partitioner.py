"""Partitioners: which streamlet a record goes to."""

import datetime
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from kera.client.producing.encoding.partitioner import (
    CRC32C,
    PARTITIONERS,
    Partitioner,
    partition_by_key,
    primary_keys,
    streamlet_of,
)
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

KEYS = DEFAULT_SCHEMA.field("keys").type
KEYLESS = 2


def split(keys: pa.Array, streamlets: int = 4, partitioner: Partitioner = CRC32C) -> dict[int, list[int]]:
    """Row numbers by streamlet."""
    batch = pa.record_batch({"row": pa.array(range(len(keys)))})
    parts = partition_by_key(batch, keys, streamlets, KEYLESS, partitioner).parts()
    assert len({streamlet for streamlet, _ in parts}) == len(parts)
    return {streamlet: rows.column("row").to_pylist() for streamlet, rows in parts}


def test_a_streamlet_is_the_crc32c_of_the_key_modulo_the_streamlets() -> None:
    assert [streamlet_of(key, 8) for key in (b"", b"a", b"key", b"\0\xff")] == [
        crc32c(key) % 8 for key in (b"", b"a", b"key", b"\0\xff")
    ]
    assert [crc32c(b"123456789"), streamlet_of(b"123456789", 1000)] == [0xE3069283, 0xE3069283 % 1000]


def test_partitioned_rows_keep_their_order_and_none_is_lost() -> None:
    keys = [b"%d" % (number % 7) for number in range(1000)]
    parts = split(pa.array(keys))
    assert all(rows == sorted(rows) for rows in parts.values())
    assert sorted(row for rows in parts.values() for row in rows) == list(range(1000))
    assert all(streamlet_of(keys[row], 4) == streamlet for streamlet, rows in parts.items() for row in rows)


def test_rows_without_a_key_go_to_one_streamlet() -> None:
    assert split(pa.array([None, None], pa.binary())) == {KEYLESS: [0, 1]}
    keys = pa.array([b"a", None, b"b", None], pa.binary())
    assert {1, 3} <= set(split(keys)[KEYLESS])


def test_a_single_streamlet_takes_all_rows() -> None:
    assert split(pa.array([None, b"a"], pa.binary()), streamlets=1) == {0: [0, 1]}


@pytest.mark.parametrize(
    ("kind", "value", "as_bytes"),
    [
        (pa.binary(), b"\xff\0", b"\xff\0"),
        (pa.large_binary(), b"a", b"a"),
        (pa.binary(2), b"ab", b"ab"),
        (pa.string(), "é", "é".encode()),
        (pa.large_string(), "a", b"a"),
        (pa.int64(), -12, b"-12"),
        (pa.uint8(), 12, b"12"),
        (pa.bool_(), True, b"True"),
        (pa.date32(), datetime.date(2026, 1, 2), b"2026-01-02"),
    ],
)
def test_a_key_of_any_type_is_hashed_as_its_text(kind: pa.DataType, value: Any, as_bytes: bytes) -> None:
    keys = pa.array([value], kind)
    assert split(keys, 1000) == {streamlet_of(as_bytes, 1000): [0]}


def test_a_nested_key_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="list"):
        split(pa.array([[b"a"]], KEYS))


def test_a_sliced_column_is_partitioned_like_a_whole_one() -> None:
    keys = pa.array([b"x", b"a", b"b", None, b"a"], pa.binary())
    assert split(keys.slice(1)) == split(pa.array([b"a", b"b", None, b"a"], pa.binary()))


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary(), pa.int64()])
@pytest.mark.parametrize("length", [0, 3])
def test_a_column_of_nulls_goes_to_one_streamlet_and_an_empty_one_to_none(kind: pa.DataType, length: int) -> None:
    empty = partition_by_key(pa.record_batch({"row": pa.array(range(length))}), pa.nulls(length, kind), 4, KEYLESS)
    assert [*map(int, empty.streamlets)] == [KEYLESS] * (length > 0)
    assert [*empty.ends] == [3] * (length > 0)


def test_keys_reach_their_streamlets_among_billions() -> None:
    keys = [b"%d" % number for number in range(300)]
    for streamlets in (1 << 16, (1 << 16) + 1, 1 << 31):
        assert split(pa.array(keys), streamlets) == {
            streamlet_of(key, streamlets): [row] for row, key in enumerate(keys)
        }


@pytest.mark.parametrize(
    ("lists", "first"),
    [
        ([], []),
        ([[b"a"], [b"b", b"c"]], [b"a", b"b"]),
        ([None, [], [None], [None, b"x"], [b""]], [None, None, None, None, b""]),
        ([None, None], [None, None]),
        ([[], [b"a"], None, [b"b"]], [None, b"a", None, b"b"]),
    ],
)
def test_the_primary_key_is_the_first_of_the_list(lists: list[Any], first: list[bytes | None]) -> None:
    keys = pa.array(lists, KEYS)
    assert primary_keys(keys).to_pylist() == first
    padded = pa.array([[b"before"], *lists, [b"after"]], KEYS)
    assert primary_keys(padded.slice(1, len(lists))).to_pylist() == first
    assert primary_keys(pa.chunked_array([keys, keys])).to_pylist() == first * 2


# --- the partitioners of Kafka's clients -------------------------------------------------------------------

MURMUR2, CONSISTENT = PARTITIONERS["murmur2_random"], PARTITIONERS["consistent_random"]


def test_murmur2_random_places_keys_as_kafka_s_java_client() -> None:
    """The sign bit is masked, not negated: ``Utils.toPositive(Utils.murmur2(key)) % partitions``."""
    signed = {b"21": -973932308, b"foobar": -790332482, b"abc": 479470107}
    for partitions in (1, 7, 100):
        expected = {key: (number & 0x7FFFFFFF) % partitions for key, number in signed.items()}
        assert {key: streamlet_of(key, partitions, MURMUR2) for key in signed} == expected


def test_consistent_random_places_keys_by_their_crc32() -> None:
    assert streamlet_of(b"123456789", 1000, CONSISTENT) == 0xCBF43926 % 1000


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()])
@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
def test_a_column_is_partitioned_like_its_single_keys(partitioner: Partitioner, kind: pa.DataType) -> None:
    texts = [None if number % 7 == 3 else "" if number % 7 == 5 else f"key {number}" for number in range(500)]
    column = pa.array([None if text is None else text.encode() for text in texts], pa.binary()).cast(kind)
    expected: dict[int, list[int]] = {}
    for row, text in enumerate(texts[10:]):
        key = None if text is None else text.encode()
        decides = key is not None and partitioner.decides(key)
        streamlet = streamlet_of(key or b"", 5, partitioner) if decides else KEYLESS
        expected.setdefault(streamlet, []).append(row)
    assert split(column.slice(10), 5, partitioner) == expected


def test_an_empty_key_decides_unless_the_partitioner_takes_it_as_none() -> None:
    empty = pa.array([b"", b""], pa.binary())
    assert split(empty, 5, CRC32C) == {0: [0, 1]}
    assert split(empty, 5, MURMUR2) == {0x106E08D9 % 5: [0, 1]}
    assert split(empty, 5, CONSISTENT) == {KEYLESS: [0, 1]}
    assert KEYLESS != 0x106E08D9 % 5


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
def test_every_partitioner_hashes_a_number_as_its_text(partitioner: Partitioner) -> None:
    assert split(pa.array([12, None], pa.int64()), 1000, partitioner) == {
        streamlet_of(b"12", 1000, partitioner): [0],
        KEYLESS: [1],
    }
