"""A shell command that lets a test's cluster kill a daemon and start it again, for `kera check --kill`."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

STOP = "stop"


@contextlib.contextmanager
def killing_command(directory: Path, kill: Callable[[], str]) -> Iterator[str]:
    """The command: it runs `kill` in a thread of this process, prints its result, and fails if `kill` does."""
    request, reply = directory / "request", directory / "reply"
    for path in (request, reply):
        os.mkfifo(path)

    def serve() -> None:
        while request.read_text().strip() != STOP:
            try:
                text = f"0 {kill()}"
            except Exception as error:  # noqa: BLE001 - whatever it is, the command tells
                text = f"1 {error!r}"
            reply.write_text(text + "\n")

    thread = threading.Thread(target=serve, name="killing")
    thread.start()
    quoted = [shlex.quote(str(path)) for path in (request, reply)]
    try:
        yield f'echo kill > {quoted[0]}; read -r code text < {quoted[1]}; echo "$text"; exit $code'
    finally:
        request.write_text(STOP)
        thread.join()
