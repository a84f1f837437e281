"""Redis streams: each partition is a stream; the client is the raw protocol on a socket, and hiredis for reading.

The log (AOF) is on at all levels, since the other contestants write to files too: level leader syncs it once a second,
level persisted before each answer. Level replicated has as many replicas, and waits for them (WAIT) behind each batch.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.compare.contestant import Command, Failed, Role
from bench.compare.peers.install import Program, program, python_packages
from bench.compare.peers.peer import Peer, command, failing, names
from bench.compare.peers.redis_protocol import command as resp
from bench.compare.peers.servers import HOST, START_S, free_ports, serving
from bench.compare.workload import Workload

HIREDIS_VERSION = "3.5.0"


class Redis(Peer):
    """See `bench.compare.contestant.Contestant`."""

    name = "redis"

    def __init__(self) -> None:
        self._program: Program | None = None
        self._client = Path()

    def bring(self) -> None:
        """Fetch the server, from ``PATH`` or Debian, and hiredis."""
        self._program = program("redis-server", "redis-server")
        self._client = python_packages(f"hiredis=={HIREDIS_VERSION}")

    @property
    def title(self) -> str:
        """The title; with the version, once it was fetched."""
        return f"Redis streams {self.versions()['redis-server']} (raw protocol)"

    def versions(self) -> dict[str, str]:
        """Versions of the server, and of the reading library."""
        words = self._program.version().split() if self._program else []
        version = next((word.removeprefix("v=") for word in words if word.startswith("v=")), "")
        return {"redis-server": version, "hiredis": HIREDIS_VERSION}

    def supports(self, workload: Workload) -> str | None:
        """All workloads."""
        del workload
        return None

    def durability(self, workload: Workload) -> str:
        """The durability in Redis's words."""
        sync = "always" if workload.durability == "persisted" else "everysec"
        return f"appendonly yes, appendfsync {sync}" + (f", WAIT {workload.replicas}" if workload.replicas else "")

    @contextlib.contextmanager
    def start(self, workload: Workload, folder: Path) -> Iterator[Running]:
        """A leader, and its replicas."""
        assert self._program is not None  # noqa: S101 - started only with the program
        ports = free_ports(1 + workload.replicas)
        with contextlib.ExitStack() as stack:
            with failing():
                pids = {}
                for number, port in enumerate(ports):
                    name = f"redis-{number + 1}"
                    data = folder / name
                    data.mkdir()
                    config = folder / f"{name}.conf"
                    always = workload.durability == "persisted"
                    config.write_text(settings(port, data, sync_always=always, leader=ports[0] if number else None))
                    argv = [str(self._program.path), str(config)]
                    log, environment = folder / f"{name}.log", self._program.environment()
                    pids[name] = stack.enter_context(serving("redis-server", argv, log, environment, ports=[port]))
                running = Running(workload, ports[0], pids, str(self._client))
                running.until(f"connected_slaves:{workload.replicas}", "replication")
                if workload.replicas:
                    running.until("state=online", "replication")
            yield running


def settings(port: int, folder: Path, *, sync_always: bool, leader: int | None) -> str:
    """The configuration of the server at `port`: a replica of the server at port `leader`, if given."""
    lines = [
        f"bind {HOST}",
        f"port {port}",
        f"dir {folder}",
        'save ""',
        "appendonly yes",
        f"appendfsync {'always' if sync_always else 'everysec'}",
        "auto-aof-rewrite-percentage 0",
        "stream-node-max-entries 1000",
        "stream-node-max-bytes 64kb",
        "client-output-buffer-limit replica 0 0 0",
        "repl-diskless-sync-delay 0",
        "repl-backlog-size 64mb",
    ]
    if leader is not None:
        lines.append(f"replicaof {HOST} {leader}")
    return "\n".join(lines) + "\n"


class Running:
    """See `bench.compare.contestant.Running`."""

    def __init__(self, workload: Workload, port: int, pids: Mapping[str, int], client: str) -> None:
        self._workload = workload
        self._port = port
        self._pids = pids
        self._client = client
        self._streams: list[str] = []

    def processes(self) -> dict[str, int]:
        """The servers."""
        return dict(self._pids)

    def prepare(self, number: int) -> None:
        """Empty the server and its log: the first write to a stream creates it."""
        with failing():
            self._ask(b"FLUSHALL")
            self._ask(b"BGREWRITEAOF")
            self.until("aof_rewrite_in_progress:0", "persistence")
        self._streams = names(self._workload, number)

    def worker(self, role: Role, index: int) -> Command:
        """A worker connected to the leader."""
        del role, index
        return command("redis_worker", {"port": self._port, "streams": self._streams}, self._client)

    def until(self, words: str, section: str) -> None:
        """Wait until INFO has these words."""
        deadline = time.monotonic() + START_S
        while words not in self._ask(b"INFO", section.encode()):
            if time.monotonic() > deadline:
                raise Failed(f"Redis has not come to {words}")
            time.sleep(0.1)

    def _ask(self, *words: bytes) -> str:
        """The answer to one command; a simple one, or a string of some kilobytes."""
        with socket.create_connection((HOST, self._port), timeout=START_S) as connected:
            connected.sendall(resp(*words) + resp(b"QUIT"))
            answer = b"".join(iter(lambda: connected.recv(1 << 16), b"")).decode()
        if answer.startswith("-"):
            raise ValueError(answer.strip())
        return answer
