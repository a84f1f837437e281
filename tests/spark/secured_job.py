"""A user's Spark application on a secured cluster: test_secured_cluster.py controls it with lines of JSON.

    python -m tests.spark.secured_job CONFIG     {"master": "spark://…", "conf": {…}}

Each line names a method in ``do``; the answer is a line ``{"done": …}`` or ``{"error": "…"}``.
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
    """The methods that a test can call."""

    def __init__(self, config: dict[str, Any]) -> None:
        builder = configure(SparkSession.builder).master(config["master"])
        for name, value in config["conf"].items():
            builder = builder.config(name, value)
        self._spark = with_kera(builder.getOrCreate())
        self._queries: dict[str, StreamingQuery] = {}

    def ui(self) -> str | None:
        """The address of Spark's pages."""
        url: str | None = self._spark.sparkContext.uiWebUrl
        return url

    def configuration(self) -> str:
        """The whole configuration of Spark."""
        return f"{self._spark.sparkContext.getConf().getAll()} {self._spark.conf.getAll}"

    def read(self, stream: str, options: dict[str, str]) -> list[str]:
        """The values of a stream."""
        return sorted(row.value for row in self._batch(stream, options).collect())

    def read_slowly(self, stream: str, options: dict[str, str], pause_s: float) -> list[str]:
        """Read the values through a slow user-defined function."""

        def slow(value: str) -> str:
            time.sleep(pause_s)  # sleep: the function must be slow
            return value

        slowly = udf(slow, "string")
        return sorted(
            row.value for row in self._batch(stream, options).select(slowly("value").alias("value")).collect()
        )

    def explain(self, stream: str, options: dict[str, str]) -> str:
        """All descriptions that Spark has of such a read."""
        frame: Any = self._batch(stream, options)
        return f"{frame!r} {frame._jdf.queryExecution()} {frame._jdf.queryExecution().stringWithStats()}"

    def copy(self, stream: str, to: str, options: dict[str, str]) -> None:
        """Write the records of a stream to another one."""
        frame = self._batch(stream, options)
        frame.write.format("kera").options(**_writing(options)).mode("append").save(to)

    def start(self, stream: str, to: str, options: dict[str, str], checkpoint: str, name: str) -> None:
        """Start a query that copies a stream to another one."""
        reader = self._spark.readStream.format("kera").options(**options).option("startingOffsets", "earliest")
        writer = _values(reader.load(stream)).writeStream.format("kera").options(**_writing(options))
        self._queries[name] = writer.queryName(name).option("checkpointLocation", checkpoint).start(to)

    def wait(self, name: str) -> str:
        """Wait for the end of a query; return its error, or ''."""
        try:
            self._queries[name].awaitTermination()
        except Exception as error:  # noqa: BLE001 - the test gets every error
            return "".join(traceback.format_exception(error))
        return ""

    def stop(self, name: str) -> None:
        """Stop a query."""
        self._queries[name].stop()

    def progress(self, name: str) -> str:
        """The status and the progress of a query."""
        query = self._queries[name]
        return f"{query.status} {[each.json for each in query.recentProgress]}"

    def end(self) -> None:
        """End the application."""
        self._spark.stop()

    def _batch(self, stream: str, options: dict[str, str]) -> DataFrame:
        return _values(self._spark.read.format("kera").options(**options).load(stream))


def _values(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("cast(value as string) as value", "key")


def _writing(options: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name != "sharedMemory"}


def main() -> None:
    """Obey the lines of stdin."""
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
