"""A partition in Spark's own type, the only type of Spark in what planning makes."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from kera.spark_connector.connection import Connection
from kera.spark_connector.planning import Piece


@dataclass(repr=False)
class KeraPartition(InputPartition):
    """One range of one entry, read by one task."""

    piece: Piece
    connection: Connection | None = None
    """The task's connection, if it differs from that of the reader's options: see ``delegation``."""
