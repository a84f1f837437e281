"""The planning process's side of delegation: it asks the process that keeps tokens, and starts it if necessary.

For Spark's synchronous code, from any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from io import BufferedRWPair
from typing import TYPE_CHECKING, Any

from kera.core.errors import Unavailable, error_from_wire
from kera.spark_connector.connection import TOKEN_LIFETIME_MS, Connection, Secret
from kera.spark_connector.delegation.driver import Driver, driver_of
from kera.spark_connector.delegation.protocol import settings_to_json
from kera.spark_connector.portal import ca_of, settings_of

if TYPE_CHECKING:
    from kera.client import ClientSettings

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 120.0
"""Longer than the client retries to reach the coordinator."""
RESOURCES_MAX = 64
"""Maximum number of resources that a token can be restricted to; see the coordinator."""
ALL_STREAMS = "stream:*"

_started: list[subprocess.Popen[bytes]] = []
"""Keepers that this process has started; they may outlive it."""


def resources_of(streams: Collection[str] | None) -> tuple[str, ...]:
    """Return the resources of a token for these streams; None: any stream, because rows name their streams.

    More than `RESOURCES_MAX` streams are covered by their common prefix, which may include other streams.
    """
    if streams is None:
        return (ALL_STREAMS,)
    names = sorted(set(streams))
    if len(names) > RESOURCES_MAX:
        first, last = names[0], names[-1]
        same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
        return (f"stream:{first[:same]}*",)
    return tuple(f"stream:{name}" for name in names)


def for_tasks(connection: Connection, streams: Collection[str] | None) -> Connection | None:
    """Return the connection for tasks that read or write `streams` (None: any), which is valid until the driver ends.

    None: tasks use `connection` itself, because it has no credentials to hide from executors. Raises the cluster's
    error if it issues no token.
    """
    with contextlib.closing(_Asking(hold=False)) as asking:
        return asking.for_tasks(connection, streams)


class Lease:
    """Does the same for a query that ends before the driver: when the lease is closed, or this process ends."""

    def __init__(self) -> None:
        self._asking = _Asking(hold=True)

    def for_tasks(self, connection: Connection, streams: Collection[str] | None) -> Connection | None:
        """Do what the function of this name does. A token for other streams from an earlier call is no longer renewed.

        Running tasks may still use the earlier token.
        """
        return self._asking.for_tasks(connection, streams)

    def close(self) -> None:
        """End the lease, because the query has ended."""
        self._asking.close()


def delegates(connection: Connection, settings: ClientSettings) -> bool:
    """Return whether executors need a token."""
    shown = (settings.user, settings.password, settings.password_file, settings.token, settings.token_file)
    return connection.token_lifetime_ms is not None or any(shown)


class _Asking:
    """A conversation with the keeper."""

    def __init__(self, *, hold: bool) -> None:
        self._hold = hold
        self._lock = threading.Lock()
        self._lines: BufferedRWPair | None = None
        self._socket: socket.socket | None = None

    def for_tasks(self, connection: Connection, streams: Collection[str] | None) -> Connection | None:
        settings = settings_of(connection)
        if not delegates(connection, settings) or (streams is not None and not streams):
            return None
        asked = {
            "bootstrap": connection.bootstrap,
            "settings": settings_to_json(settings),
            "resources": resources_of(streams),
            "lifetime_ms": connection.token_lifetime_ms or TOKEN_LIFETIME_MS,
            "hold": self._hold,
        }
        answer = self._answer(asked)
        error = answer.get("error")
        if error is not None:
            raise error_from_wire(error["code"], error["message"], error["attributes"])
        return connection.with_token(Secret(str(answer["token"])), ca_of(settings))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        for each in (self._lines, self._socket):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.close()
        self._lines = self._socket = None

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(asked).encode() + b"\n"
        with self._lock:
            for last in (False, True):
                try:
                    answer = self._exchanged(line)
                except OSError as error:
                    answer, reason = b"", str(error)
                else:
                    reason = "it has ended"
                if answer:
                    found: dict[str, Any] = json.loads(answer)
                    return found
                self._end()  # the next attempt may reach a newer keeper
                if last:
                    raise Unavailable(f"the process that keeps the tokens of executors does not answer: {reason}")
        raise AssertionError  # the loop has ended already

    def _exchanged(self, line: bytes) -> bytes:
        lines = self._lines
        if lines is None:
            self._socket = connected(driver_of(os.getpid()))
            lines = self._lines = self._socket.makefile("rwb")
        lines.write(line)
        lines.flush()
        return lines.readline()


def connected(driver: Driver) -> socket.socket:
    """Return a connection to the keeper of `driver`, and start the keeper if necessary. Raises `OSError`."""
    try:
        return _connected(driver)
    except ConnectionRefusedError:
        _start(driver)
        return _connected(driver)


def _connected(driver: Driver) -> socket.socket:
    from kera.core.rpc.unix_socket import peer_user  # late: Spark imports this to look for data sources

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(ANSWER_TIMEOUT_S)
        sock.connect(driver.keeper_address)
        if peer_user(sock) != os.geteuid():
            raise PermissionError("another user has taken the name of its socket")
    except BaseException:
        sock.close()
        raise
    return sock


def _start(driver: Driver) -> None:
    """Start a keeper, and wait until it, or another one, answers."""
    process = subprocess.Popen(  # noqa: S603 - this very Python
        [sys.executable, "-m", "kera.spark_connector.delegation", str(driver.process_id), driver.started],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # includes the paths that Spark adds
        start_new_session=True,  # the keeper must outlive this process, and signals to its group
    )
    _started.append(process)
    with process.stdout as output:  # type: ignore[union-attr]  # it is a pipe
        if not select.select([output], [], [], START_TIMEOUT_S)[0]:
            raise TimeoutError(f"it has not begun within {START_TIMEOUT_S:.0f} s")
        output.read()
