"""Word count: lines of text come in, and the counts of their words are kept up to date."""

# %% A cluster that runs, and a Spark session
import argparse
import asyncio
import time

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kera.client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bootstrap", default="127.0.0.1:7400", help="address of the coordinator")
bootstrap = parser.parse_known_args()[0].bootstrap

builder = SparkSession.builder.master("local[2]").appName("word count")
spark = builder.config("spark.sql.shuffle.partitions", "2").config("spark.log.level", "ERROR").getOrCreate()

# %% A stream of lines, and the first two
lines = f"lines-{time.time_ns()}"


async def create() -> None:
    async with await Client.connect(bootstrap) as client:
        await client.admin.create_stream(lines, streamlets=2)


async def send(*texts: str) -> None:
    async with await Client.connect(bootstrap) as client, client.producer() as producer:
        await producer.prepare(lines)
        for text in texts:
            producer.send(lines, text.encode())


asyncio.run(create())
asyncio.run(send("to be or not to be", "that is the question"))

# %% The query: all words and their counts, each time that something has come
counts = (
    spark.readStream.format("kera")
    .option("kera.bootstrap.servers", bootstrap)
    .option("startingOffsets", "earliest")
    .load(lines)
    .select(F.explode(F.split(F.col("value").cast("string"), " ")).alias("word"))
    .groupBy("word")
    .count()
)
query = counts.writeStream.outputMode("complete").format("memory").queryName("counts").start()
query.processAllAvailable()
spark.table("counts").orderBy(F.desc("count"), "word").show()

# %% More lines
asyncio.run(send("to die to sleep", "to sleep perchance to dream"))
query.processAllAvailable()
spark.table("counts").orderBy(F.desc("count"), "word").show()

# %% The end
query.stop()


async def delete() -> None:
    async with await Client.connect(bootstrap) as client:
        await client.admin.delete_stream(lines)


asyncio.run(delete())
