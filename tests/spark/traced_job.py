"""A query in a separate process, traced by the environment's settings: it reads a stream once, and ends.

python -m tests.spark.traced_job BOOTSTRAP STREAM ENGINE CHECKPOINT
"""

import sys

from pyspark.sql import SparkSession

from kera.spark_connector import configure
from tests.spark.support import with_kera


def main(bootstrap: str, stream: str, engine: str, checkpoint: str) -> None:
    builder = SparkSession.builder.master("local[2]").appName("kera traces").config("spark.ui.enabled", "false")
    spark = with_kera(configure(builder).getOrCreate())
    reader = spark.readStream.format("kera").option("kera.bootstrap.servers", bootstrap).option("engine", engine)
    frame = reader.option("startingOffsets", "earliest").option("kera.group.id", f"{stream}-{engine}").load(stream)
    rows: list[int] = []
    writer = frame.writeStream.foreachBatch(lambda batch, _: rows.append(batch.count()))
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    spark.stop()
    sys.stdout.write(f"{sum(rows)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
