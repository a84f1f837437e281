"""Fixed windows in event time: the mean of each sensor per minute, final when the watermark has passed.

A record's `timestamp` is when it happened, as its producer says. What comes later than the watermark allows is dropped.
"""

# %% A cluster that runs, and a Spark session
import argparse
import asyncio
import time
from datetime import UTC, datetime

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kera.client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bootstrap", default="127.0.0.1:7400", help="address of the coordinator")
bootstrap = parser.parse_known_args()[0].bootstrap

builder = SparkSession.builder.master("local[2]").appName("fixed window")
builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.sql.session.timeZone", "UTC")
spark = builder.config("spark.log.level", "ERROR").getOrCreate()

# %% A stream of temperatures; the sensor is the key
readings = f"readings-{time.time_ns()}"


async def create() -> None:
    async with await Client.connect(bootstrap) as client:
        await client.admin.create_stream(readings, streamlets=2)


async def send(*measured: tuple[str, str, float]) -> None:
    async with await Client.connect(bootstrap) as client, client.producer() as producer:
        await producer.prepare(readings)
        for at, sensor, celsius in measured:
            moment = datetime.fromisoformat(f"2026-03-01T{at}").replace(tzinfo=UTC)
            microseconds = round(moment.timestamp() * 1_000_000)
            producer.send(readings, str(celsius).encode(), keys=sensor.encode(), timestamp_us=microseconds)


asyncio.run(create())
asyncio.run(send(("12:00:10", "roof", 8.0), ("12:00:50", "roof", 9.0), ("12:00:30", "hall", 19.0)))

# %% The query: a window comes out once, when two minutes of event time have passed since its end
means = (
    spark.readStream.format("kera")
    .option("kera.bootstrap.servers", bootstrap)
    .option("startingOffsets", "earliest")
    .load(readings)
    .withWatermark("timestamp", "2 minutes")
    .groupBy(F.window("timestamp", "1 minute"), F.col("key").cast("string").alias("sensor"))
    .agg(F.count("*").alias("readings"), F.avg(F.col("value").cast("string").cast("double")).alias("celsius"))
    .select(F.col("window.start").alias("minute"), "sensor", "readings", "celsius")
)
query = means.writeStream.outputMode("append").format("memory").queryName("means").start()
query.processAllAvailable()
print(spark.table("means").count(), "windows are final")

# %% Time goes on: one reading is late, but not too late, and the last one closes the first minute
asyncio.run(send(("12:01:40", "hall", 21.0), ("12:00:20", "hall", 20.0)))
query.processAllAvailable()
asyncio.run(send(("12:03:10", "roof", 10.0)))
query.processAllAvailable()
spark.table("means").orderBy("minute", "sensor").show()

# %% This one is too late for its minute; the next one closes the second minute
asyncio.run(send(("12:00:40", "roof", 99.0)))
query.processAllAvailable()
asyncio.run(send(("12:04:30", "roof", 11.0)))
query.processAllAvailable()
spark.table("means").orderBy("minute", "sensor").show()

# %% The end
query.stop()


async def delete() -> None:
    async with await Client.connect(bootstrap) as client:
        await client.admin.delete_stream(readings)


asyncio.run(delete())
