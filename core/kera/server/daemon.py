"""The life of a daemon's process: start, ready line, serving until a signal, stop in bounded time, exit code.

A daemon passes `run_daemon` one asynchronous context manager: entering it starts everything and yields the addresses of
the daemon, leaving it stops everything. The rest is the same for every daemon:

* When it serves, ONE line goes to standard output: a JSON object with the keys ``ready`` (the daemon's name), ``pid``,
  and those that were yielded. Standard output has nothing else; logs go to standard error.
* If it cannot start, or fails while it serves, the last line on standard error is ``kera: error: …``, for people and
  for a supervisor that looks for the reason.
* SIGINT and SIGTERM stop it, even during a slow start. If a stop takes longer than `STOP_TIMEOUT_S`, the process is
  ended at once: no state of a daemon is damaged by a crash, so a late end is worse than a rough one.
* The exit code says which of these has happened, see `ExitCode`.

A failure while serving is seen here only as an exception, so background tasks of the daemon belong into an
`asyncio.TaskGroup` inside the context manager: a task that fails cancels the wait here, and its exception comes out.

    @asynccontextmanager
    async def serve() -> AsyncIterator[Mapping[str, Any]]:
        server = GrpcServer([service])
        port = await server.listen(settings.host, settings.port)
        try:
            yield {"grpc_address": f"{settings.host}:{port}"}
        finally:
            await server.close()

    sys.exit(run_daemon(serve, name="broker", log_level=settings.log_level))
"""

from __future__ import annotations

import asyncio
import enum
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import uvloop

from kera.core import native
from kera.core.base.process import OTHERS_WRITE, die_with_parent, own_files, raise_descriptor_limit
from kera.core.base.settings import KeraSettings
from kera.core.base.telemetry import configure_logging, get_logger
from kera.core.errors import KeraError, StartError
from kera.core.rpc.grpc_words import heard

__all__ = ["HANDOVER_MS", "STOP_FLUSH_MS", "STOP_TIMEOUT_S", "ExitCode", "run_daemon", "run_from_environment"]

log = get_logger("kera.daemon")

SettingsT = TypeVar("SettingsT", bound=KeraSettings)

STOP_TIMEOUT_S = 8.0
"""Maximum from the signal to the end of the process, below the 10 s after which container runtimes send SIGKILL.
Daemons that hand over or write data have additional time for that."""
HANDOVER_MS = 10_000
"""Default of how long the stop of a broker or a backup waits for others to take its place."""
STOP_FLUSH_MS = 30_000
"""Default of how long a broker or a backup may take to write its memory to disk at a stop."""

GC_THRESHOLDS = 5_000, 4, 1_000
"""Thresholds of the garbage collector: new objects between two collections of the youngest generation (Python's default
is 700), such collections between two of the middle generation, and those between two full ones.

All requests wait for a collection, which takes some 0.5 ms for 1,000 objects. A client may add 100,000 lasting objects.
"""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ExitCode(enum.IntEnum):
    """The meaning of a daemon's exit code."""

    STOPPED = 0
    """It was stopped by a signal."""
    FAILED = 1
    """It failed while serving, did not stop in time, or has a defect."""
    NOT_STARTED = 2
    """A `StartError`: its settings or environment must be changed first; just starting it again does not help."""


def run_daemon(
    serve: Callable[[], AbstractAsyncContextManager[Mapping[str, Any]]],
    *,
    name: str,
    log_level: str = "info",
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """Run the daemon `name` from its start to its end, on uvloop, in the main thread; return the exit code.

    The docstring of this module describes `serve`, and what is promised.
    """
    with heard():
        return _run(serve, name, log_level, stop_timeout_s)


def _run(
    serve: Callable[[], AbstractAsyncContextManager[Mapping[str, Any]]],
    name: str,
    log_level: str,
    stop_timeout_s: float,
) -> int:
    die_with_parent()
    own_files(closed_to_others=OTHERS_WRITE)
    raise_descriptor_limit()
    deadline = threading.Timer(stop_timeout_s, _end_process, (stop_timeout_s,))
    deadline.daemon = True
    try:
        configure_logging(log_level, daemon=name)
        _spare_garbage_collector()
        uvloop.run(_live(serve, name, deadline))
    except Exception as error:  # noqa: BLE001 - every error that ends a daemon is reported in the same way
        return _report(error)
    except KeyboardInterrupt:
        pass  # a signal before our handler was installed
    finally:
        deadline.cancel()  # only now, as the end of the loop waits for tasks and threads, and must be bounded as well
    log.info("stopped")
    return ExitCode.STOPPED


def run_from_environment(settings_class: type[SettingsT], run: Callable[[SettingsT], int]) -> int:
    """Call `run` with settings from the environment and the file in ``KERA_CONFIG``; return the exit code."""
    try:
        settings = settings_class.load()
    except StartError as error:
        _write_error(error.message)
        return ExitCode.NOT_STARTED
    return run(settings)


async def _live(
    serve: Callable[[], AbstractAsyncContextManager[Mapping[str, Any]]], name: str, deadline: threading.Timer
) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stop = asyncio.Event()
    serving = False

    def stop_asked(number: signal.Signals) -> None:
        if stop.is_set():
            return  # a second signal, as of a supervisor after the kernel's, changes nothing
        log.info("stopping", signal=number.name)
        deadline.start()
        stop.set()
        if not serving and task is not None:
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop_asked, number)
    try:
        async with serve() as ready:
            serving = True
            _spare_garbage_collector()
            log.info("ready", core=native.describe(), **ready)
            sys.stdout.write(json.dumps({"ready": name, "pid": os.getpid(), **ready}) + "\n")
            sys.stdout.flush()
            await stop.wait()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        # At the end of the loop, default handlers would be back, and a repeated signal would kill the process: so
        # signals are ignored from now on. Not after an error: no deadline runs then, and a signal has to be able to end
        # the process.
        if stop.is_set():
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _spare_garbage_collector() -> None:
    """Make garbage collection rare, and exclude all present objects from it, as they last until the end.

    Messages, futures and batches come and go by the hundred thousand, and hardly any of them is part of a cycle. This
    is called before the loop begins, as collecting among all modules takes 30 ms, and again for the objects that the
    start has made, since requests may wait from then on.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _report(error: Exception) -> ExitCode:
    """Report why the daemon ends: KerA's errors say what to do, others are defects and need their traceback."""
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]
    if isinstance(cause, KeraError):
        _write_error(cause.message)
        return ExitCode.NOT_STARTED if isinstance(cause, StartError) else ExitCode.FAILED
    log.error("failed", exc_info=error)
    _write_error(f"unexpected {type(cause).__name__}: {cause}")
    return ExitCode.FAILED


def _write_error(message: str) -> None:
    sys.stderr.write(f"kera: error: {' '.join(message.split())}\n")
    sys.stderr.flush()


def _end_process(stop_timeout_s: float) -> None:
    # On a thread, and without cleaning up, as the event loop itself may hang.
    _write_error(f"did not stop within {stop_timeout_s:g} s")
    os._exit(ExitCode.FAILED)
