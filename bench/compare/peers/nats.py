"""NATS JetStream: each partition is a stream in files with one subject; the client is the raw protocol on a socket.

Level leader is one server with the default sync interval. Level replicated is a cluster of as many servers as there are
copies, with as many replicas, all of which have to agree if there are two. Level persisted is ``sync_interval:
always``, which flushes each message before the next; so it is used with atomic batches, which are flushed as a whole.
They came with 2.12: an older server says so in `Nats.supports`. Without Go to build the wanted server, Debian's is
used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.compare.contestant import Command, Failed, Role
from bench.compare.peers.install import Missing, Program, go_program, program
from bench.compare.peers.nats_protocol import Nats as Connection
from bench.compare.peers.peer import Peer, command, failing, names
from bench.compare.peers.servers import HOST, START_S, free_ports, serving
from bench.compare.workload import Workload

MODULE, VERSION = "github.com/nats-io/nats-server/v2", "v2.15.2"
ATOMIC_SINCE = (2, 12)
PATIENCE_S = 1.0
"""The time-out for a cluster without a leader, which does not answer."""


class Nats(Peer):
    """See `bench.compare.contestant.Contestant`."""

    name = "nats"

    def __init__(self) -> None:
        self._program: Program | None = None

    def bring(self) -> None:
        """Fetch the server, from ``PATH``, Go or Debian."""
        try:
            self._program = go_program("nats-server", MODULE, VERSION)
        except Missing:
            self._program = program("nats-server", "nats-server")

    @property
    def title(self) -> str:
        """The title; with the version, once it was fetched."""
        return f"NATS JetStream {self._version()} (raw protocol)".replace("  ", " ")

    def versions(self) -> dict[str, str]:
        """Version of the server; there is no client but ours."""
        return {"nats-server": self._version()}

    def _version(self) -> str:
        return self._program.version().rsplit(" ", 1)[-1].removeprefix("v") if self._program else ""

    def supports(self, workload: Workload) -> str | None:
        """All workloads; level persisted only since version 2.12."""
        version = tuple(int(number) for number in self._version().split(".")[:2])
        if workload.durability == "persisted" and version < ATOMIC_SINCE:
            return f"nats-server {self._version()} has no atomic batches: it would flush each message alone"
        return None

    def durability(self, workload: Workload) -> str:
        """The durability in NATS's words."""
        copies = f"R={1 + workload.replicas} in a cluster of {1 + workload.replicas}" if workload.replicas else "R=1"
        persisted = workload.durability == "persisted"
        interval = "always, atomic batches" if persisted else "2 min (the default)"
        return f"{copies}, file storage, sync_interval {interval}"

    @contextlib.contextmanager
    def start(self, workload: Workload, folder: Path) -> Iterator[Running]:
        """As many servers as there are copies."""
        assert self._program is not None  # noqa: S101 - started only with the program
        servers = 1 + workload.replicas
        free = free_ports(2 * servers)
        ports, routes = free[:servers], free[servers:]
        with contextlib.ExitStack() as stack:
            with failing():
                pids = {}
                for number, port in enumerate(ports):
                    name = f"nats-{number + 1}"
                    config = folder / f"{name}.conf"
                    always = workload.durability == "persisted"
                    config.write_text(settings(number, ports, routes, folder / name, sync_always=always))
                    argv = [str(self._program.path), "-c", str(config)]
                    pids[name] = stack.enter_context(serving("nats-server", argv, folder / f"{name}.log", ports=[port]))
            running = Running(workload, ports, pids)
            running.until_it_is_elected()
            yield running


def settings(number: int, ports: Sequence[int], routes: Sequence[int], folder: Path, *, sync_always: bool) -> str:
    """The configuration of server `number`."""
    lines = [
        f"server_name: nats-{number + 1}",
        f"host: {HOST}",
        f"port: {ports[number]}",
        f'jetstream {{ store_dir: "{folder}", max_file_store: 60GB' + ", sync_interval: always" * sync_always + " }",
    ]
    if len(ports) > 1:
        others = ", ".join(f"nats-route://{HOST}:{port}" for each, port in enumerate(routes) if each != number)
        lines.append(f"cluster {{ name: bench, listen: {HOST}:{routes[number]}, routes: [{others}] }}")
    return "\n".join(lines) + "\n"


class Running:
    """See `bench.compare.contestant.Running`."""

    def __init__(self, workload: Workload, ports: Sequence[int], pids: Mapping[str, int]) -> None:
        self._workload = workload
        self._ports = ports
        self._pids = pids
        self._streams: list[str] = []
        self._leader_port = ports[0]

    def processes(self) -> dict[str, int]:
        """The servers."""
        return dict(self._pids)

    def until_it_is_elected(self) -> None:
        """Wait until the servers are a cluster that can create streams."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                with self._connected(PATIENCE_S) as nats:
                    nats.request("STREAM.CREATE.first", self._config("first"))
                    nats.request("STREAM.DELETE.first")
                return
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise Failed(f"NATS has no leader: {error}") from error
                time.sleep(0.2)

    def prepare(self, number: int) -> None:
        """Create a stream for each partition."""
        with failing(), self._connected() as nats:
            for name in self._streams:
                nats.request(f"STREAM.DELETE.{name}")
            self._streams = names(self._workload, number)
            for name in self._streams:
                nats.request(f"STREAM.CREATE.{name}", self._config(name))
            cluster = nats.request(f"STREAM.INFO.{self._streams[0]}").get("cluster", {})
        leader = cluster.get("leader", next(iter(self._pids)))
        self._leader_port = self._ports[list(self._pids).index(leader)]

    def worker(self, role: Role, index: int) -> Command:
        """A worker connected to the server that leads the first stream."""
        del role, index
        return command("nats_worker", {"port": self._leader_port, "streams": self._streams})

    @contextlib.contextmanager
    def _connected(self, timeout_s: float = START_S) -> Iterator[Connection]:
        nats = Connection(self._ports[0], timeout_s)
        try:
            yield nats
        finally:
            nats.close()

    def _config(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "subjects": [name],
            "storage": "file",
            "num_replicas": 1 + self._workload.replicas,
            "retention": "limits",
            "discard": "old",
            **({"allow_atomic": True} if self._workload.durability == "persisted" else {}),
        }
