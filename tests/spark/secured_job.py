"""A user's Spark application on a secured cluster, of test_secured_cluster.py: it does what lines of JSON tell it.

    python -m tests.spark.secured_job CONFIG     {"master": "spark://…", "conf": {…}}

Each line names what to do in ``do``, and is answered with one: ``{"done": …}`` or ``{"error": "…"}``.
"""

import json
import sys
import time
import traceback
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import udf
from pyspark.sql.streaming.query import StreamingQuery

from kera.spark_connector import configure
from tests.spark.support import with_kera


class Application:
    """What can be done."""

    def __init__(self, config: dict[str, Any]) -> None:
        builder = configure(SparkSession.builder).master(config["master"])
        for name, value in config["conf"].items():
            builder = builder.config(name, value)
        self._spark = with_kera(builder.getOrCreate())
        self._queries: dict[str, StreamingQuery] = {}

    def ui(self) -> str | None:
        """Where Spark's pages are."""
        url: str | None = self._spark.sparkContext.uiWebUrl
        return url

    def configuration(self) -> str:
        """All that Spark was told."""
        return f"{self._spark.sparkContext.getConf().getAll()} {self._spark.conf.getAll}"

    def read(self, stream: str, options: dict[str, str]) -> list[str]:
        """The values of a stream."""
        return sorted(row.value for row in self._batch(stream, options).collect())

    def read_slowly(self, stream: str, options: dict[str, str], pause_s: float) -> list[str]:
        """The same, with a function of a user's that takes its time for each of them."""

        def slow(value: str) -> str:
            time.sleep(pause_s)  # sleep: it is what makes it slow
            return value

        slowly = udf(slow, "string")
        return sorted(
            row.value for row in self._batch(stream, options).select(slowly("value").alias("value")).collect()
        )

    def explain(self, stream: str, options: dict[str, str]) -> str:
        """All that Spark says of such a read."""
        frame: Any = self._batch(stream, options)
        return f"{frame!r} {frame._jdf.queryExecution()} {frame._jdf.queryExecution().stringWithStats()}"

    def copy(self, stream: str, to: str, options: dict[str, str]) -> None:
        """Write what a stream has to another one."""
        frame = self._batch(stream, options)
        frame.write.format("kera").options(**_writing(options)).mode("append").save(to)

    def start(self, stream: str, to: str, options: dict[str, str], checkpoint: str, name: str) -> None:
        """Have a stream go to another one."""
        reader = self._spark.readStream.format("kera").options(**options).option("startingOffsets", "earliest")
        writer = _values(reader.load(stream)).writeStream.format("kera").options(**_writing(options))
        self._queries[name] = writer.queryName(name).option("checkpointLocation", checkpoint).start(to)

    def wait(self, name: str) -> str:
        """Wait for the end of a query, and give what it has ended with."""
        try:
            self._queries[name].awaitTermination()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            return "".join(traceback.format_exception(error))
        return ""

    def stop(self, name: str) -> None:
        """Stop a query."""
        self._queries[name].stop()

    def progress(self, name: str) -> str:
        """What Spark tells of a query."""
        query = self._queries[name]
        return f"{query.status} {[each.json for each in query.recentProgress]}"

    def end(self) -> None:
        """The end of the application."""
        self._spark.stop()

    def _batch(self, stream: str, options: dict[str, str]) -> DataFrame:
        return _values(self._spark.read.format("kera").options(**options).load(stream))


def _values(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("cast(value as string) as value", "key")


def _writing(options: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name != "sharedMemory"}


def main() -> None:
    """Do as lines say."""
    application = Application(json.loads(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            answer = {"done": getattr(application, do)(**command)}
        except Exception as error:  # noqa: BLE001 - likewise
            answer = {"error": "".join(traceback.format_exception(error))}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if do == "end":
            return


if __name__ == "__main__":
    main()
