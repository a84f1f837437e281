"""A real PostgreSQL for tests: a cluster in a directory of its own, reached by a Unix socket in it, without a port."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import pytest

from tests.integration.zookeeper import _die_with_parent

START_TIMEOUT_S = 60.0
USER = "kera"
SETTINGS = (
    *("listen_addresses=", "fsync=off", "max_connections=50", "shared_buffers=32MB", "wal_level=logical"),
    "max_replication_slots=100",  # tests share a server, and copies of changes keep their slots
)


def programs() -> Path | None:
    """The programs of the newest version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


def postgres_or_skip() -> Postgres:
    """A server that has not been started; skips where there cannot be one."""
    found = programs()
    if found is None:
        pytest.skip("there is no PostgreSQL: sh scripts/postgres.sh installs it")
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no setpriv to be somebody else")
    return Postgres(found)


class Postgres:
    """One server: started by ``with``, and ended there, or when this process ends."""

    def __init__(self, found: Path) -> None:
        self._programs = found
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = ThreadPoolExecutor(1, thread_name_prefix="postgres-parent")
        # Not pytest's directory: only its owner may enter that, and a socket's path has to be short.
        self._directory = Path(tempfile.mkdtemp(prefix="kera-pg-"))

    def url(self, table: str, database: str = "postgres", **more: str) -> str:
        """The address of a table for ``kera connect copy``."""
        parameters = "".join(f"&{name}={value}" for name, value in more.items())
        return f"postgresql://{USER}@/{database}?host={self._directory}&table={table}{parameters}"

    def __enter__(self) -> Self:
        data = self._directory / "data"
        if os.geteuid() == 0:
            owner = pwd.getpwnam("nobody")
            os.chown(self._directory, owner.pw_uid, owner.pw_gid)
        init = ("initdb", "-D", str(data), "-A", "trust", "-U", USER, "-E", "UTF8", "--no-sync", "--locale=C")
        subprocess.run(self._command(*init), check=True, capture_output=True)
        if not self._start():
            raise AssertionError(f"PostgreSQL did not start:\n{(self._directory / 'log').read_text()[-4000:]}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._parent.shutdown()
        shutil.rmtree(self._directory)

    def _command(self, program: str, *arguments: str) -> tuple[str, ...]:
        path = str(self._programs / program)
        if os.geteuid() != 0:
            return (path, *arguments)
        owner = pwd.getpwnam("nobody")
        return ("setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups", path, *arguments)

    def _start(self) -> bool:
        self._parent.submit(self._launch, self._directory / "data").result()
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.run("SELECT 1")
            except adbc_driver_manager.Error:
                time.sleep(0.02)
            else:
                return True
        self._stop()
        return False

    def stop(self) -> None:
        """Stop as after a loss of power: all processes end at once, and the next start recovers."""
        self._stop()

    def start(self) -> None:
        """Start again after `stop` or `kill`, as soon as the earlier processes are gone."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._start():
            assert time.monotonic() < deadline, (self._directory / "log").read_text()[-4000:]

    def kill(self) -> None:
        """Kill only the first process, with SIGKILL: the others notice that."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def _launch(self, data: Path) -> None:
        settings = [part for each in SETTINGS for part in ("-c", each)]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", str(data), "-k", str(self._directory), *settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call of the kernel, which needs no lock
            )

    def _stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(3)  # SIGQUIT: at once, with all its processes
            self._process.wait()
            self._process = None

    # -- operations for tests -------------------------------------------------------------------------------------

    def connect(self, database: str = "postgres") -> Any:
        return adbc.connect(f"postgresql://{USER}@/{database}?host={self._directory}")

    def run(self, *statements: str) -> None:
        with self.connect() as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            connection.commit()

    def rows(self, query: str) -> Sequence[tuple[Any, ...]]:
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())

    def waits_for(self, query: str, value: Any) -> None:
        """Wait until a query gives this value."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := self.rows(query)) != [(value,)]:
            assert time.monotonic() < deadline, f"{query}: {found}, not {value}"
            time.sleep(0.02)
