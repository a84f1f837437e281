"""The process that keeps tokens: it answers planning processes, and ends when the driver has ended.

It listens on an abstract unix socket with the driver in its name, speaks ``protocol``, and accepts only processes of
the same user. A second keeper for a driver finds the name taken, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kera.core.errors import InternalError, KeraError, error_to_attributes
from kera.core.rpc.unix_socket import peer_user
from kera.spark_connector.delegation.driver import Driver
from kera.spark_connector.delegation.protocol import settings_from_json
from kera.spark_connector.delegation.tokens import Need, Owner, Tokens

if TYPE_CHECKING:
    from kera.client import Client

LOOK_S = 0.5
"""Interval between checks whether the driver still runs."""
LINE_BYTES_MAX = 1 << 20

log = logging.getLogger(__name__)


async def connect(owner: Owner) -> Client:
    """Connect with the driver's settings."""
    from kera.client import Client

    return await Client.connect(owner.bootstrap, owner.settings)


def listen(driver: Driver) -> socket.socket | None:
    """Open the socket for the driver's processes, and return it; None: another keeper has it. Raises `OSError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(driver.keeper_address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    sock.listen(socket.SOMAXCONN)
    return sock


async def keep(driver: Driver, sock: socket.socket, tokens: Tokens, *, look_s: float = LOOK_S) -> None:
    """Answer until the driver has ended, and then revoke all tokens."""
    asking: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            asking.add(task)
            task.add_done_callback(asking.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await _converse(tokens, reader, writer)
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=sock, limit=LINE_BYTES_MAX)
    try:
        while driver.lives():  # noqa: ASYNC110 - there is no event for its end
            await asyncio.sleep(look_s)
    finally:
        server.close()
        for task in asking:
            task.cancel()
        await tokens.close()


async def _converse(tokens: Tokens, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if peer_user(writer.get_extra_info("socket")) != os.geteuid():
        return
    conversation = object()
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:
                return  # the line is too long, so the peer is no planning process
            if not line:
                return
            writer.write(json.dumps(await _answer(tokens, line, conversation)).encode() + b"\n")
            await writer.drain()
    finally:
        await asyncio.shield(tokens.release(conversation))


async def _answer(tokens: Tokens, line: bytes, conversation: Hashable) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        owner = Owner(str(asked["bootstrap"]), settings_from_json(asked["settings"]))
        need = Need(owner, tuple(asked["resources"]), int(asked["lifetime_ms"]))
        return {"token": await tokens.token(need, conversation if asked["hold"] else need)}
    except KeraError as error:
        return {"error": _error(error)}
    except Exception as error:  # the peer gets an answer for any error
        # Errors about settings show their values, which may include a password.
        log.error("a token was not given: %s", type(error).__name__, exc_info=not isinstance(error, ValueError))
        return {"error": _error(InternalError(f"a token was not given: {type(error).__name__}"))}


def _error(error: KeraError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "attributes": error_to_attributes(error)}


def run(driver: Driver, ready: int) -> None:
    """Run the process. It closes the descriptor `ready` when it answers, or when another keeper does."""
    sock = listen(driver)
    if sock is None:
        os.close(ready)
        return
    with sock:
        os.close(ready)
        asyncio.run(keep(driver, sock, Tokens(connect)))
