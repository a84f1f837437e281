"""Shared by the peers' contestants."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from bench.compare.contestant import Command, Failed
from bench.compare.peers.install import Missing
from bench.compare.workload import Workload


class Peer:
    """A server system that this process can fetch and start."""

    @property
    def title(self) -> str:
        """Name and version of the server, and the name of the client."""
        raise NotImplementedError

    def bring(self) -> None:
        """Fetch all dependencies. Raises `Missing`."""
        raise NotImplementedError

    def missing(self) -> str | None:
        """See `bench.compare.contestant.Contestant`."""
        try:
            self.bring()
        except Missing as error:
            return str(error)
        return None


def command(module: str, settings: dict[str, Any], python_path: str | None = None) -> Command:
    """A worker that is a module beside this one, with a folder of clients on its path."""
    ours = os.environ.get("PYTHONPATH")
    paths = [path for path in (ours, python_path) if path]
    environment = {"PYTHONPATH": os.pathsep.join(paths)} if python_path else {}
    return Command([sys.executable, "-m", f"bench.compare.peers.{module}"], settings, environment)


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Turn errors of a server into `Failed`."""
    try:
        yield
    except Failed:
        raise
    except Exception as error:
        raise Failed(f"{type(error).__name__}: {error}") from error  # any error of a client is for the report


def names(workload: Workload, number: int) -> list[str]:
    """Names of all partitions in round `number`, stream by stream, if each partition is a stream."""
    return [
        f"round-{number}-{stream}-{streamlet}"
        for stream in range(workload.streams)
        for streamlet in range(workload.streamlets)
    ]
