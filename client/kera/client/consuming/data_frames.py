"""Data frames of records whose values and keys were deserialized.

The columns of the stream stay as they are, but for `value`, which has what the deserializer made; a key deserializer
adds `key`, the primary key, before `keys`. Records that cannot be read are left out or raise, as in a loop over records
(the setting ``undecodable_records``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kera.client.consuming.decoding import Decoding
from kera.client.types import Record, StreamDescription
from kera.core.errors import InvalidArgument
from kera.core.schema import DEFAULT_SCHEMA

if TYPE_CHECKING:
    import pandas
    import polars


class DecodedTable:
    """Rows of a stream, with columns of Python values. Batches are added in the order of the rows."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._batches = [pa.RecordBatch.from_pylist([], schema=DEFAULT_SCHEMA)]
        self._columns: dict[str, list[Any]] = {name: [] for name in ("value", "key") if decoding.reads(name)}
        """Of Python values, by name."""

    async def add(self, batch: pa.RecordBatch, records: Iterable[Record], stream: StreamDescription) -> None:
        """Rows of a stream, once as columns and once as records.

        Raises `CannotDecode`, what looking up schemas raises, and `InvalidArgument` for a stream with columns.
        """
        if stream.typed:
            raise InvalidArgument(
                f"stream {stream.name!r} has columns, which a data frame gets as they are: leave the deserializer out",
                stream=stream.name,
            )
        await self._decoding.learn(batch, stream)
        read = [self._decoding.decoded(record) for record in records]
        if None in read:
            batch = batch.filter(pa.array([record is not None for record in read]))
        self._batches.append(batch)
        for name, column in self._columns.items():
            column += [getattr(record, name) for record in read if record is not None]

    def _table(self) -> pa.Table:
        """The columns that are Arrow's, in memory of its own."""
        table = pa.Table.from_batches(self._batches)
        return table.drop_columns([name for name in self._columns if name in table.column_names])

    def to_pandas(self) -> pandas.DataFrame:
        """As a data frame of pandas; a column of values that differ in their types has the type object."""
        import pandas  # noqa: PLC0415 - only who asks for it needs it

        frame = self._table().to_pandas()
        for name, values in self._columns.items():
            # Not guessed from the values: that makes floats of whole numbers beside a None.
            column = pandas.Series(values, dtype=object, index=frame.index).infer_objects()
            frame.insert(_place(name, list(frame.columns)), name, column)
        return frame

    def to_polars(self) -> polars.DataFrame:
        """As a data frame of polars; a column of values that no type of Arrow has is one of objects."""
        import polars  # noqa: PLC0415 - only who asks for it needs it

        frame = polars.DataFrame(self._table())
        for name, values in self._columns.items():
            try:
                column = polars.Series(name, pa.array(values))
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
                column = polars.Series(name, values, dtype=polars.Object)
            frame.insert_column(_place(name, frame.columns), column)
        return frame


def _place(name: str, columns: list[str]) -> int:
    """Where a column goes: `key` before `keys`, `value` behind it."""
    return columns.index("keys") + (name == "value")
