"""The standard streams of the command line: output that cannot be written is not a traceback.

A reader that has gone is no error. A full disk is one line `kera: error: …` and an exit code, and so is a standard
stream that is closed and that the command needs.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

EXIT_ERROR = 1
_closed: list[str] = []
"""The standard streams that were closed when the program began, and must not be used."""


def show(text: str, code: int, otherwise: int = EXIT_ERROR) -> int:
    """Write `text` behind what was printed; returns `code`, or `otherwise` if that fails. Nobody need read it."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        return not_written(error, otherwise)
    return code


def not_written(error: OSError, code: int) -> int:
    """Print that `error` has kept the output from being written; returns `code`."""
    silence_stdout()
    return fail(closed_stream(error) or f"cannot write the output: {error.strerror}", code)


def closed_stream(error: OSError) -> str | None:
    """The error line if `error` comes of a standard stream that was closed when the program began; else None."""
    return f"{' or '.join(_closed)} is closed" if _closed and error.errno == errno.EBADF else None


def open_standard_streams(*, required: bool = True) -> None:
    """Have all three: files that are opened later would take the places of those that are closed.

    `required`: reading a closed standard input, or writing to a closed standard output, is an error, so that nothing is
    lost silently. A closed standard error is not: errors have exit codes, too.
    """
    streams = [("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_RDWR)]
    for number, (name, mode, wrong_way) in enumerate(streams):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, wrong_way if required else os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
            if required and name != "stderr":
                _closed.append("standard input" if name == "stdin" else "standard output")
    # What the terminal's encoding does not have is shown in another way: no command fails of that.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in {"strict", "surrogateescape"}:
        sys.stdout.reconfigure(errors="backslashreplace")


def fail(message: str, code: int = EXIT_ERROR) -> int:
    """Print the error line; returns `code`."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):  # the exit code says it, too
        print(f"kera: error: {message}", file=sys.stderr, flush=True)
    return code


def warn(text: str) -> None:
    """Print what somebody should know, though the command does what it was asked for."""
    print(f"kera: warning: {text}", file=sys.stderr, flush=True)


def silence_stdout() -> None:
    """Nobody reads our output any more: keep the interpreter from complaining when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
