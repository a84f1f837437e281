"""The columnar engine on a Spark cluster: executors are processes of workers, and get the jar from the driver."""

from pathlib import Path

import pytest

from tests.spark.standalone import standalone
from tests.spark.submitting import java_of_tests, module_options, submit
from tests.spark.support import Kera

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

JOB = Path(__file__).with_name("java_job.py")


def test_executors_read_and_write_with_the_jar_from_the_driver(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=4)
    kera.create(f"{stream}-copy", streamlets=3)
    sent = kera.send(stream, range(1000), flush_every=50)
    java, options = java_of_tests(), module_options(kera.spark)

    with standalone(tmp_path / "cluster", java, options) as cluster:
        done = submit(
            *(JOB, kera.bootstrap, stream, "columnar", "write:columnar"),
            java=java,
            options=options,
            folder=tmp_path,
            master=cluster.url,
            conf={"spark.cores.max": "2", "spark.scheduler.minRegisteredResourcesRatio": "1.0"},  # wait for both
        )
        copies = [list(worker.folder.glob("app-*/*/kera-spark-connector.jar")) for worker in cluster.workers]

    assert done.returncode == 0, done.log[-8000:]
    assert done.lines[1:] == [
        {"engine": "columnar", "values": sorted(record.value.decode() for record in sent), "columns": True},
        {"executors": 2},
    ]
    assert all(copies), "an executor has no jar of its own"
    written = kera.read(f"{stream}-copy").collect()
    assert sorted((row.key, row.value) for row in written) == sorted((record.key, record.value) for record in sent)
