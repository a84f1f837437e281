"""Runs a command, and turns every outcome into an exit code and at most one line of text.

`run_app` runs the whole command line, `run_async` a command that needs an event loop. Context managers are
`interruptible` for a command without an event loop, `ended_by_signals` for a block that waits for a person's input,
`command_line` for a block that reads arguments, and `extra` for imports of packages that an optional extra installs.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import logging
import signal
import sys
from collections.abc import Coroutine, Iterator, MutableMapping
from typing import Any, TypeVar

import typer

from kera.cli._streams import EXIT_ERROR, closed_stream, fail, not_written, show, silence_stdout
from kera.core.errors import InvalidArgument, KeraError, StartError

T = TypeVar("T")

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT
TERMINATED = "terminated"
_OUTPUT_ERRORS = {errno.ENOSPC, errno.EIO, errno.EFBIG}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class UsageError(KeraError):
    """The command line is invalid; the message says which part."""

    code = "usage"


class MissingExtra(KeraError):
    """The command needs a package that is not installed."""

    code = "missing_extra"


@functools.cache
def command_of(app: typer.Typer) -> Any:
    """Return the commands of `app`; building them takes 50 ms, so a process does it once."""
    return typer.main.get_command(app)


def run_app(app: typer.Typer, arguments: list[str]) -> int:
    """Run the command that `arguments` name. Errors other than `KeraError` are raised: they are bugs."""
    command = command_of(app)
    try:
        result = command.main(arguments, prog_name="kera", standalone_mode=False)
    except KeraError as error:
        return fail(error.message, EXIT_USAGE if isinstance(error, (UsageError, StartError)) else EXIT_ERROR)
    except typer.Abort:
        return fail("not confirmed")
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # not from click, which exits with an error when the reader of a pipe has gone
        silence_stdout()
        return 0
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS and not closed_stream(error):
            raise
        return not_written(error, EXIT_ERROR)
    except Exception as error:
        # Typer's own errors know their text and exit code; they have no public base class.
        text = getattr(error, "format_message", None)
        if text is None:
            raise
        return _explain(error, text())
    return show("", result if isinstance(result, int) else 0)


def _with_hint(error: Exception, text: str) -> str:
    context = getattr(error, "ctx", None)
    text = text.rstrip()
    return f"{text} See {context.command_path} --help" if context and text.endswith(".") else text


def _explain(error: Exception, text: str) -> int:
    """Report a usage error of typer's."""
    if type(error).__name__ == "NoArgsIsHelpError":  # `kera stream` alone: its text is the help
        print(text, file=sys.stderr)
        return EXIT_USAGE
    return fail(_with_hint(error, text), getattr(error, "exit_code", EXIT_USAGE))


def run_async(coroutine: Coroutine[Any, Any, T], *, logged_from: int = logging.WARNING) -> T:
    """Run `coroutine` on uvloop. Ctrl-C cancels it, lets it clean up, and ends the command with code 130.

    SIGTERM and SIGHUP do the same, with their codes; the message of the cancellation is `TERMINATED` then.

    `logged_from`: the lowest level of libraries' log messages that are shown.
    """
    import asyncio

    import uvloop

    _configure_logging(logged_from)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_interruptible(coroutine))
    except _Signalled as signalled:
        raise typer.Exit(128 + signalled.number) from None


class _Signalled(BaseException):
    """A signal has ended the command, and the command has cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def _interruptible(coroutine: Coroutine[Any, Any, T]) -> T:
    """Cancel `coroutine` at SIGINT, SIGTERM or SIGHUP, and raise `_Signalled` when it has cleaned up.

    `asyncio.Runner` handles Ctrl-C, too, but with uvloop the exception now and then came in the middle of the work.
    """
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    got = 0

    def end(number: int) -> None:
        nonlocal got
        got = number
        if task is not None:
            task.cancel(None if number == signal.SIGINT else TERMINATED)

    for number in _ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        return await coroutine
    except asyncio.CancelledError:
        if got:
            raise _Signalled(got) from None
        raise
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context manager for the work of a command without an event loop: Ctrl-C ends it with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Context manager for a wait for typed input: a signal ends it. An event loop would handle it only afterwards."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in _ENDING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _configure_logging(level: int) -> None:
    """Print log messages of libraries from `level` up on standard error, in the form of our errors."""
    import structlog

    structlog.configure(
        processors=[structlog.processors.add_log_level, _log_line],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _log_line(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    level, text = event.pop("level"), event.pop("event")
    fields = " ".join(f"{name}={value}" for name, value in event.items())
    return f"kera: {level}: {text}" + (f" ({fields})" if fields else "")


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Context manager for reading arguments and the files that they name: it raises `UsageError` for invalid ones."""
    try:
        yield
    except InvalidArgument as error:
        raise UsageError(error.message, **error.attributes) from error


def check_insecure(option: str, host: str, *, insecure: bool) -> None:
    """Raise `UsageError` if --insecure has no effect, as only this host reaches `host`, the value of `option`."""
    import socket

    from kera.core.security.settings import is_on_this_host

    if not insecure:
        return
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return  # listening there fails with an error of its own
    if is_on_this_host(host):
        raise UsageError(f"--insecure has no effect at {host}, which only this host reaches: give another {option}")


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Context manager for imports: a missing package raises `MissingExtra`, which names the extra to install.

    That includes parts of `kera` from other distributions. A module that is missing in an installed part is a bug.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = ".".join((error.name or "kera").split(".")[:2])
        if package.partition(".")[0] == "kera" and importlib.util.find_spec(package) is not None:
            raise
        message = f"{error.name} is missing; install it with: pip install 'kera[{name}]'"
        raise MissingExtra(message, extra=name, module=error.name) from error
