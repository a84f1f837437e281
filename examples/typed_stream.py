"""A typed stream: rows with columns of their own come in, and what is made of them goes to another stream of KerA."""

# %% A cluster that runs, and a Spark session
import argparse
import asyncio
import tempfile
import time
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kera.client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bootstrap", default="127.0.0.1:7400", help="address of the coordinator")
bootstrap = parser.parse_known_args()[0].bootstrap

builder = SparkSession.builder.master("local[2]").appName("typed stream")
builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.sql.session.timeZone", "UTC")
spark = builder.config("spark.log.level", "ERROR").getOrCreate()

# %% Two typed streams: taxi rides, and what they cost per kilometre
rides, prices = (f"{name}-{time.time_ns()}" for name in ("rides", "prices"))
rides_schema = pa.schema(
    {"city": pa.string(), "started": pa.timestamp("us", "UTC"), "km": pa.float64(), "fare": pa.float64()}
)
prices_schema = pa.schema({"city": pa.string(), "started": pa.timestamp("us", "UTC"), "fare_per_km": pa.float64()})


async def create() -> None:
    async with await Client.connect(bootstrap) as client:
        for stream, schema in ((rides, rides_schema), (prices, prices_schema)):
            await client.admin.create_stream(
                stream, streamlets=2, schema=schema, key_column="city", timestamp_column="started"
            )


async def send(*rows: tuple[str, int, float, float]) -> None:
    """A batch of rows, as Arrow."""
    cities, hours, kilometres, fares = zip(*rows, strict=True)
    started = [datetime(2026, 3, 1, hour, tzinfo=UTC) for hour in hours]
    batch = pa.record_batch([cities, started, kilometres, fares], schema=rides_schema)
    async with await Client.connect(bootstrap) as client, client.producer() as producer:
        await producer.send_batch(rides, batch)


asyncio.run(create())
asyncio.run(send(("Madrid", 8, 4.0, 10.0), ("Madrid", 9, 10.0, 20.0), ("Rennes", 9, 2.0, 7.0)))

# %% The stream's own columns are those of the DataFrame
spark_rides = (
    spark.readStream.format("kera")
    .option("kera.bootstrap.servers", bootstrap)
    .option("startingOffsets", "earliest")
    .load(rides)
)
spark_rides.printSchema()

# %% From KerA to KerA: each row arrives once, also when the job is killed and started again from its checkpoint
priced = spark_rides.select("city", "started", (F.col("fare") / F.col("km")).alias("fare_per_km"))
query = (
    priced.writeStream.format("kera")
    .option("kera.bootstrap.servers", bootstrap)
    .option("stream", prices)
    .option("checkpointLocation", tempfile.mkdtemp(prefix="typed-stream-"))
    .start()
)
query.processAllAvailable()
asyncio.run(send(("Rennes", 10, 3.0, 9.0)))
query.processAllAvailable()
query.stop()

# %% What is there now, read as a batch
found = spark.read.format("kera").option("kera.bootstrap.servers", bootstrap).load(prices)
found.orderBy("city", "started").show()


# %% The end
async def delete() -> None:
    async with await Client.connect(bootstrap) as client:
        for stream in (rides, prices):
            await client.admin.delete_stream(stream)


asyncio.run(delete())
