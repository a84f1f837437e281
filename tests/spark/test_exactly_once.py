"""kera → Spark → kera, with kills: a short form of the chaos program `spark`."""

from pathlib import Path

import pytest

from tests.chaos.spark import SPARK


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["python", "columnar"])
async def test_a_job_whose_driver_worker_and_broker_are_killed_writes_every_record_exactly_once(
    tmp_path: Path, engine: str
) -> None:
    run = await SPARK.short(tmp_path, rounds=3, seed=7, engine=engine)
    assert run.seen["rounds"] == 3
