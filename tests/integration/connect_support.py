"""Shared by the tests of ``kera connect``: a cluster, copies as processes to kill, and the content of a stream."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pytest

from kera.client import Record
from kera.client.sync import Client
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.command_line import run_kera

COPY_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """One for each module: streams have plain names there, and brokers may be killed or restarted."""
    with LocalCluster.running(brokers=2, arena_bytes=128 * MIB, segment_bytes=512 * KIB) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[Client]:
    with Client(cluster.bootstrap) as client:
        yield client


@pytest.fixture
def copy(cluster: RunningCluster) -> Any:
    """Run a copy to its end; returns its exit code and its standard error."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        done = run_kera("connect", "copy", "--bootstrap", cluster.bootstrap, *arguments, env=env)
        return done.returncode, done.stderr.decode()

    return run


class Copy:
    """``kera connect copy`` as a process of its own."""

    def __init__(self, bootstrap: str, *arguments: str, log: IO[bytes], env: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kera.cli", "connect", "copy", "--json", "--bootstrap", bootstrap, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **(env or {})},
        )

    def event(self, kind: str) -> dict[str, Any]:
        """The next event of this kind."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found["event"] == kind:
                return found
        self._log.seek(0)
        raise AssertionError(f"the copy ended without {kind}: {self._log.read().decode()}")

    def kill(self) -> None:
        self._process.kill()
        self._wait()

    def terminate(self) -> int:
        self._process.terminate()
        return self._wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self) -> tuple[int, str]:
        """Its exit code and its standard error."""
        code = self._wait()
        self._log.seek(0)
        return code, self._log.read().decode()

    def _wait(self) -> int:
        assert self._process.stdout is not None
        self._process.stdout.read()
        return self._process.wait(COPY_TIMEOUT_S)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def copying(bootstrap: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None) -> Iterator[Copy]:
    with log.open("w+b") as file:
        copy = Copy(bootstrap, *arguments, log=file, env=env)
        try:
            yield copy
        finally:
            copy.stop()


def killed_again_and_again(bootstrap: str, *arguments: str, log: Path, times: int, seed: int) -> None:
    """Start a copy and kill it at a random moment, `times` times."""
    chance = random.Random(seed)
    for _ in range(times):
        with copying(bootstrap, *arguments, log=log) as copy:
            if chance.random() < 0.8:
                copy.event("began")
            pause_s = chance.random() ** 2
            end_s = time.monotonic() + pause_s
            while time.monotonic() < end_s:
                time.sleep(0.001)
            copy.kill()


def records(client: Client, stream: str) -> dict[int, list[Record]]:
    """All records of a stream, per streamlet in order."""
    found: dict[int, list[Record]] = {}
    with client.consumer(stream, start="earliest", end="latest") as consumer:
        for record in consumer:
            found.setdefault(record.streamlet, []).append(record)
    return found


def table(client: Client, stream: str) -> pa.Table:
    with client.consumer(stream, start="earliest", end="latest") as consumer:
        return consumer.to_arrow()


def has(client: Client, stream: str, count: int) -> None:
    """Wait until a stream has `count` records."""
    deadline = time.monotonic() + COPY_TIMEOUT_S
    while sum(each.next_record for entries in client.bounds(stream).values() for each in entries) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
