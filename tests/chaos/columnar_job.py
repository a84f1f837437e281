"""A Spark driver that reads with the columnar engine and checks each record: used by `tests.chaos.columnar`.

Lines of JSON are its commands and its answers, and several commands may run at a time:

    → {"ready": true}                       the session is there, and all executors are
    ← {"id": 1, "do": "batch"}              it reads a whole stream, slowly
    → {"id": 1, "records": 4000}            each was there, once, with all its bytes
    ← {"id": 2, "do": "head"}               one record of it
    ← {"id": 3, "do": "hog"}                a task that needs more memory than an executor has
    ← {"id": 4, "do": "cancel", "of": 3}
    → {"id": 3, "failed": "…"}              a command has failed
    ← {"id": 5, "do": "follow"}             a query follows the other stream, slowly, from its checkpoint on
    → {"followed": 300}                     records of that query so far: each once, in order
    ← {"id": 6, "do": "leave"}              it ends that query
    → {"wrong": "…"}                        a promise was broken
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kera.core.base.process import die_with_parent
from tests.chaos import spark_session
from tests.chaos.spark_session import check
from tests.spark.support import wait_until

SLEEPS_EVERY = 10
SLEEP_MS = 20
SLOWLY = f"if(offset % {SLEEPS_EVERY} = 0, reflect('java.lang.Thread', 'sleep', {SLEEP_MS}L), 'null') = 'null'"
"""A condition that sleeps among the rows of a chunk, so that a reader nearly always has some rows in use."""
HOG = "length(repeat('x', cast(id + 1900000000 as int)))"
"""A value of nearly 2 GiB, in one piece."""
EXECUTOR_MEMORY_MIB = 512
PER_TRIGGER = 1000
STARTED_WITHIN_S = 120.0
LOOK_S = 0.05


class Job:
    """Runs the commands."""

    def __init__(self, spark: SparkSession, task: dict[str, Any]) -> None:
        self._spark = spark
        self._task = task
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        self._lock = threading.Lock()
        self._query: StreamingQuery | None = None
        self._output = Path(task["folder"], "output")

    def _nothing(self) -> dict[int, int]:
        return dict.fromkeys(range(self._task["streamlets"]), 0)

    def run(self) -> None:
        """Obey until standard input ends."""
        self.tell(ready=True)
        threading.Thread(target=self._look, daemon=True).start()
        for line in sys.stdin:
            command = json.loads(line)
            threading.Thread(target=self._do, args=(command,), daemon=True).start()

    def tell(self, **what: Any) -> None:
        """Write a line to the parent process."""
        with self._lock:
            self._answers.write(json.dumps(what) + "\n")

    def _do(self, command: dict[str, Any]) -> None:
        number = command["id"]
        try:
            self._spark.sparkContext.setJobGroup(str(number), command["do"], interruptOnCancel=True)
            found = getattr(self, command["do"])(command)
        except AssertionError as error:
            self.tell(wrong=str(error))
        except Exception as error:  # noqa: BLE001 - the parent knows whether it was expected
            self.tell(id=number, failed=f"{type(error).__name__}: {error}"[:2000])
        else:
            self.tell(id=number, **found)

    # -- commands --------------------------------------------------------------------------------------------------

    def batch(self, _: dict[str, Any]) -> dict[str, Any]:
        """Read all of the stream that does not grow."""
        table = self._standing().where(SLOWLY).toArrow()
        check(table, self._nothing())
        return {"records": len(table)}

    def head(self, _: dict[str, Any]) -> dict[str, Any]:
        """Read one record of it, from any place."""
        (row,) = self._standing().limit(1).collect()
        assert row.offset == 0, f"record {row.offset} of streamlet {row.streamlet} is said to be the first"
        return {"records": 1}

    def hog(self, _: dict[str, Any]) -> dict[str, Any]:
        """Need too much memory: fails."""
        return {"bytes": self._spark.range(1).selectExpr(HOG).collect()[0][0]}

    def cancel(self, command: dict[str, Any]) -> dict[str, Any]:
        """Cancel all jobs of a command."""
        self._spark.sparkContext.cancelJobGroup(str(command["of"]))
        return {}

    def follow(self, _: dict[str, Any]) -> dict[str, Any]:
        """Start a query that follows the growing stream."""
        reader = self._spark.readStream.format("kera").options(**self._options())
        frame = reader.option("maxOffsetsPerTrigger", PER_TRIGGER).load(self._task["growing"])
        writer = frame.select("streamlet", "offset", "value").where(SLOWLY).writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(Path(self._task["folder"], "checkpoint")))
        self._query = writer.start(str(self._output))
        threading.Thread(target=self._watch, args=(self._query,), daemon=True).start()
        return {}

    def leave(self, _: dict[str, Any]) -> dict[str, Any]:
        """End that query in the middle of its work."""
        query, self._query = self._query, None
        assert query is not None, "no query runs"
        query.stop()
        return {}

    # -- reading ---------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, str]:
        return {
            "kera.bootstrap.servers": self._task["bootstrap"],
            "startingOffsets": "earliest",
            "engine": "columnar",
            "sharedMemory": "always",
        }

    def _standing(self) -> DataFrame:
        reader = self._spark.read.format("kera").options(**self._options())
        return reader.load(self._task["standing"]).select("streamlet", "offset", "value")

    def _look(self) -> None:
        """Check the files of completed micro-batches, for ever."""
        due = self._nothing()
        seen: set[str] = set()
        last = -1
        try:
            while True:
                for number, paths in sorted(committed(self._output, last).items()):
                    last = number
                    if new := [path for path in paths if path not in seen]:
                        check(pa.concat_tables(parquet.read_table(path) for path in new), due)
                        seen.update(new)
                        self.tell(followed=sum(due.values()))
                time.sleep(LOOK_S)
        except Exception as error:  # noqa: BLE001 - every error is part of the verdict
            self.tell(wrong=f"micro-batches: {error!r}")

    def _watch(self, query: StreamingQuery) -> None:
        try:
            query.awaitTermination()
        except Exception as error:  # noqa: BLE001 - every error is part of the verdict
            if query is self._query:
                self.tell(wrong=f"the query has ended: {error}")


def committed(output: Path, after: int) -> dict[int, list[str]]:
    """The valid files of each micro-batch after `after`; some lists include all earlier files."""
    found = {}
    for log in output.glob("_spark_metadata/[0-9]*"):
        if (number := int(log.name.partition(".")[0])) > after:
            entries = [json.loads(line) for line in log.read_text().splitlines()[1:]]  # after the version
            found[number] = [urlsplit(entry["path"]).path for entry in entries]
    return found


def session(master: str, executors: int, cores: int) -> SparkSession:
    """A session whose executors have little memory, and die when they need more."""
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.cores": str(cores),
        "spark.executor.memory": f"{EXECUTOR_MEMORY_MIB}m",
        "spark.executor.extraJavaOptions": "-XX:+ExitOnOutOfMemoryError",
    }
    made = spark_session.session(master, settings, columnar=True)
    tracker: Any = made.sparkContext._jsc.sc().statusTracker()  # the only way to get it
    wait_until(lambda: len(tracker.getExecutorInfos()) > executors, "executors", STARTED_WITHIN_S)  # and the driver
    return made


def main() -> None:
    """Run as a driver."""
    die_with_parent()
    task = json.loads(sys.argv[1])
    spark = session(task["master"], task["executors"], task["cores"])
    try:
        Job(spark, task).run()
    except Exception:  # noqa: BLE001 - for the log
        traceback.print_exc()
    spark.stop()


if __name__ == "__main__":
    main()
