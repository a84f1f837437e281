"""The remaining records of a consumer as a table or a data frame: with stored columns, or with deserialized values.

With deserializers, the columns of the stream stay as they are, except for `value`, which has the deserialized values; a
key deserializer adds `key`, the primary key, before `keys`. Undecodable records are left out or raise an error, as in a
loop over records (the setting ``undecodable_records``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from kera.client.consuming.delivering.decoding import Decoding, MakeDecoding
from kera.client.serializers.choosing import DeserializerLike
from kera.client.types import Record, StreamDescription
from kera.core.errors import InvalidArgument
from kera.core.format.schema import DEFAULT_SCHEMA

if TYPE_CHECKING:
    import pandas
    import polars


class Rows(NamedTuple):
    """Rows of a stream, both as columns and as records."""

    batch: pa.RecordBatch
    records: Iterator[Record]
    stream: StreamDescription


class ReadsTables(ABC):
    """The table methods of consumers with an end."""

    _make_decoding: MakeDecoding | None

    @abstractmethod
    def _all_left(self) -> AbstractAsyncContextManager[AsyncIterator[Rows]]:
        """Return a context that gives all rows up to the end, copied.

        The first item is an empty batch with the stream's columns. If the context ends with an error, nothing was
        delivered: `positions` and commits are as before, and the next call for more returns the same rows. Raises
        `InvalidArgument` if the rows do not make a table.
        """

    async def to_arrow(self) -> pa.Table:
        """Return the remaining rows up to `end`, as a table of the stream's columns, in its own memory.

        Raises `InvalidArgument` for a consumer without an `end`, or of streams that make no table (a plain consumer of
        several, an ordered one of streams with different columns), and the errors of `batches`; then nothing was
        delivered.
        """
        async with self._all_left() as left:
            return await _table_of(left)

    async def to_pandas(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> pandas.DataFrame:
        """Like `to_arrow`, but return a data frame of pandas, which has to be installed.

        With deserializers, of the kinds that `Client.consumer` takes, the column `value` has the deserialized values,
        and a column `key` the primary key. Also raises `CannotDecode` (the setting ``undecodable_records``).
        """
        decoding = self._decoding_of(deserializer, key_deserializer)
        async with self._all_left() as left:
            if decoding is None:
                return (await _table_of(left)).to_pandas()
            return (await _decoded(left, decoding)).to_pandas()

    async def to_polars(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> polars.DataFrame:
        """Like `to_pandas`, but return a data frame of polars, which has to be installed."""
        import polars  # noqa: PLC0415 - an optional dependency, only needed here

        decoding = self._decoding_of(deserializer, key_deserializer)
        async with self._all_left() as left:
            if decoding is None:
                return polars.DataFrame(await _table_of(left))
            return (await _decoded(left, decoding)).to_polars()

    def _decoding_of(self, deserializer: DeserializerLike, key_deserializer: DeserializerLike) -> Decoding | None:
        """Return the decoding by these deserializers; None without them."""
        return None if self._make_decoding is None else self._make_decoding(deserializer, key_deserializer)


async def _table_of(left: AsyncIterator[Rows]) -> pa.Table:
    parts = [pa.Table.from_batches([rows.batch]) async for rows in left]
    return pa.concat_tables(parts, promote_options="default")


async def _decoded(left: AsyncIterator[Rows], decoding: Decoding) -> DecodedTable:
    decoded = DecodedTable(decoding)
    async for rows in left:
        await decoded.add(rows)
    return decoded


class DecodedTable:
    """Rows with columns of Python values. They are added in their order."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._batches = [pa.RecordBatch.from_pylist([], schema=DEFAULT_SCHEMA)]
        self._columns: dict[str, list[Any]] = {name: [] for name in ("value", "key") if decoding.reads(name)}
        """Python values by name of their column."""

    async def add(self, rows: Rows) -> None:
        """Deserialize rows.

        Raises `CannotDecode`, the errors of looking up schemas, and `InvalidArgument` for a stream with columns.
        """
        batch, records, stream = rows
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
        """Return the columns that stay as Arrow columns."""
        table = pa.Table.from_batches(self._batches)
        return table.drop_columns([name for name in self._columns if name in table.column_names])

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame of pandas; a column of values of different types has the type object."""
        import pandas  # noqa: PLC0415 - an optional dependency, only needed here

        frame = self._table().to_pandas()
        for name, values in self._columns.items():
            # Do not let pandas infer the type at once: it turns whole numbers next to a None into floats.
            column = pandas.Series(values, dtype=object, index=frame.index).infer_objects()
            frame.insert(_place(name, list(frame.columns)), name, column)
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Return a data frame of polars; a column of values without an Arrow type has the type Object."""
        import polars  # noqa: PLC0415 - an optional dependency, only needed here

        frame = polars.DataFrame(self._table())
        for name, values in self._columns.items():
            try:
                column = polars.Series(name, pa.array(values))
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
                column = polars.Series(name, values, dtype=polars.Object)
            frame.insert_column(_place(name, frame.columns), column)
        return frame


def _place(name: str, columns: list[str]) -> int:
    """Return the index of a new column: `key` goes before `keys`, `value` behind it."""
    return columns.index("keys") + (name == "value")
