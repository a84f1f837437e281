"""Payloads of both versions of the format: the check by a broker, and opening them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from kera.core.errors import CorruptChunk
from kera.core.format.chunk import (
    ARROW_VERSION,
    HEADER_BYTES,
    LEAN_VERSION,
    Codec,
    encode_chunk,
    encode_payload,
    verify_chunk,
)
from kera.core.format.lean import known_of
from kera.core.format.payload import check_payload, encode_lean, open_payload
from kera.core.format.schema import DEFAULT_SCHEMA

pytestmark = pytest.mark.usefixtures("either_core")

BATCH = pa.RecordBatch.from_pylist(
    [{"timestamp": at, "keys": [b"k"], "value": b"v" * at} for at in range(5)], DEFAULT_SCHEMA
)
VERSIONS = pytest.mark.parametrize("version", [ARROW_VERSION, LEAN_VERSION])


def chunk(version: int, codec: Codec = Codec.NONE, records: int = BATCH.num_rows) -> memoryview:
    payload = encode_payload(BATCH, codec) if version == ARROW_VERSION else encode_lean(BATCH, codec)
    made = encode_chunk(
        payload,
        record_count=records,
        stream_id=1,
        streamlet_id=0,
        schema_id=1,
        producer_id=1,
        producer_epoch=0,
        sequence=7,
        created_us=1,
        min_timestamp_us=1,
        max_timestamp_us=1,
        codec=codec,
        version=version,
    )
    return memoryview(made.to_bytes())


@VERSIONS
@pytest.mark.parametrize("codec", list(Codec))
def test_a_chunk_of_either_version_passes_the_check_and_opens(version: int, codec: Codec) -> None:
    data = chunk(version, codec)
    header = verify_chunk(data)
    assert header.version == version
    check_payload(data, 0, header, known_of(DEFAULT_SCHEMA))
    payload = pa.py_buffer(data).slice(HEADER_BYTES, header.payload_bytes)
    assert open_payload(payload, DEFAULT_SCHEMA, header).equals(BATCH)
    assert open_payload(payload.to_pybytes(), DEFAULT_SCHEMA, header, trusted=True).equals(BATCH)


@VERSIONS
@pytest.mark.parametrize("records", [4, 6, 1 << 31])
def test_a_wrong_number_of_records_is_refused(version: int, records: int) -> None:
    data = chunk(version, records=records)
    header = verify_chunk(data)
    with pytest.raises(CorruptChunk, match="sequence 7") as caught:
        check_payload(data, 0, header, known_of(DEFAULT_SCHEMA))
    assert caught.value.attributes["stream_id"] == 1
    with pytest.raises(CorruptChunk):
        open_payload(bytes(data[HEADER_BYTES:][: header.payload_bytes]), DEFAULT_SCHEMA, header)


def test_a_batch_of_a_type_that_is_not_lean_has_no_lean_payload() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["a"], pa.string_view())], ["a"])
    assert encode_lean(batch, Codec.NONE) is None


def test_an_unknown_codec_is_refused() -> None:
    data = chunk(LEAN_VERSION)
    header = verify_chunk(data)._replace(codec=3)
    with pytest.raises(CorruptChunk, match="codec 3, which this program does not know"):
        open_payload(bytes(data[HEADER_BYTES:][: header.payload_bytes]), DEFAULT_SCHEMA, header)
