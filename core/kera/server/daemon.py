"""The life of a daemon's process: start, ready line, serve until told to stop, stop in bounded time, exit code.

A daemon gives `run_daemon` one asynchronous context manager: entering it starts everything and yields what others need
in order to reach it, leaving it stops everything. The rest is the same for every daemon, and is promised here:

* When it serves, ONE line goes to standard output: a JSON object with the keys ``ready`` (the daemon's name), ``pid``,
  and whatever was yielded. Nothing else is ever printed there; logs go to standard error.
* When it cannot start, or fails while it serves, the last line on standard error is ``kera: error: …``, for a person
  and for a supervisor that looks for the reason.
* SIGINT and SIGTERM stop it, during a slow start as well. A stop that takes longer than `STOP_TIMEOUT_S` ends the
  process the hard way: daemons keep nothing that a crash would spoil, so a late end is worse than a rough one.
* The exit code says which of these it was, see `ExitCode`.

A failure while serving reaches this place only as an exception, so background tasks of the daemon belong into an
`asyncio.TaskGroup` inside the context manager: one that fails cancels the wait here, and its exception comes out.

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
"""From the signal to the end of the process, below the 10 s after which container runtimes send SIGKILL. For what has
something to hand over or to write, in addition to the time for that."""
HANDOVER_MS = 10_000
"""How long the stop of a broker or a backup waits until others have gone on in its place, unless it is set."""
STOP_FLUSH_MS = 30_000
"""How long it may take to write what is in its memory to disk, likewise."""

GC_THRESHOLDS = 5_000, 4, 1_000
"""New objects that may be part of cycles, between looks at the youngest of them (Python's own choice is 700); so many
of these looks between those at what is left of them; so many of the latter between those at everything.

Everybody waits for a look, which takes some 0.5 ms for 1,000 objects. What a client has kept may be 100,000 new ones.
"""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ExitCode(enum.IntEnum):
    """The meaning of a daemon's exit code."""

    STOPPED = 0
    """It was told to stop, and did."""
    FAILED = 1
    """It failed while serving, did not stop in time, or has a defect."""
    NOT_STARTED = 2
    """A `StartError`: something around it must be changed first; starting it again changes nothing."""


def run_daemon(
    serve: Callable[[], AbstractAsyncContextManager[Mapping[str, Any]]],
    *,
    name: str,
    log_level: str = "info",
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """Run the daemon `name` from its start to its end, on uvloop, in the main thread; returns the exit code.

    See the head of this module for what `serve` is and what is promised.
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
    except Exception as error:  # noqa: BLE001 - whatever ends a daemon is told in the same way
        return _report(error)
    except KeyboardInterrupt:
        pass  # before our handler was there
    finally:
        deadline.cancel()  # only now: the loop's own end waits for tasks and threads, and is to be bounded as well
    log.info("stopped")
    return ExitCode.STOPPED


def run_from_environment(settings_class: type[SettingsT], run: Callable[[SettingsT], int]) -> int:
    """`run` with settings from the environment and the file that ``KERA_CONFIG`` names; returns the exit code."""
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
            return  # a supervisor's signal may follow the kernel's; the first one is on its way
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
        # The end of the loop puts handlers back that end the process: a signal that is repeated changes nothing.
        # Not after an error: then no deadline runs, and the first signal is to start it.
        if stop.is_set():
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _spare_garbage_collector() -> None:
    """Look for cycles seldom, and never among what is there by now: it is there until the end.

    Messages, futures and batches come and go by the hundred thousand, and hardly any is part of a cycle. It is called
    before the loop begins, as to look among all modules takes 30 ms, and again for what the start has made: by then
    others may wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _report(error: Exception) -> ExitCode:
    """Tell why the daemon ends: KerA's errors say what to do, others are defects and need their traceback."""
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
    # On a thread, and without cleaning up: what hangs may be the event loop itself.
    _write_error(f"did not stop within {stop_timeout_s:g} s")
    os._exit(ExitCode.FAILED)
