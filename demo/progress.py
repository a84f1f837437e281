"""The progress of a running demo: that of the feeder, that of Spark, and the results of Spark.

The feeder's reports, the query's progress and its results arrive on different threads; each is one assignment.
"""

from __future__ import annotations

import datetime as dt
import json
import time
from typing import Any, NamedTuple

import pyarrow as pa

from demo.check import Tallies, Tally, add, tally_of
from demo.data import Data


class Step(NamedTuple):
    """The number of acknowledged flights at a time on the clock and in history."""

    flights: int
    at: float
    event_time: dt.datetime


class Week(NamedTuple):
    """A window of the result."""

    carrier: str
    start: dt.datetime


class Progress:
    """Collects the reports, and computes the figures for the screen."""

    def __init__(self, data: Data) -> None:
        self.flights = data.flights.num_rows
        self.carriers = data.carriers
        self.steps: list[Step] = []
        self.weather = 0
        self.processed = 0
        """Number of flights in the micro-batches that Spark has finished."""
        self.latencies: list[tuple[float, int]] = []
        """Seconds from acknowledged to processed, each with a number of flights."""
        self.late = 0
        """Number of rows that Spark dropped because they were behind the watermark; should be 0."""
        self.found: Tallies = {}
        """Spark's results so far."""
        self.weeks: dict[Week, Tally] = {}
        """Spark's results so far, per carrier and week."""
        self._batch = -1
        self._taken: set[int] = set()

    def feeder_reports(self, line: str) -> None:
        """Take a line of `demo.feeder`."""
        report = json.loads(line)
        event_time = dt.datetime.fromtimestamp(report["event_time_us"] / 1e6, dt.UTC)
        self.weather = report["weather"]
        self.steps.append(Step(report["flights"], report["at"], event_time))

    def take(self, batch: int, results: pa.Table) -> None:
        """Take the results of a micro-batch. A repeated micro-batch has the same results, which count once."""
        if batch in self._taken:
            return
        self._taken.add(batch)
        found, weeks = dict(self.found), dict(self.weeks)
        for row in results.to_pylist():
            tally, week = tally_of(row), Week(row["carrier"], row["week"])
            add(found, (row["carrier"], row["sky"]), tally)
            add(weeks, week, tally)
        self.found, self.weeks = found, weeks

    def query_reports(self, report: dict[str, Any] | None) -> None:
        """Take Spark's progress after a micro-batch. Its offsets show how many records were processed."""
        if not report or report["batchId"] <= self._batch:
            return
        self._batch = report["batchId"]
        self.late += sum(operator["numRowsDroppedByWatermark"] for operator in report["stateOperators"])
        ends = [json.loads(source["endOffset"]) for source in report["sources"]]
        streamlets = next(
            end["streams"]["flights"]["streamlets"].values() for end in ends if "flights" in end["streams"]
        )
        processed = sum(records for entries in streamlets for _, _, _, records in entries)
        started = dt.datetime.fromisoformat(report["timestamp"]).timestamp()
        finished = started + report["durationMs"]["triggerExecution"] / 1000
        before = self.processed
        for step in self.steps:
            if self.processed < step.flights <= processed:
                self.latencies.append((finished - step.at, step.flights - before))
                before = step.flights
        self.processed = min(processed, self.flights)  # the feeder's last row is not a flight

    @property
    def fed(self) -> int:
        """Number of flights that KerA has acknowledged."""
        return self.steps[-1].flights if self.steps else 0

    @property
    def event_time(self) -> dt.datetime | None:
        """The event time that the replay has reached."""
        return self.steps[-1].event_time if self.steps else None

    @property
    def lag_s(self) -> float:
        """Age of the oldest flight that Spark has not processed yet."""
        waiting = next((step for step in self.steps if step.flights > self.processed), None)
        return time.time() - waiting.at if waiting else 0.0

    @property
    def rate(self) -> float:
        """Acknowledged flights per second, over the last five seconds."""
        recent = [step for step in self.steps[-200:] if step.at > time.time() - 5]
        if len(recent) < 2:
            return 0.0
        return (recent[-1].flights - recent[0].flights) / max(recent[-1].at - recent[0].at, 1e-3)

    def latency_s(self, part: float) -> float:
        """Return the latency, from acknowledged to processed, that a share `part` of the flights stayed below."""
        left = part * sum(flights for _, flights in self.latencies)
        for seconds, flights in sorted(self.latencies):
            left -= flights
            if left <= 0:
                return seconds
        return 0.0
