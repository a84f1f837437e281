"""From a stream into a table of Delta Lake, each row exactly once, with delta-rs: no jar, no extension of Spark's.

Spark numbers the micro-batches of a query, and plans one that it has to repeat from and to the same places. A commit of
Delta Lake can carry the name of an application with a version, and is there entirely or not at all. So the commit of a
micro-batch carries the query's id with the number of the micro-batch, and one that the table has already is left out.
"""

# %% A cluster that runs, and a Spark session
import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kera.client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bootstrap", default="127.0.0.1:7400", help="address of the coordinator")
bootstrap = parser.parse_known_args()[0].bootstrap

builder = SparkSession.builder.master("local[2]").appName("lakehouse")
builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.sql.session.timeZone", "UTC")
spark = builder.config("spark.log.level", "ERROR").getOrCreate()

# %% A stream, and where its table and the checkpoint of the query are
clicks = f"clicks-{time.time_ns()}"
folder = Path(tempfile.mkdtemp(prefix="lakehouse-"))
table, checkpoint = str(folder / "table"), str(folder / "checkpoint")


async def create() -> None:
    async with await Client.connect(bootstrap) as client:
        await client.admin.create_stream(clicks, streamlets=2)


async def send(*pages: str) -> None:
    async with await Client.connect(bootstrap) as client, client.producer() as producer:
        await producer.prepare(clicks)
        for page in pages:
            producer.send(clicks, page.encode())


asyncio.run(create())
asyncio.run(send("home", "cart", "home"))


# %% A micro-batch is appended with one commit, unless the table has it
def append_once(batch: DataFrame, number: int) -> None:
    """For foreachBatch. The rows of a micro-batch come to the driver: bound them with ``maxBytesPerTrigger``."""
    query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")  # kept in the checkpoint
    done = DeltaTable(table).transaction_version(query) if DeltaTable.is_deltatable(table) else None
    if done is not None and number <= done:
        print(f"micro-batch {number} is there already")
        return
    commit = CommitProperties(app_transactions=[Transaction(query, number)])
    write_deltalake(table, batch.toArrow(), mode="append", commit_properties=commit)
    print(f"micro-batch {number} is appended")


def start() -> StreamingQuery:
    source = spark.readStream.format("kera").option("kera.bootstrap.servers", bootstrap)
    frame = source.options(startingOffsets="earliest", maxBytesPerTrigger=str(64 << 20)).load(clicks)
    rows = frame.selectExpr("cast(value as string) as page", "streamlet", "offset")
    writer = rows.writeStream.foreachBatch(append_once).option("checkpointLocation", checkpoint)
    return writer.trigger(availableNow=True).start()


start().awaitTermination()

# %% As if the job had been killed between the commit of the table and that of Spark: the micro-batch comes again
for path in Path(checkpoint, "commits").glob("*0*"):
    path.unlink()
asyncio.run(send("help"))
start().awaitTermination()

# %% What is there now, each row once
for page in sorted(DeltaTable(table).to_pyarrow_table()["page"].to_pylist()):
    print(page)


# %% The end
async def delete() -> None:
    async with await Client.connect(bootstrap) as client:
        await client.admin.delete_stream(clicks)


asyncio.run(delete())
