"""A job of test_java.py and test_standalone.py: reads a stream once per given engine, and prints the results.

    java_job.py BOOTSTRAP STREAM ENGINE...

For ``write:ENGINE`` it writes the values of the stream to another one, ``STREAM-copy``, with that engine.

Spark's JVM starts it (`tests.spark.submitting`) and decides everything else. It prints lines of JSON: the first one
names the Java, after Spark has answered a simple query; then there is one per read.
"""

import json
import sys
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.support import with_kera


def report(**found: Any) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def read(spark: SparkSession, bootstrap: str, stream: str, engine: str) -> dict[str, Any]:
    """The values of the stream and whether they came in columns, or the error."""
    reader = spark.read.format("kera").option("kera.bootstrap.servers", bootstrap).option("engine", engine)
    try:
        frame = reader.load(stream).selectExpr("streamlet", "cast(value as string)")
        values = sorted(row.value for row in frame.collect())
    except PySparkException as error:
        return {"error": str(error)}
    plan: Any = frame._jdf  # the only way to the plan
    return {"values": values, "columns": "ColumnarToRow" in plan.queryExecution().executedPlan().toString()}


def copy(spark: SparkSession, bootstrap: str, stream: str, engine: str) -> None:
    """Write the values of the stream to another one."""
    frame = spark.read.format("kera").option("kera.bootstrap.servers", bootstrap).load(stream).select("key", "value")
    writer = frame.write.format("kera").option("kera.bootstrap.servers", bootstrap).option("engine", engine)
    writer.mode("append").save(f"{stream}-copy")


def main() -> None:
    """Read and write as the command line says."""
    bootstrap, stream, *engines = sys.argv[1:]
    spark = with_kera(SparkSession.builder.getOrCreate())
    jvm: Any = spark._jvm
    assert spark.range(10, numPartitions=2).selectExpr("sum(id % 7) as sum").collect()[0]["sum"] == 24
    report(java=jvm.System.getProperty("java.specification.version"))
    for engine in engines:
        if engine.startswith("write:"):
            copy(spark, bootstrap, stream, engine.removeprefix("write:"))
        else:
            report(engine=engine, **read(spark, bootstrap, stream, engine))
    report(executors=spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos().__len__() - 1)


if __name__ == "__main__":
    main()
