"""All that a consumer has left, as a table or a data frame: of columns as they are stored, or of deserialized values.

With deserializers the columns of the stream stay as they are, but for `value`, which has what the deserializer made; a
key deserializer adds `key`, the primary key, before `keys`. Records that cannot be read are left out or raise, as in a
loop over records (the setting ``undecodable_records``).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
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
    """Rows of a stream, once as columns and once as records."""

    batch: pa.RecordBatch
    records: Iterator[Record]
    stream: StreamDescription


class ReadsTables(ABC):
    """The table methods of consumers with an end."""

    _make_decoding: MakeDecoding | None

    @abstractmethod
    def _all_left(self) -> AsyncGenerator[Rows, None]:
        """All that is left up to the end, in memory of its own; the first rows are none, of the stream's columns.

        A caller that does not come to the end has got nothing, as far as `positions` and commits say. Raises
        `InvalidArgument` where that is not a table.
        """

    async def to_arrow(self) -> pa.Table:
        """All that is left up to `end`, as a table of the stream's columns, in memory of its own.

        Raises `InvalidArgument` for a consumer without an `end`, or of streams that make no table (a plain consumer of
        several, an ordered one of streams with different columns), and what `batches` does; then nothing was given out.
        """
        async with contextlib.aclosing(self._all_left()) as left:
            parts = [pa.Table.from_batches([rows.batch]) async for rows in left]
        return pa.concat_tables(parts, promote_options="default")

    async def to_pandas(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> pandas.DataFrame:
        """The same as a data frame of pandas, which has to be installed.

        With deserializers, which are those of `Client.consumer`, the column `value` has what they make of the bytes,
        and a column `key` the primary key. Raises `CannotDecode`, too (the setting ``undecodable_records``).
        """
        decoded = await self._decoded(deserializer, key_deserializer)
        return (await self.to_arrow()).to_pandas() if decoded is None else decoded.to_pandas()

    async def to_polars(
        self, *, deserializer: DeserializerLike = None, key_deserializer: DeserializerLike = None
    ) -> polars.DataFrame:
        """The same as a data frame of polars, which has to be installed. Deserializers are as those of `to_pandas`."""
        import polars  # noqa: PLC0415 - only who asks for it needs it

        decoded = await self._decoded(deserializer, key_deserializer)
        return polars.DataFrame(await self.to_arrow()) if decoded is None else decoded.to_polars()

    async def _decoded(self, deserializer: DeserializerLike, key_deserializer: DeserializerLike) -> DecodedTable | None:
        """None without deserializers."""
        decoding = None if self._make_decoding is None else self._make_decoding(deserializer, key_deserializer)
        if decoding is None:
            return None
        decoded = DecodedTable(decoding)
        async with contextlib.aclosing(self._all_left()) as left:
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

        Raises `CannotDecode`, what looking up schemas raises, and `InvalidArgument` for a stream with columns.
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
