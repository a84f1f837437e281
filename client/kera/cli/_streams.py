"""The standard streams of the command line: output that cannot be written is no traceback.

A reader that has gone is no error. A full disk is one line `kera: error: …` and an exit code.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

EXIT_ERROR = 1


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
    return fail(f"cannot write the output: {error.strerror}", code)


def open_standard_streams() -> None:
    """Have all three: files that are opened later would take the places of those that are closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, open(number, "r+" if number else "r", closefd=False))  # noqa: SIM115
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


def silence_stdout() -> None:
    """Nobody reads our output any more: keep the interpreter from complaining when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
