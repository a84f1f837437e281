"""Ends of Spark programs: a batch is complete if its write returned, and an error otherwise.

Each program is a separate process. The engines take turns, as each program takes many seconds.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.spark.ending_writer import GO_ON, RECORDS, write
from tests.spark.support import Kera, numbers, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
FIRST_ROWS_S = 300.0
END_S = 200.0
CODES = {"returns": 0, "fails": 1, "exits": 0, "SIGTERM": -signal.SIGTERM}
ALL = Counter(range(RECORDS))


def turns(*cases: str) -> pytest.MarkDecorator:
    """Parametrize a test with pairs of an engine and an end, such as ``python-fails``."""
    return pytest.mark.parametrize(("engine", "end"), [case.split("-") for case in cases], indirect=["engine"])


class Program:
    """A program that writes to a stream."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def has_written(self) -> None:
        """Wait until its write has returned."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "written\n", self.errors()

    def writes(self, kera: Kera, stream: str) -> None:
        """Wait until some rows are stored."""
        ended = self.process.poll
        wait_until(lambda: numbers(kera, stream) or ended() is not None, "the first rows", FIRST_ROWS_S)
        assert ended() is None, self.errors()

    def ends(self, end: str) -> None:
        """Make it end, and check its exit code."""
        if end.startswith("SIG"):
            self.process.send_signal(getattr(signal, end))
        else:
            assert self.process.stdin is not None
            self.process.stdin.close()
        assert self.process.wait(END_S) == CODES[end], self.errors()

    def errors(self) -> str:
        return self.log.read_text()[-4000:]


@contextmanager
def program(kera: Kera, end: str, stream: str, folder: Path) -> Iterator[Program]:
    """Run a program; its processes end with the block, Spark's Python workers a moment later."""
    argv = [sys.executable, "-m", "tests.spark.ending_writer", kera.engine, end, kera.bootstrap, stream]
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*argv, str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Program(process, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the JVM outlives the program for a moment


@turns("python-returns", "columnar-fails", "python-exits", "columnar-SIGTERM")
def test_a_batch_is_complete_after_its_write_returned_however_the_program_ends(
    kera: Kera, stream: str, tmp_path: Path, end: str
) -> None:
    kera.create(stream, streamlets=2)
    (tmp_path / GO_ON).touch()
    with program(kera, end, stream, tmp_path) as running:
        running.has_written()
        running.ends(end)
    assert numbers(kera, stream) == ALL


@turns("python-SIGTERM", "columnar-SIGTERM")
def test_a_batch_interrupted_by_a_signal_is_an_error_and_complete_after_a_retry(
    kera: Kera, stream: str, tmp_path: Path, end: str
) -> None:
    kera.create(stream, streamlets=2)
    with program(kera, end, stream, tmp_path) as running:
        running.writes(kera, stream)
        running.ends(end)  # with an exit code other than 0
    assert numbers(kera, stream) != ALL
    (tmp_path / GO_ON).touch()
    write(kera, stream, tmp_path)
    assert numbers(kera, stream) == ALL
