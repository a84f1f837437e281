"""The process that keeps tokens: it answers planning processes, and ends when the driver has ended.

It listens at an abstract unix socket that is named after the driver (``protocol``), and takes nobody but processes of
its own user. A second process for a driver finds the name taken, and ends.
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
"""Between two looks whether the driver is still there."""
LINE_BYTES_MAX = 1 << 20

log = logging.getLogger(__name__)


async def connect(owner: Owner) -> Client:
    """As the driver does."""
    from kera.client import Client

    return await Client.connect(owner.bootstrap, owner.settings)


def listen(driver: Driver) -> socket.socket | None:
    """The socket that the driver's processes ask at; None: another process has it. Raises `OSError`."""
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
    """Answer until the driver has ended, and revoke everything then."""
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
        while driver.lives():  # noqa: ASYNC110 - nobody tells of its end
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
                return  # a line that is too long is none of ours
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
    except Exception as error:  # whatever it is, whoever asked is told
        # What is wrong with settings is said with their values, and a password may be among them.
        log.error("a token was not given: %s", type(error).__name__, exc_info=not isinstance(error, ValueError))
        return {"error": _error(InternalError(f"a token was not given: {type(error).__name__}"))}


def _error(error: KeraError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "attributes": error_to_attributes(error)}


def run(driver: Driver, ready: int) -> None:
    """The process. `ready`: a descriptor that is closed when it answers, or another one does."""
    sock = listen(driver)
    if sock is None:
        os.close(ready)
        return
    with sock:
        os.close(ready)
        asyncio.run(keep(driver, sock, Tokens(connect)))
