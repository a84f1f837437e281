"""A job that is killed and restarted from its checkpoint ends with the same result as an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.spark import killed_job
from tests.spark.support import Kera, Sent, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]

Row = tuple[int, int, int, str]


@contextmanager
def job_to_be_killed(kera: Kera, stream: str, folder: Path, *how: str) -> Iterator[subprocess.Popen[str]]:
    """Run the job in another process, and kill it at the end of the block."""
    argv = [sys.executable, "-m", "tests.spark.killed_job", kera.bootstrap, stream, str(folder), *how]
    with (folder / "job.log").open("w") as log:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    try:
        yield process
        assert process.poll() is None, f"the job has ended by itself:\n{(folder / 'job.log').read_text()[-4000:]}"
    finally:
        # Driver and JVM get no chance to clean up; Spark's Python workers end after the JVM.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def rows(produced: list[Sent]) -> list[Row]:
    return sorted((record.streamlet, record.entry, record.offset, record.value.decode()) for record in produced)


def batches_written(folder: Path) -> dict[str, list[Row]]:
    return {
        path.name: sorted((*place, value) for *place, value in json.loads(path.read_text()))
        for path in (folder / "output").glob("*.json")
    }


@pytest.mark.parametrize(("point", "written"), [("before-output", 2), ("after-output", 3)])
def test_a_job_killed_in_a_micro_batch_repeats_it_with_the_same_records(
    kera: Kera, stream: str, tmp_path: Path, point: str, written: int
) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(700), flush_every=10)
    with job_to_be_killed(kera, stream, tmp_path, "batches", point) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n", (tmp_path / "job.log").read_text()[-4000:]
    before = batches_written(tmp_path)
    assert len(before) == written
    produced += kera.send(stream, range(700, 800), flush_every=10)

    killed_job.start(kera, stream, tmp_path, "batches").awaitTermination()

    after = batches_written(tmp_path)
    assert {name: after[name] for name in before} == before
    assert sorted(row for batch in after.values() for row in batch) == rows(produced)


def test_a_job_with_a_file_sink_killed_at_any_moment_writes_every_record_once(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(2000), flush_every=10)
    with job_to_be_killed(kera, stream, tmp_path, "files", "nowhere") as process:
        committed = tmp_path / "checkpoint" / "commits" / "3"
        wait_until(lambda: committed.exists() or process.poll() is not None, "the fourth micro-batch", 120)

    killed_job.start(kera, stream, tmp_path, "files").awaitTermination()

    written = kera.spark.read.parquet(str(tmp_path / "output")).collect()
    assert sorted((row.streamlet, row.entry, row.offset, row.value.decode()) for row in written) == rows(produced)
