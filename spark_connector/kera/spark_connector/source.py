"""The data source that ``format("kera")`` stands for.

Spark makes it in a short-lived call per DataFrame, pickles it, and asks the copy for readers elsewhere. It keeps only
the options' text: connections belong to the processes that use them (``portal``).
"""

from __future__ import annotations

import contextlib
import logging

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from kera.core.errors import InvalidArgument
from kera.spark_connector.columns import columns_of_all, with_epoch
from kera.spark_connector.options.engines import LOAD_ENGINE
from kera.spark_connector.options.names import ENGINE, HEADERS
from kera.spark_connector.options.reading import ReadOptions, parse_read_options
from kera.spark_connector.portal import Portal
from kera.spark_connector.reading.batch import KeraBatchReader
from kera.spark_connector.reading.metadata import COLUMNS, KeraMetadataReader
from kera.spark_connector.reading.streaming import KeraStreamReader
from kera.spark_connector.reading.streaming_untold import UntoldStreamReader
from kera.spark_connector.reading.survey import descriptions
from kera.spark_connector.spark_api import HAS_READ_LIMITS
from kera.spark_connector.writing.writers import KeraBatchWriter, KeraStreamWriter

LOOK_UP_TIMEOUT_MS = 5_000
"""How long `load` tries to reach the coordinator: a user waits, who may have mistyped the address."""


_told = False
"""Whether this process has logged that the columnar engine is not loaded."""

log = logging.getLogger(__name__)


class KeraDataSource(DataSource):
    """Streams of KerA. Options: docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "kera"

    def schema(self) -> StructType:
        """Ask the cluster, and return the columns of typed streams, or the columns of a record."""
        options = parse_read_options(self.options)
        options.check_engine()
        return columns_of_options(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for ``spark.read``. `schema` may be a part of the columns: the user's ``.schema(...)``."""
        options = parse_read_options(self.options)
        if options.metadata is not None:
            return KeraMetadataReader(options, options.metadata, schema)
        _tell_of_engine(options)
        return KeraBatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader for ``spark.readStream``."""
        with contextlib.suppress(InvalidArgument):  # the reader raises it later, where Spark shows it
            _tell_of_engine(parse_read_options(self.options))
        return (KeraStreamReader if HAS_READ_LIMITS else UntoldStreamReader)(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """Return the writer for ``df.write``."""
        return KeraBatchWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001 - as above
        """Return the writer for ``df.writeStream``."""
        return KeraStreamWriter(self.options, schema, overwrite=overwrite)


class RegisteredDataSource(KeraDataSource):
    """The data source under the name that the columnar engine looks for, for sessions with both.

    Spark refuses to register a name that a jar already has.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "kera_python"


def columns_of_options(options: ReadOptions) -> StructType:
    """Ask the cluster, and return the columns that the options stand for, with either engine."""
    if options.metadata is not None:
        return COLUMNS[options.metadata]
    gone = not options.fail_on_data_loss  # a query that continues from its checkpoint without a deleted stream
    with contextlib.closing(Portal(options.connection, retry_timeout_ms=LOOK_UP_TIMEOUT_MS)) as portal:
        streams = portal.call(lambda client: descriptions(client, options.subscription, may_be_gone=gone))
    of_records = options.on_mismatch == "bytes"
    if options.include_headers and not of_records and any(stream.typed for stream in streams):
        raise InvalidArgument(f"option {HEADERS}: a typed stream has its own columns and no headers", option=HEADERS)
    columns = columns_of_all(streams, headers=options.include_headers, on_mismatch=options.on_mismatch)
    return with_epoch(columns) if options.include_epoch else columns


def _tell_of_engine(options: ReadOptions) -> None:
    """Warn once that Spark uses Python readers, which are slower, unless the user has chosen them."""
    global _told  # noqa: PLW0603 - it is one per process
    options.check_engine()
    if options.engine == "auto" and not _told:
        _told = True
        log.warning(
            "the columnar engine of the kera source is not loaded, so that Python reads, which is slower. %s, or say"
            " option(%r, 'python')",
            LOAD_ENGINE,
            ENGINE,
        )
