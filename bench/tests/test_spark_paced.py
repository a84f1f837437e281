"""The benchmark of Spark's latency target: how it evaluates a query's progress."""

import json
from typing import Any

import pytest

from bench.spark_paced import MicroBatch, micro_batches


class Query:
    """The part of a streaming query that the benchmark reads."""

    def __init__(self, *progresses: dict[str, Any]) -> None:
        self.recentProgress = [type("Progress", (), {"json": json.dumps(each)}) for each in progresses]


def test_the_lateness_of_a_micro_batch_is_computed_from_its_progress() -> None:
    seen = {"seen": {"oldest_us": 1_000_000, "records": 7}}
    progress = {"timestamp": "1970-01-01T00:00:02.250Z", "durationMs": {"triggerExecution": 500}}
    query = Query(
        {**progress, "numInputRows": 7, "observedMetrics": seen},
        {**progress, "numInputRows": 0, "observedMetrics": {"seen": {"records": 0}}},
        {**progress, "numInputRows": 0},
    )

    (found,) = micro_batches(query)  # type: ignore[arg-type]  # the function reads only its progress

    assert found == MicroBatch(begun_s=2.25, taken_s=0.5, records=7, oldest_s=1.0)
    assert found.late_s == pytest.approx(1.75)
