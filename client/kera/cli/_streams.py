"""The standard streams of the command line: output that cannot be written does not cause a traceback.

A closed pipe is no error. A full disk, or a closed standard stream that the command needs, ends it with one line
`kera: error: …` and an exit code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

EXIT_ERROR = 1
_closed: list[str] = []
"""Names of the standard streams that were closed when the program began, and must not be used."""


def show(text: str, code: int, otherwise: int = EXIT_ERROR) -> int:
    """Write `text` and flush standard output; return `code`, or `otherwise` if that fails. A closed pipe is fine."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        return not_written(error, otherwise)
    return code


def not_written(error: OSError, code: int) -> int:
    """Print that the output could not be written because of `error`; return `code`."""
    silence_stdout()
    return fail(closed_stream(error) or f"cannot write the output: {error.strerror}", code)


def closed_stream(error: OSError) -> str | None:
    """Return the error line if `error` is from a standard stream that was closed when the program began; else None."""
    return f"{' or '.join(_closed)} is closed" if _closed and error.errno == errno.EBADF else None


def open_standard_streams(*, required: bool = True) -> None:
    """Open standard streams that are closed: otherwise, files that are opened later would get their descriptors.

    `required`: reading a closed standard input, or writing to a closed standard output, is an error, so that nothing is
    lost silently. Writing to a closed standard error is not: errors have exit codes, too.
    """
    streams = [("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_RDWR)]
    for number, (name, mode, wrong_way) in enumerate(streams):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, wrong_way if required else os.O_RDWR)  # gets the lowest free number, this one
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
            if required and name != "stderr":
                _closed.append("standard input" if name == "stdin" else "standard output")
    # Characters that the terminal's encoding lacks are escaped, so that no command fails because of them.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in {"strict", "surrogateescape"}:
        sys.stdout.reconfigure(errors="backslashreplace")


def fail(message: str, code: int = EXIT_ERROR) -> int:
    """Print the error line; return `code`."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):  # the exit code reports the error, too
        print(f"kera: error: {message}", file=sys.stderr, flush=True)
    return code


def warn(text: str) -> None:
    """Print a warning; the command goes on."""
    print(f"kera: warning: {text}", file=sys.stderr, flush=True)


def silence_stdout() -> None:
    """Send further output to /dev/null, so that the interpreter does not fail when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
