"""The `kera` command within the process of the tests: what a plain command prints, without starting another Python."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from subprocess import CompletedProcess
from typing import IO
from unittest import mock

import structlog

from kera.cli.__main__ import main


def run_kera(*arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> CompletedProcess[bytes]:
    """Run a command that ends by itself, in the main thread; files stand in for the three standard streams.

    Tests of signals, pipes, terminals or the end of a process need a process of their own.
    """
    with contextlib.ExitStack() as stack:
        standard = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3)]
        os.pwrite(standard[0].fileno(), stdin, 0)
        stack.enter_context(mock.patch.dict(os.environ, env or {}))
        stack.enter_context(_standard_streams(*standard))
        code = main(list(arguments))
        return CompletedProcess(arguments, code, *map(_written, standard[1:]))


@contextlib.contextmanager
def _standard_streams(stdin: IO[str], stdout: IO[str], stderr: IO[str]) -> Iterator[None]:
    logging = structlog.get_config()  # of the process; a command sets its own
    with mock.patch.multiple(sys, stdin=stdin, stdout=stdout, stderr=stderr):
        try:
            yield
        finally:
            structlog.configure(**logging)


def _written(file: IO[str]) -> bytes:
    file.flush()
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
