"""Batches without rows, which readers put in place of a chunk that they leave out."""

import pyarrow as pa
import pytest

from kera.core.format.arrow_types import empty_batch

UNION = pa.dense_union([pa.field("number", pa.int64()), pa.field("text", pa.string())])


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.map_(pa.string(), pa.int8()),
        pa.list_view(pa.string_view()),
        pa.dictionary(pa.int8(), pa.string()),
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.list_(pa.int64(), 3),
        UNION,
        pa.list_(UNION),
        pa.struct([("union", UNION)]),
    ],
    ids=str,
)
def test_each_type_has_a_valid_empty_batch(kind: pa.DataType) -> None:
    found = empty_batch(pa.schema([("column", kind)]))
    found.validate(full=True)
    assert (found.num_rows, found.schema.field("column").type) == (0, kind)
