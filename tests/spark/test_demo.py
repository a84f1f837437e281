"""The demo in its quick form: its check passes, and no process is left, even after an interrupt."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.spark.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MARK = "KERA_TEST_DEMO"


class Demo:
    """A run of the demo that marks all its processes, and has its own folder for files."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.output = folder / "output"
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "demo", "--check"],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[str]:
        """The running processes with the mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(" ".join(process.cmdline()))
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    demo.process.kill()
    demo.process.wait()


def test_the_demo_passes_its_check_and_leaves_no_process(demo: Demo, tmp_path: Path) -> None:
    code = demo.process.wait()

    output = demo.output.read_text()
    assert code == 0, output
    assert "✔ equal to the source" in output
    assert "20,000  flights, each of them once" in output
    assert demo.processes() == []
    assert [path.name for folder in tmp_path.glob("kera-demo-*") for path in folder.iterdir()] == ["logs"]


def test_an_interrupted_demo_stops_all_its_processes(demo: Demo) -> None:
    wait_until(
        lambda: "starting the query" in demo.output.read_text() or demo.process.poll() is not None, "the query", 120
    )
    running = demo.processes()
    demo.process.send_signal(signal.SIGINT)

    assert demo.process.wait() == 130, demo.output.read_text()
    assert len(running) > 4  # it was at work
    assert demo.processes() == []
