"""Import KerA once in each daemon of PySpark, so that its forked Python workers need not.

Python imports a module of this name at every start; `tests/spark/conftest.py` puts its directory on the path of Spark's
processes.
"""

import contextlib
import gc
import sys

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    with contextlib.suppress(ImportError):  # the workers report a missing module
        import kera.client
        import kera.spark_connector.reading.batch
        import kera.spark_connector.reading.streaming
        import kera.spark_connector.reading.worker
        import kera.spark_connector.writing.task
        import kera.spark_connector.writing.writers  # noqa: F401
    gc.freeze()
