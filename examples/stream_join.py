"""A join of two streams: which orders were paid within ten minutes, whatever of the two comes first.

Spark keeps what still waits for the other side, and lets go of it when the watermarks have passed.
"""

# %% A cluster that runs, and a Spark session
import argparse
import asyncio
import time
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kera.client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bootstrap", default="127.0.0.1:7400", help="address of the coordinator")
bootstrap = parser.parse_known_args()[0].bootstrap

builder = SparkSession.builder.master("local[2]").appName("stream join")
builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.sql.session.timeZone", "UTC")
spark = builder.config("spark.log.level", "ERROR").getOrCreate()

# %% Two streams; the key of both is the number of the order
orders, payments = (f"{name}-{time.time_ns()}" for name in ("orders", "payments"))


async def create() -> None:
    async with await Client.connect(bootstrap) as client:
        for stream in (orders, payments):
            await client.admin.create_stream(stream, streamlets=2)


async def send(stream: str, *events: tuple[str, str, str]) -> None:
    async with await Client.connect(bootstrap) as client, client.producer() as producer:
        await producer.prepare(stream)
        for at, order, what in events:
            moment = datetime.fromisoformat(f"2026-03-01T{at}").replace(tzinfo=UTC)
            microseconds = round(moment.timestamp() * 1_000_000)
            producer.send(stream, what.encode(), keys=order.encode(), timestamp_us=microseconds)


asyncio.run(create())
asyncio.run(send(orders, ("09:00:00", "1", "tea"), ("09:01:00", "2", "jam"), ("09:02:00", "3", "pie")))
asyncio.run(send(payments, ("09:04:00", "1", "card"), ("09:30:00", "3", "cash")))


# %% The query: each order once, with its payment or without
def events(stream: str, order: str, what: str, at: str) -> DataFrame:
    reader = spark.readStream.format("kera").option("kera.bootstrap.servers", bootstrap)
    frame = reader.option("startingOffsets", "earliest").load(stream)
    text = {name: F.col(name).cast("string") for name in ("key", "value")}
    return frame.select(text["key"].alias(order), text["value"].alias(what), F.col("timestamp").alias(at))


ordered = events(orders, "order", "what", "ordered").withWatermark("ordered", "1 minute")
paid = events(payments, "paid_order", "how", "paid").withWatermark("paid", "1 minute")
in_time = F.expr("order = paid_order AND paid >= ordered AND paid <= ordered + INTERVAL 10 MINUTES")
joined = ordered.join(paid, in_time, "left_outer").select("order", "what", "how", "ordered", "paid")
query = joined.writeStream.outputMode("append").format("memory").queryName("joined").start()
query.processAllAvailable()
spark.table("joined").orderBy("order").show()

# %% When both streams are past the ten minutes, what was not paid comes out, too
asyncio.run(send(orders, ("10:00:00", "4", "tea")))
asyncio.run(send(payments, ("10:01:00", "4", "card")))
query.processAllAvailable()
spark.table("joined").orderBy("order").show()

# %% The end
query.stop()


async def delete() -> None:
    async with await Client.connect(bootstrap) as client:
        for stream in (orders, payments):
            await client.admin.delete_stream(stream)


asyncio.run(delete())
