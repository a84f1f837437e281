"""Imports KerA once in each daemon of PySpark, from which Python workers are forked: each would import it anew.

Python imports a module of this name at every start; `tests/spark/conftest.py` puts its directory on the path of Spark's
processes.
"""

import contextlib
import gc
import sys

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    with contextlib.suppress(ImportError):  # what is missing is for the workers to miss
        import kera.client
        import kera.spark_connector.reading.batch
        import kera.spark_connector.reading.streaming
        import kera.spark_connector.reading.worker
        import kera.spark_connector.writing.task
        import kera.spark_connector.writing.writers  # noqa: F401
    gc.freeze()
