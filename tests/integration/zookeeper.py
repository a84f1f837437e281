"""A real ZooKeeper for tests, from the jars of Debian's package ``zookeeper``, on free ports: a server, or three."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from kera.core.security.issuing import Authority, Issued

JARS = Path("/usr/share/java")
JAR = JARS / "zookeeper.jar"
"""The manifest of this jar names the others."""
FOR_TLS = (JARS / "netty-codec.jar", JARS / "netty-resolver.jar")
"""Jars that the manifest lacks."""
MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
TICK_MS = 200
SYNC_TICKS = 300
"""In an ensemble: how long a server may be silent towards the leader, and the leader towards it."""
START_TIMEOUT_S = 60.0
PORT_ATTEMPTS = 5
PORTS = range(20_000, 32_000)
_PR_SET_PDEATHSIG = 1


def secured_by(authority: Authority, one: Issued) -> list[str]:
    """Settings of a server that has a certificate, and requires clients' certificates of the authority."""
    together = one.cert.with_name("zookeeper.pem")
    together.write_bytes(one.key.read_bytes() + one.cert.read_bytes())
    return [
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
        f"ssl.keyStore.location={together}",
        f"ssl.trustStore.location={authority.path}",
        "ssl.keyStore.type=PEM",
        "ssl.trustStore.type=PEM",
        "ssl.clientAuth=need",
    ]


class ZooKeeper:
    """One server, with its data in a directory: started by ``with``, and ended there, or when this process ends."""

    def __init__(
        self, directory: Path, *, server_id: int = 0, quorum: Sequence[str] = (), secure: Sequence[str] = ()
    ) -> None:
        """In an ensemble, this is server number `server_id` of `quorum`: the settings of the ensemble.

        `secure`: the settings of its certificates; with them, it also serves over TLS at `secure_address`.
        """
        if not JAR.exists():
            raise FileNotFoundError(f"{JAR} is not there: install ZooKeeper (sh scripts/zookeeper.sh does)")
        self._directory = directory
        self._server_id = server_id
        self._quorum = quorum
        self._secure = secure
        self._secure_port = 0
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        # For the kernel, the death of the thread that started a child is the death of its parent.
        self._parent = ThreadPoolExecutor(1, thread_name_prefix="zookeeper-parent")

    @property
    def address(self) -> str:
        """``host:port``; the same after a restart."""
        return f"127.0.0.1:{self._port}"

    @property
    def secure_address(self) -> str:
        """``host:port`` of the server's TLS port."""
        return f"127.0.0.1:{self._secure_port}"

    def start(self) -> None:
        """Start the server, and wait until it serves."""
        for _ in range(PORT_ATTEMPTS):
            port = self._port or _free_port()
            self._parent.submit(self._launch, port).result()
            if self._wait(port):
                self._port = port
                return
        raise AssertionError(f"ZooKeeper did not start:\n{self._log.read_text()[-4000:]}")

    @property
    def mode(self) -> str:
        """``standalone``, ``leader`` or ``follower``; empty while it does not serve."""
        return _mode(self._port)

    def stop(self) -> None:
        """End the server as in a crash; everything that it has acknowledged is on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Pause the server."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the server."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._parent.shutdown()

    @property
    def _log(self) -> Path:
        return self._directory / "zookeeper.log"

    def _launch(self, port: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = self._directory / "zoo.cfg"
        settings.write_text(
            f"tickTime={TICK_MS}\n"
            f"maxSessionTimeout={300 * TICK_MS}\n"
            f"dataDir={self._directory / 'data'}\n"
            f"clientPort={port}\n"
            "clientPortAddress=127.0.0.1\n"
            "admin.enableServer=false\n"
            "4lw.commands.whitelist=srvr\n"
            f"initLimit=100\nsyncLimit={SYNC_TICKS}\n" + "".join(f"{line}\n" for line in self._quorum)
        )
        if self._secure:
            self._secure_port = self._secure_port or _free_port()
            lines = (f"secureClientPort={self._secure_port}", "secureClientPortAddress=127.0.0.1", *self._secure)
            with settings.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
        (self._directory / "data").mkdir(exist_ok=True)
        (self._directory / "data" / "myid").write_text(f"{self._server_id}\n")
        home = os.environ.get("JAVA_HOME")
        java = shutil.which("java", path=f"{home}/bin") if home else None
        command = (
            *(java or "java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            *(
                "-Dzookeeper.jmx.log4j.disable=true",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                "-Dzookeeper.enforceQuota=true",
            ),
            *("-cp", ":".join(map(str, (JARS / "slf4j-simple.jar", JAR, *FOR_TLS))), MAIN, str(settings)),
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call of the kernel, which needs no lock
            )

    def _wait(self, port: int) -> bool:
        """Whether it serves; false if it has ended, as it does when another process has the port."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if _mode(port):
                return True
            time.sleep(0.02)
        self.stop()
        return False


def _mode(port: int) -> str:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as connection:
        connection.sendall(b"srvr")
        found = re.search(rb"^Mode: (\w+)", connection.makefile("rb").read(), re.MULTILINE)
        return found[1].decode() if found else ""
    return ""


class Ensemble:
    """Three servers: started by ``with``, and ended there, or when this process ends."""

    def __init__(self, directory: Path) -> None:
        quorum = [f"server.{number}=127.0.0.1:{_free_port()}:{_free_port()}" for number in (1, 2, 3)]
        self.servers = [
            ZooKeeper(directory / str(number), server_id=number, quorum=quorum) for number in range(1, len(quorum) + 1)
        ]

    @property
    def address(self) -> str:
        """The addresses of all servers, separated by commas."""
        return ",".join(server.address for server in self.servers)

    def leader(self) -> ZooKeeper:
        """The leading server."""
        return next(server for server in self.servers if server.mode == "leader")

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(len(self.servers)) as together:  # a single server does not serve
            list(together.map(ZooKeeper.start, self.servers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.__exit__(kind, error, traceback)


def _free_port() -> int:
    """A port outside the range from which the kernel gives ports to others while the server is away."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", secrets.choice(PORTS))) as server:
            return int(server.getsockname()[1])


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
