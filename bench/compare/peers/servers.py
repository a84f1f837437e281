"""Processes of servers: on free ports, bound to this process's life, stopped when their block ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.compare.peers.install import Missing

HOST = "127.0.0.1"
START_S = 120.0
STOP_S = 20.0


def free_ports(count: int) -> list[int]:
    """Free ports."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


def bound(argv: Sequence[str]) -> list[str]:
    """The command, wrapped so that the kernel kills it when this process dies."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "KILL"] if setpriv else []), *argv]


@contextlib.contextmanager
def serving(
    name: str, argv: Sequence[str], log: Path, environment: dict[str, str] | None = None, *, ports: Sequence[int] = ()
) -> Iterator[int]:
    """The process id of a server that answers on its `ports`. Raises `Missing` when it does not."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            bound(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        for port in ports:
            _until_it_answers(name, process, port, log)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_it_answers(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Missing(f"{name} ended with {process.returncode}: {_end(log)}")
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        time.sleep(0.05)
    raise Missing(f"{name} did not answer within {START_S:.0f} s: {_end(log)}")


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
