"""KerA and Spark at work: ``python -m demo`` (or ``make demo``).

A year of flights out of New York, 336,776 of them, and the weather at the three airports are replayed in order as two
live streams. A cluster of KerA on this machine takes them in, and a Spark job reads both while they grow, joins each
flight with the weather of its hour and adds up the delays per carrier and week. It takes about a minute and a half.

At the end the sums that came through KerA and Spark are compared, number by number, with those of the source tables.
The program ends with 0 only if all are equal.

``--check`` is the quick form: the first 20,000 flights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from demo import running

BROKERS = 2
BACKUPS = 2
REPLICATION = 1
"""Each flight is also in the memory of a backup before it is acknowledged."""
FLIGHTS_OF_CHECK = 20_000


def main() -> int:
    """Run the demo, and return 0 if the check holds."""
    parser = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="the quick form, for CI")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kera-demo-"))
    try:
        running.prepare(folder / "logs")
        running.interrupt_once()
        if arguments.check:
            return run(folder, flights_max=FLIGHTS_OF_CHECK, seconds=5)
        return run(folder, flights_max=None, seconds=60)
    except running.Failed as error:
        print(f"demo: {error}\ndemo: logs are in {folder / 'logs'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped, nothing is left running", file=sys.stderr)
        return 130
    finally:
        running.remove_all_but_logs(folder)


def run(folder: Path, *, flights_max: int | None, seconds: float) -> int:
    """Run the steps of the demo, from top to bottom, and return the exit code."""
    from rich.console import Console

    from demo import check, data, feeder, job, screen
    from demo.progress import Progress
    from kera.local.cluster import LocalCluster

    cluster_text = f"{BROKERS} brokers, {BACKUPS} backups   flights ×4, weather ×2, replicated   Spark"
    show = screen.Screen(Console(), cluster_text)
    tables = data.load(flights_max)
    right = check.expected(tables)
    progress = Progress(tables)
    with contextlib.ExitStack() as stack:
        with show.step(f"starting a cluster of {BROKERS} brokers and {BACKUPS} backups"), running.uninterrupted():
            cluster = stack.enter_context(
                LocalCluster.running(brokers=BROKERS, backups=BACKUPS, replication=REPLICATION, log_dir=folder / "logs")
            )
            asyncio.run(feeder.create_streams(cluster.bootstrap))
        with show.step("starting Spark"), running.uninterrupted():
            spark = stack.enter_context(job.spark_session(folder))
        with show.step("starting the query"):
            with running.uninterrupted():
                query = job.start_query(spark, cluster.bootstrap, folder, progress.take)
                stack.callback(query.stop)
            if flights_max is None:  # Spark takes seconds for its first rows, so give it only a few before the others
                asyncio.run(feeder.begin(cluster.bootstrap, tables))
                query.processAllAvailable()
        feeding = running.Feeder(cluster.bootstrap, folder, progress, flights_max=flights_max, seconds=seconds)
        with feeding, show.live(progress):
            running.finish(query, feeding, progress, lambda: show.tick(progress))
        began = time.monotonic()
        stored = job.stored(spark, cluster.bootstrap)
        batch_s = time.monotonic() - began
    differences = check.differences(progress.found, right)
    show.final(progress, screen.verdict(progress, right, differences, stored, batch_s), folder / "logs")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
