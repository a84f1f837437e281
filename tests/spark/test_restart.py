"""A job that is killed and started again from its checkpoint ends with the same result as one that was not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.spark.support import Kera, Sent, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]

Row = tuple[int, int, int, str]


def command(kera: Kera, stream: str, folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tests.spark.killed_job", kera.bootstrap, stream, str(folder), *more]


@contextmanager
def job(kera: Kera, stream: str, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A job in a session of its own, of which nothing is left when the block ends."""
    with (folder / "job.log").open("a") as log:
        process = subprocess.Popen(
            command(kera, stream, folder, *more),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        with process:
            yield process
            # The driver and the JVM, without a chance to say goodbye; Spark's Python workers end when the JVM is gone.
            os.killpg(process.pid, signal.SIGKILL)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(kera: Kera, stream: str, folder: Path, *more: str) -> None:
    finished = subprocess.run(
        command(kera, stream, folder, *more), cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert finished.returncode == 0, finished.stderr[-4000:]


def rows(produced: list[Sent]) -> list[Row]:
    return sorted((record.streamlet, record.entry, record.offset, record.value.decode()) for record in produced)


@pytest.mark.parametrize("point", ["before-output", "after-output"])
def test_a_job_killed_in_a_micro_batch_takes_it_again_as_it_was(
    kera: Kera, stream: str, tmp_path: Path, point: str
) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(700), flush_every=10)
    with job(kera, stream, tmp_path, "--sink", "batches", "--stop-at", point) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n", (tmp_path / "job.log").read_text()[-4000:]
    before = {path.name: path.read_text() for path in (tmp_path / "output").glob("*.json")}
    produced += kera.send(stream, range(700, 800), flush_every=10)

    finish(kera, stream, tmp_path, "--sink", "batches")

    after = {path.name: path.read_text() for path in (tmp_path / "output").glob("*.json")}
    assert len(before) == (2 if point == "before-output" else 3)
    assert {name: sorted(json.loads(after[name])) for name in before} == {
        name: sorted(json.loads(text)) for name, text in before.items()
    }
    assert sorted(tuple(row) for text in after.values() for row in json.loads(text)) == rows(produced)


def test_a_job_with_a_file_sink_killed_at_any_moment_writes_every_record_once(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(2000), flush_every=10)
    with job(kera, stream, tmp_path, "--sink", "files") as process:
        wait_until(
            lambda: (tmp_path / "checkpoint" / "commits" / "3").exists() or process.poll() is not None,
            "the fourth micro-batch",
        )
        assert process.poll() is None, (tmp_path / "job.log").read_text()[-4000:]

    finish(kera, stream, tmp_path, "--sink", "files")

    written = kera.spark.read.parquet(str(tmp_path / "output")).collect()
    assert sorted((row.streamlet, row.entry, row.offset, row.value.decode()) for row in written) == rows(produced)
