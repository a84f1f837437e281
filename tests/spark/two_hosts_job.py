"""The driver of test_two_hosts.py, which runs on another host as ``python -m tests.spark.two_hosts_job``.

It obeys the lines of its standard input in order, and answers each with a line; both are JSON objects. A command is
the name of a method below and its arguments. An error is also an answer.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from kera.client import Client
from kera.spark_connector import configure
from tests.spark.support import Kera, wait_until

HOST = "split(reflect('java.net.InetAddress', 'getLocalHost'), '/')[0]"
"""The name of the host of the JVM that computes it."""
ROW = ["streamlet", "entry", "offset", "cast(substring(value, 1, 8) AS string) AS value", f"{HOST} AS host"]
RECORD_BYTES = 4096
CHUNK_BYTES = 64 << 10


class Job:
    """The driver. Each public method is a command."""

    def __init__(self, bootstrap: str, settings: dict[str, str]) -> None:
        builder = configure(SparkSession.builder)
        for name, value in settings.items():
            builder = builder.config(name, value)
        self._spark = builder.getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        self._kera = Kera(self._spark, bootstrap)
        self._holding: Thread | None = None

    def produce(self, stream: str, records: int, streamlets: int) -> dict[str, Any]:
        """Create a stream and fill it; return its rows, and the node of each streamlet."""
        self._kera.create(stream, streamlets=streamlets)

        async def produce(client: Client) -> tuple[list[Any], dict[int, str]]:
            async with client.producer(chunk_bytes_max=CHUNK_BYTES) as producer:
                await producer.prepare(stream)
                waiting = []
                for number in range(records):
                    value = b"%08d" % number * (RECORD_BYTES // 8)
                    waiting.append(producer.send(stream, value, streamlet=number % streamlets))
                    await producer.drain()
                await producer.flush()
                sent = [await each for each in waiting]
            rows = [[d.entry.streamlet_id, d.entry.entry, d.record, f"{number:08d}"] for number, d in enumerate(sent)]
            description = await client.admin.describe_stream(stream)
            brokers = {streamlet: description.broker_of(streamlet) for streamlet in range(streamlets)}
            return rows, {streamlet: broker.node_id for streamlet, broker in brokers.items() if broker}

        rows, nodes = self._kera.run(produce)
        return {"rows": rows, "nodes": nodes}

    def batch(self, stream: str | None, group: str, options: dict[str, str]) -> list[Any]:
        """The rows of a stream, each with the host that read it; the jobs belong to `group`."""
        self._spark.sparkContext.setJobGroup(group, group)
        return _rows(self._kera.read(stream, **options))

    def micro_batches(self, stream: str, checkpoint: str, options: dict[str, str]) -> dict[str, Any]:
        """The rows of each micro-batch up to the present end, and the group of their jobs."""
        found: dict[int, list[Any]] = {}

        def take(batch: DataFrame, number: int) -> None:
            found[number] = _rows(batch)

        writer = self._kera.stream(stream, **options).writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
        return {"group": str(query.runId), "batches": list(found.values())}

    def occupy(self, until: str, options: dict[str, str]) -> None:
        """Keep the processor busy on the host with the records of `options`, until a file exists."""

        def hold(rows: Iterator[Any]) -> None:
            next(rows)
            wait_until(Path(until).exists, "the end of the job", 120)

        tasks = self._kera.read(None, **options).select("streamlet").rdd
        self._holding = Thread(target=tasks.foreachPartition, args=(hold,), daemon=True)
        self._holding.start()
        tracker = self._spark.sparkContext.statusTracker()

        def running() -> bool:
            jobs = (tracker.getJobInfo(job) for job in tracker.getActiveJobsIds())
            stages = (tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds)
            return any(stage.numActiveTasks for stage in stages if stage)

        wait_until(running, "a task that holds")

    def free(self) -> None:
        """Wait until the processor is free again."""
        assert self._holding is not None
        self._holding.join()

    def locality_wait(self, wait: str) -> None:
        """Set the time that a task waits for its host, from the next job on."""
        self._spark.sparkContext._jsc.sc().conf().set("spark.locality.wait", wait)

    def executors(self, hosts: list[str]) -> None:
        """Wait until exactly these hosts have an executor."""
        context = self._spark.sparkContext
        driver = context.getConf().get("spark.driver.host")

        def found() -> list[str]:
            infos = context._jsc.sc().statusTracker().getExecutorInfos()
            return sorted(info.host() for info in infos if info.host() != driver)

        wait_until(lambda: found() == sorted(hosts), f"executors on {', '.join(hosts)}")


def _rows(frame: DataFrame) -> list[Any]:
    return [list(row) for row in frame.selectExpr(*ROW).collect()]


def main() -> None:
    job = Job(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            answer = {"answer": getattr(job, name)(**request)}
        except Exception as error:  # noqa: BLE001 - the test gets every error
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
