"""Times of Parquet's deprecated type INT96, which Hive, Impala and older versions of Spark write.

The range of INT96 exceeds that of 64-bit nanoseconds or microseconds. For times out of range Arrow returns other times,
without an error. So each column is read in both units: a time that fits both is the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kera.core.errors import SchemaMismatch

_US = pa.timestamp("us")


class OldTimes:
    """The columns of type INT96 of one file."""

    def __init__(self, path: str, columns: Any, schema: pa.Schema) -> None:
        """`columns`: the file's columns in Parquet's schema. `schema`: the stream's schema."""
        self._path = path
        self._names = [column.name for column in columns if column.physical_type == "INT96"]
        nested = [column.path for column in columns if column.physical_type == "INT96" and column.path != column.name]
        if nested:
            raise SchemaMismatch(f"{nested[0]} is a nested column of type INT96: write it as TIMESTAMP")
        self._in_us = {name for name in self._names if name in schema.names and schema.field(name).type == _US}

    def checked(self, batches: Iterator[pa.RecordBatch], group: int, rows: int, first: int) -> Iterator[pa.RecordBatch]:
        """Yield the `batches` of a row group, of `rows` rows each, after the `first` rows of the file.

        Raises `SchemaMismatch` for a time that the stream cannot hold.
        """
        if not self._names:
            yield from batches
            return
        with pq.ParquetFile(self._path, coerce_int96_timestamp_unit="us") as file:
            others = file.iter_batches(batch_size=rows, row_groups=[group], columns=self._names)
            for batch, other in zip(batches, others, strict=True):
                yield self._checked(batch, other, first)
                first += batch.num_rows

    def _checked(self, batch: pa.RecordBatch, in_us: pa.RecordBatch, first: int) -> pa.RecordBatch:
        for name in self._names:
            ns, us = batch.column(name), in_us.column(name)
            floor = pc.floor_temporal(ns, 1, unit="microsecond").cast(_US)
            same = pc.equal(floor, us)
            if name in self._in_us:  # times out of the range of nanoseconds have no digits below a microsecond
                wrong = pc.and_(same, pc.not_equal(ns, us.cast(ns.type, safe=False)))
                batch = batch.set_column(batch.schema.get_field_index(name), pa.field(name, _US), us)
            else:
                wrong = pc.invert(same)
            at = wrong.index(True).as_py()
            if at >= 0:
                value, other = (f"{ns[at].value} ns", ns) if name in self._in_us else (f"{us[at].value} us", us)
                raise SchemaMismatch(
                    f"column {name!r} of row {first + at + 1} has a time of {value} since 1970, which"
                    f" {batch.column(name).type} cannot hold: create the stream with {other.type} for it",
                    column=name,
                )
        return batch
