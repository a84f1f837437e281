"""Worker processes as the parent process sees them, and the cost of any process: processor time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil

from bench.compare.contestant import Command, Failed
from bench.compare.worker import Task, peak_rss_bytes
from bench.cpu import run_s
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE

ROOT = Path(__file__).parents[2]
LOG_TAIL = 1000
"""Characters of a failed worker's errors that are reported."""


class Process:
    """A worker. `bench.compare.worker` is the other side of the dialogue."""

    def __init__(self, task: Task, command: Command, log: Path) -> None:
        self.task = task
        self.seen = 0
        """A consumer's records, by its last report."""
        self._log = log
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **command.env, DIE_WITH_PARENT_VARIABLE: "1"},
                start_new_session=True,  # Ctrl-C is for this process, which ends them
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.tell(task.model_dump_json())

    @property
    def name(self) -> str:
        """The name among the workers of a round."""
        return f"{'producer' if self.task.role == 'produce' else 'consumer'}-{self.task.index}"

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Send it a line. If it has ended, the caller that waits for its answer finds out."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Its next answer. Raises `Failed`."""
        try:
            message = self._answers.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise Failed(f"{self.name} did not answer in time{self._tail()}") from None
        if message is None:
            raise Failed(f"{self.name} ended with {self._process.wait()}{self._tail()}")
        if "error" in message:
            raise Failed(f"{self.name} failed: {message['error']}")
        return message

    def _tail(self) -> str:
        text = self._log.read_text(errors="replace").strip()[-LOG_TAIL:]
        return f": {text}" if text else ""

    def _read(self) -> None:
        for line in self._process.stdout or ():
            try:
                message = dict(json.loads(line))
            except (ValueError, TypeError):
                message = {"error": f"wrote to standard output, which is for answers: {line.strip()}"}
            if message.keys() == {"seen"}:
                self.seen = message["seen"]
            else:
                self._answers.put(message)
        self._answers.put(None)

    def end(self) -> None:
        """End the process and all its descendants, whatever they are doing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def cpu_s(pid: int) -> float:
    """Processor time so far of a process and its descendants."""
    total_s = 0.0
    for each in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            times = each.cpu_times()
            # One counts in ticks of 10 ms; the other in nanoseconds, but without ended threads.
            total_s += max(times.user + times.system, run_s(each.pid))
    return total_s


def memory(pid: int) -> dict[str, int]:
    """Bytes in RAM of a process and its descendants: ``peak`` since `forget_peak`, and the current shared memory in
    it.
    """
    found = {"peak": 0, "shared": 0}
    for each in _tree(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found["peak"] += peak_rss_bytes(each.pid)
            found["shared"] += _status(each.pid).get("RssShmem", 0)
    return found


def forget_peak(pid: int) -> None:
    """Let the kernel measure the peak of a process and its descendants from now on."""
    for each in _tree(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{each.pid}/clear_refs").write_text("5")


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
