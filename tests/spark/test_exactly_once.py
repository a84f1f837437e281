"""kera → Spark → kera, with kills: a short form of ``make chaos-spark``."""

from pathlib import Path

import pytest

from tests.chaos.spark import run_all


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["python", "columnar"])
def test_a_job_whose_driver_worker_and_broker_are_killed_writes_every_record_exactly_once(
    tmp_path: Path, engine: str
) -> None:
    assert "3 rounds" in run_all(3, seed=7, folder=tmp_path, engine=engine)
