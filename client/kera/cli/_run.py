"""Runs a command, and turns every outcome into an exit code and at most one line of text.

`run_app` is for the whole command line, `run_async` for a command that needs an event loop, `interruptible` for one
that needs none, `extra` for a block that imports what an optional extra installs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, MutableMapping
from typing import Any, TypeVar

import typer

from kera.core.errors import KeraError, StartError

T = TypeVar("T")

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


class UsageError(KeraError):
    """The command line makes no sense; the message says which part."""

    code = "usage"


class MissingExtra(KeraError):
    """A package is not installed that the command needs."""

    code = "missing_extra"


def run_app(app: typer.Typer, arguments: list[str]) -> int:
    """Run the command that `arguments` name. Errors other than `KeraError` are raised: they are bugs."""
    command = typer.main.get_command(app)
    try:
        result = command.main(arguments, prog_name="kera", standalone_mode=False)
    except KeraError as error:
        return fail(error.message, EXIT_USAGE if isinstance(error, (UsageError, StartError)) else EXIT_ERROR)
    except typer.Abort:
        return fail("not confirmed")
    except BrokenPipeError:
        silence_stdout()
        return 0
    except Exception as error:
        # Typer's own errors know their text and exit code; they have no public base class.
        text = getattr(error, "format_message", None)
        if text is None:
            raise
        return _explain(error, text())
    return result if isinstance(result, int) else 0


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


def fail(message: str, code: int = EXIT_ERROR) -> int:
    """Print the error line; returns `code`."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    print(f"kera: error: {message}", file=sys.stderr)
    return code


def silence_stdout() -> None:
    """Nobody reads our output any more: keep the interpreter from complaining when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_async(coroutine: Coroutine[Any, Any, T], *, logged_from: int = logging.WARNING) -> T:
    """Run on uvloop. Ctrl-C cancels `coroutine`, lets it clean up, and ends the command with code 130.

    `logged_from`: the level from which on what libraries log is shown.
    """
    import asyncio

    import uvloop

    _configure_logging(logged_from)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_interruptible(coroutine))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


async def _interruptible(coroutine: Coroutine[Any, Any, T]) -> T:
    """Cancel `coroutine` at Ctrl-C, and raise `KeyboardInterrupt` when it has cleaned up.

    `asyncio.Runner` does that, too; but with uvloop the interrupt was now and then raised in the middle of the work.
    """
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        if task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await coroutine
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Around the work of a command that needs no event loop: Ctrl-C ends it with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _configure_logging(level: int) -> None:
    """What libraries log from `level` up goes to standard error, in the form of our errors."""
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
def extra(name: str) -> Iterator[None]:
    """Around imports: a package that is missing is an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kera":
            raise
        message = f"{error.name} is missing; install it with: pip install 'kera[{name}]'"
        raise MissingExtra(message, extra=name, module=error.name) from error
