"""The demo's job on a Spark cluster, as a user of a secured KerA cluster; test_secured_demo.py runs it.

    python -m tests.spark.secured_demo CONFIG     {"bootstrap": …, "master": …, "folder": …, "conf": {…}, …}

The environment has the credentials, also those of the feeder. It prints lines of JSON: now and then the number of
processed flights, and at last the results. Then it waits for a line, and ends.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from demo import check, data, feeder, job, running
from demo.progress import Progress
from kera.spark_connector import configure
from tests.spark.support import with_kera


def say(**what: Any) -> None:
    """Print a line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the job to its end."""
    config = json.loads(sys.argv[1])
    folder, bootstrap = Path(config["folder"]), config["bootstrap"]
    running.prepare(folder / "logs")
    tables = data.load(config["flights"])
    progress = Progress(tables)
    asyncio.run(feeder.create_streams(bootstrap))
    builder = configure(SparkSession.builder) if config["engine"] == "columnar" else SparkSession.builder
    builder = builder.master(config["master"]).config("spark.sql.session.timeZone", "UTC")
    for name, value in config["conf"].items():
        builder = builder.config(name, value)
    spark = with_kera(builder.getOrCreate())
    query = job.start_query(spark, bootstrap, folder, progress.take)
    feeding = running.Feeder(
        bootstrap, folder, progress, flights_max=config["flights"], seconds=float(config["seconds"])
    )
    with feeding:
        running.finish(query, feeding, progress, lambda: say(processed=progress.processed))
    say(
        ui=spark.sparkContext.uiWebUrl,
        differences=check.differences(progress.found, check.expected(tables)),
        stored=job.stored(spark, bootstrap),
        late=progress.late,
        flights=tables.flights.num_rows,
    )
    sys.stdin.readline()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
