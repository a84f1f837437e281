"""The data source: what ``format("kera")`` means to Spark.

Spark makes it in a short-lived call per DataFrame, pickles it, and makes readers of the copy elsewhere. It keeps only
the options' text: connections belong to the processes that use them (``portal``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from kera.spark_connector.batch import KeraBatchReader
from kera.spark_connector.columns import columns_of
from kera.spark_connector.options import parse_options
from kera.spark_connector.portal import Portal
from kera.spark_connector.streaming import KeraStreamReader

if TYPE_CHECKING:
    from kera.client import Client, StreamDescription

LOOK_UP_TIMEOUT_MS = 5_000
"""How long `load` goes on trying to reach the coordinator: somebody waits who may have mistyped the address."""


class KeraDataSource(DataSource):
    """Streams of KerA. Options: docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "kera"

    def schema(self) -> StructType:
        """The stream's own columns, or the columns of a record; asked of the cluster."""
        options = parse_options(self.options)

        async def describe(client: Client) -> StreamDescription:
            return await client.admin.describe_stream(options.stream)

        with contextlib.closing(Portal(options.bootstrap, retry_timeout_ms=LOOK_UP_TIMEOUT_MS)) as portal:
            description = portal.call(describe)
        return columns_of(description.schema, typed=description.typed)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``. `schema` may be some of the columns: the user's ``.schema(...)``."""
        return KeraBatchReader(parse_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For ``spark.readStream``."""
        return KeraStreamReader(self.options, schema)
