"""RabbitMQ streams: each partition is a stream; the client is the raw protocol on a socket.

Messages are published in sub-batch entries, as its Java client can, which is by far the fastest; at a rate each message
is alone. Streams never flush to disk before they confirm, and replicas need a cluster of RabbitMQ: only level leader is
supported.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.compare.contestant import Command, Role
from bench.compare.peers import rabbitmq_protocol as protocol
from bench.compare.peers.install import Missing, debian
from bench.compare.peers.peer import Peer, command, failing, names
from bench.compare.peers.rabbitmq_worker import TOGETHER
from bench.compare.peers.servers import HOST, free_ports, serving
from bench.compare.workload import Workload

PUBLISHERS_MAX = 255
"""Maximum of a connection's publishers, and so also of its subscriptions."""
SYSTEM = Path("/")


class RabbitMq(Peer):
    """See `bench.compare.contestant.Contestant`."""

    name = "rabbitmq"

    def __init__(self) -> None:
        self._root = SYSTEM

    def bring(self) -> None:
        """Fetch the server and Erlang: the system's, or Debian's below a folder; then Erlang's script needs the
        folder's path.
        """
        if not (shutil.which("erl") and any(SYSTEM.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*"))):
            self._root = debian("rabbitmq-server")
            launcher = self._root / "usr/lib/erlang/bin/erl"
            if not launcher.exists():
                raise Missing("there is no Erlang, or no RabbitMQ for it")
            script = launcher.read_text()
            if (moved := relocated(script, self._root)) != script:
                launcher.write_text(moved)
        self._home()

    def _home(self) -> Path:
        found = sorted(self._root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*"))
        if not found:
            raise Missing(f"there is no RabbitMQ below {self._root}")
        return found[-1]

    @property
    def title(self) -> str:
        """The title; with the version, once it was fetched."""
        return f"RabbitMQ streams {self.versions()['rabbitmq-server']} (raw protocol, entries of {TOGETHER} messages)"

    def versions(self) -> dict[str, str]:
        """Version of the server; there is no client but ours."""
        try:
            return {"rabbitmq-server": self._home().name.removeprefix("rabbitmq_server-")}
        except Missing:
            return {"rabbitmq-server": ""}

    def supports(self, workload: Workload) -> str | None:
        """Workloads of level leader, with no more streams than a connection can have."""
        if workload.durability == "persisted":
            return "RabbitMQ's streams confirm before they flush: there is no such setting"
        if workload.replicas:
            return "RabbitMQ's streams replicate by majorities in a cluster; the comparison has one node"
        if workload.partitions > PUBLISHERS_MAX:
            return f"a connection has at most {PUBLISHERS_MAX} publishers"
        return None

    def durability(self, workload: Workload) -> str:
        """The durability in RabbitMQ's words."""
        del workload
        return "one node, confirmed when it is in the page cache"

    @contextlib.contextmanager
    def start(self, workload: Workload, folder: Path) -> Iterator[Running]:
        """A node, and the name server that it needs."""
        port, names_port, distribution_port = free_ports(3)
        erlang = self._root / "usr/lib/erlang/bin"
        environment = {
            "PATH": f"{erlang}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder),  # for Erlang's cookie
            "ERL_EPMD_PORT": str(names_port),
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RUNNING_UNDER_SYSTEMD": "true",  # then the script becomes the server instead of its parent
        }
        (folder / "rabbitmq.conf").write_text(settings(port))
        (folder / "plugins").write_text("[rabbitmq_stream].\n")
        with contextlib.ExitStack() as stack:
            with failing():
                epmd = [str(erlang / "epmd"), "-port", str(names_port), "-address", HOST]
                stack.enter_context(serving("epmd", epmd, folder / "epmd.log", environment, ports=[names_port]))
                argv = [str(self._home() / "sbin/rabbitmq-server")]
                log = folder / "rabbitmq.log"
                pid = stack.enter_context(serving("rabbitmq-server", argv, log, environment, ports=[port]))
            yield Running(workload, port, {"rabbitmq": pid})


def relocated(script: str, root: Path) -> str:
    """Erlang's launcher, for the folder where Erlang is unpacked."""
    return script.replace("ROOTDIR=/usr/lib/erlang\n", f"ROOTDIR={root}/usr/lib/erlang\n")


def settings(port: int) -> str:
    """The node's configuration."""
    return "\n".join(
        [
            "listeners.tcp = none",
            f"stream.listeners.tcp.1 = {HOST}:{port}",
            f"stream.advertised_host = {HOST}",
            f"stream.advertised_port = {port}",
            "log.file = false",
            "log.console = true",
            "log.console.level = warning",
            "",
        ]
    )


class Running:
    """See `bench.compare.contestant.Running`."""

    def __init__(self, workload: Workload, port: int, pids: Mapping[str, int]) -> None:
        self._workload = workload
        self._port = port
        self._pids = pids
        self._streams: list[str] = []

    def processes(self) -> dict[str, int]:
        """The node."""
        return dict(self._pids)

    def prepare(self, number: int) -> None:
        """Create a stream for each partition."""
        with failing():
            connection = protocol.Stream(self._port)
            for name in self._streams:
                connection.request(protocol.DELETE, protocol.text(name))
            self._streams = names(self._workload, number)
            for name in self._streams:
                connection.request(protocol.CREATE, protocol.text(name) + struct.pack(">I", 0))
            connection.close()

    def worker(self, role: Role, index: int) -> Command:
        """A worker connected to the node."""
        del role, index
        return command("rabbitmq_worker", {"port": self._port, "streams": self._streams})
