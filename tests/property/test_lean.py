"""The lean payload over arbitrary batches and bytes; see `kera.core.format.lean.layout` for its promises."""

import contextlib

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kera.core.errors import CorruptChunk
from kera.core.format import lean
from kera.core.format.lean.layout import read_layout
from tests.chaos.lean_structures import structured
from tests.property.batches import BATCHES, BATCHES_AND_SLICES

pytestmark = pytest.mark.usefixtures("either_core")

BYTES_MAX = 1 << 27
CODECS = st.sampled_from((None, "lz4", "zstd"))


def decoded(payload: bytes, batch: pa.RecordBatch, codec: str | None, *, trusted: bool = False) -> pa.RecordBatch:
    return lean.decode(
        pa.py_buffer(payload),
        batch.schema,
        records=batch.num_rows,
        codec=codec,
        bytes_max=BYTES_MAX,
        trusted=trusted,
    )


def checked(payload: bytes, batch: pa.RecordBatch, codec: str | None) -> None:
    known = lean.known_of(batch.schema)
    lean.check(memoryview(payload), known, batch.num_rows, compressed=codec is not None, bytes_max=BYTES_MAX)


@given(BATCHES_AND_SLICES, CODECS)
def test_an_encoded_batch_is_decoded_again(batch: pa.RecordBatch, codec: str | None) -> None:
    assume(lean.is_lean(batch.schema))
    payload = lean.encode(batch, codec, bytes_max=BYTES_MAX)
    assert payload is not None
    checked(payload, batch, codec)
    for trusted in (False, True):
        found = decoded(payload, batch, codec, trusted=trusted)
        found.validate(full=True)
        assert found.equals(batch)


@given(st.data(), BATCHES, CODECS)
def test_changed_bytes_give_valid_columns_or_are_refused(
    data: st.DataObject, batch: pa.RecordBatch, codec: str | None
) -> None:
    assume(lean.is_lean(batch.schema))
    payload = bytearray(lean.encode(batch, codec, bytes_max=BYTES_MAX) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(payload), 64) - 1) | st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)) | st.integers(0, 255))
    del payload[data.draw(st.just(len(payload)) | st.integers(0, len(payload))) :]
    try:
        checked(bytes(payload), batch, codec)
    except CorruptChunk:
        with pytest.raises(CorruptChunk):
            decoded(bytes(payload), batch, codec)
        return
    try:
        found = decoded(bytes(payload), batch, codec)
    except CorruptChunk:
        return  # of another schema, or with an invalid compressed body
    found.validate(full=True)
    with contextlib.suppress(OverflowError, ValueError):  # Python cannot represent every time of Arrow
        found.to_pylist()


@given(st.data(), BATCHES, CODECS)
def test_a_payload_of_random_structure_is_valid_or_refused(
    data: st.DataObject, batch: pa.RecordBatch, codec: str | None
) -> None:
    assume(lean.is_lean(batch.schema))
    random_ = data.draw(st.randoms(use_true_random=False))
    payload = structured(batch.schema, batch.num_rows, codec, random_)
    for trusted in (False, True):
        with contextlib.suppress(CorruptChunk):
            found = decoded(payload, batch, codec, trusted=trusted)
            assert trusted or found.validate(full=True) is None
    try:
        checked(payload, batch, codec)
    except CorruptChunk:
        with pytest.raises(CorruptChunk):
            decoded(payload, batch, codec)


@given(BATCHES, st.binary(max_size=200), st.integers(0, 1 << 33), st.booleans())
def test_any_bytes_are_a_layout_or_refused(
    batch: pa.RecordBatch, payload: bytes, records: int, compressed: bool
) -> None:
    known = lean.known_of(batch.schema)
    try:
        lean.check(memoryview(payload), known, records, compressed=compressed, bytes_max=BYTES_MAX)
    except CorruptChunk:
        return
    layout = read_layout(payload, records, compressed=compressed, body_bytes_max=BYTES_MAX)
    assert layout.written_bytes <= max(BYTES_MAX, 8 * layout.body_bytes)
    assert compressed or layout.body_at + layout.body_bytes == len(payload)
