"""One child process: `Child` starts it, waits until it is ready, watches it, and ends it in bounded time.

A child is any program that prints one JSON object with the key ``ready`` as a line on its standard output
when it serves, logs to standard error, and stops on SIGTERM. `Child` promises:

* `start` returns the ready line, or raises `ChildStartError` with the reason from the child's log, and leaves
  no process behind when it raises;
* a child gets SIGTERM, and SIGKILL when the grace period is over, whether it serves (`stop`) or is still
  starting (`start` is cancelled, or its time is up): SIGTERM lets it remove the files that it has made so far;
* the child runs in its own session and gets none of the terminal's signals, so that the supervisor decides the
  order in which children stop; and it ends when the supervisor dies (see `kera.core.base.process`).

`kera.local.cluster` and `kera.local.node` decide what to start, and in which order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from kera.core.errors import InternalError, PathNotWritable, StartError

SUPERVISOR_PID_VARIABLE = "KERA_SUPERVISOR_PID"
"""Environment variable with the supervisor's process id: with it, a child notices a supervisor that died before the
child asked the kernel for a signal at its parent's death."""

READY_LINE_BYTES_MAX = 64 << 10
STARTING_GRACE_S = 10.0
"""Default time between SIGTERM and SIGKILL for a child that is still starting."""


TAIL_BYTES = 16 << 10
"""How much of the end of a log is read: a log may be large, and its end says why the process ended."""

_ERROR_PREFIX = "kera: error: "


def log_tail(path: Path, *, since: int = 0, lines: int = 15) -> str:
    """Return the last `lines` lines of the log after byte `since`, with JSON records rendered as text."""
    raw = _read_tail(path, since).splitlines()
    return "\n".join(_readable(line) for line in raw[-lines:])


def failure_reason(path: Path, *, since: int = 0) -> str | None:
    """Return the text of the last ``kera: error: …`` line after byte `since`: a daemon says there why it ends."""
    for line in reversed(_read_tail(path, since).splitlines()):
        if line.startswith(_ERROR_PREFIX):
            return line.removeprefix(_ERROR_PREFIX)
    return None


def _read_tail(path: Path, since: int) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _readable(line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    time = str(record.pop("timestamp", ""))[11:23]
    level = str(record.pop("level", ""))
    event = str(record.pop("event"))
    exception = record.pop("exception", None)
    fields = " ".join(f"{name}={value}" for name, value in record.items())
    text = " ".join(part for part in (time, level, event, fields) if part)
    return f"{text}\n{exception}" if exception else text


class ChildStartError(StartError):
    """A child process ended, or stayed silent, before it was ready. `attributes` has the tail of its log."""

    code = "child_start"


class Child:
    """One supervised process; can be started again after it has ended."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        on_death: Callable[[Child], None] | None = None,
    ) -> None:
        """`on_death` is called when a child that was ready ends without `stop` or `kill`."""
        self.name = name
        self.log_path = log_path
        self.ready: dict[str, Any] = {}
        """The ready line of the last start."""
        self.argv = list(argv)
        """The command line; may be changed between runs."""
        self._env = dict(env)
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        """Runs from ready to the end of the run, or until we end the child: `on_death` must not report that end."""
        self._log_start = 0
        """Length of the log when the current run began: earlier bytes belong to earlier runs."""

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def returncode(self) -> int | None:
        """Exit code of the last run, negative for a signal; None while it runs or before the first run."""
        return self._process.returncode if self._process is not None else None

    def describe_exit(self) -> str:
        """Return how the last run ended, in words."""
        code = self.returncode
        if code is None:
            return "has not ended"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines that this run has logged, rendered for reading."""
        return log_tail(self.log_path, since=self._log_start, lines=lines)

    async def start(self, *, ready_timeout_s: float, stop_grace_s: float = STARTING_GRACE_S) -> dict[str, Any]:
        """Run the program and wait for its ready line. Raises `ChildStartError` or `PathNotWritable`.

        `stop_grace_s`: time between SIGTERM and SIGKILL if the start fails, times out or is cancelled.
        """
        env = {**self._env, DIE_WITH_PARENT_VARIABLE: "1", SUPERVISOR_PID_VARIABLE: str(os.getpid())}
        with self._opened_log() as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
                limit=READY_LINE_BYTES_MAX,
            )
        try:
            self.ready = await asyncio.wait_for(self._read_ready(), ready_timeout_s)
        except TimeoutError:
            await self._give_up(stop_grace_s)
            raise self._start_error(f"was not ready within {ready_timeout_s:g} s") from None
        except BaseException:
            await self._give_up(stop_grace_s)
            raise
        self._watch = asyncio.create_task(self._watch_until_death())
        return self.ready

    def _opened_log(self) -> BinaryIO:
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            return self.log_path.open("ab")
        except OSError as error:
            raise PathNotWritable(
                f"cannot write log {self.log_path}: {error.strerror}; choose another directory for logs",
                path=str(self.log_path),
            ) from error

    async def stop(self, *, grace_s: float) -> bool:
        """End the child; False when it did not obey SIGTERM within `grace_s` and was killed."""
        await self._end_watch()
        pid = self.pid
        if pid is None:
            return True
        # `self._process.send_signal` would reap a process that has ended, and asyncio would miss its exit code.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a paused child does not handle SIGTERM before this
        try:
            await asyncio.wait_for(self._wait(), grace_s)
        except TimeoutError:
            obeyed = self.pid is None  # only a process that it has started holds its output open
            await self.kill()
            return obeyed
        return True

    async def kill(self) -> None:
        """End the child with SIGKILL and wait until it is gone."""
        await self._end_watch()
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # also its own children, which would hold our pipe open
            await self._wait()

    async def _give_up(self, grace_s: float) -> None:
        """End a child whose start has failed, timed out or been cancelled."""
        try:
            await self.stop(grace_s=grace_s)
        except BaseException:  # a second cancellation: the caller does not wait for the grace period
            await self.kill()
            raise

    def pause(self) -> None:
        """Suspend the child with SIGSTOP. It neither ends nor answers until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the child with SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is None or self._process is None:
            raise InternalError(f"{self.name} does not run")
        os.kill(self.pid, number)

    async def _wait(self) -> None:
        # A full pipe would block a child that prints more than its ready line, so read everything.
        process, stdout = self._run()
        while await stdout.read(READY_LINE_BYTES_MAX):
            pass
        await process.wait()

    def _run(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        if self._process is None or self._process.stdout is None:
            raise InternalError(f"{self.name} has not been started")
        return self._process, self._process.stdout

    async def _read_ready(self) -> dict[str, Any]:
        process, stdout = self._run()
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                raise self._start_error("printed an endless line in place of its ready line") from None
            if not line:
                await process.wait()
                raise self._start_error(self.describe_exit())
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict) and "ready" in message:
                    return message

    async def _watch_until_death(self) -> None:
        await self._wait()
        self._watch = None
        if self._on_death is not None:
            self._on_death(self)

    async def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            self._watch = None

    def _start_error(self, what: str) -> ChildStartError:
        tail = self.log_tail()
        reason = failure_reason(self.log_path, since=self._log_start)
        message = f"{self.name}: {reason}" if reason else f"{self.name} {what}"
        if not reason and tail:
            message += "\n" + tail
        return ChildStartError(message, child=self.name, log_path=str(self.log_path), log_tail=tail)
