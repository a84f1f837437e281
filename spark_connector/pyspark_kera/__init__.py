"""Lets Spark find the format ``kera`` without registration.

Spark imports every top-level module called ``pyspark_*`` when a query first names a Python data source, and registers
its `DefaultSource`. So an installed connector needs no ``spark.dataSource.register``. Nothing else belongs here.
"""

from kera.spark_connector import KeraDataSource as DefaultSource

__all__ = ["DefaultSource"]
