"""A partition as Spark takes it: the only thing of planning that is a type of Spark."""

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
    """How the task connects, where that is not for the reader's options to say: see ``delegation``."""
