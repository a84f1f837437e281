"""What commands that talk to a cluster share: options, and a connection."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kera.client import Client

BOOTSTRAP_VARIABLE = "KERA_BOOTSTRAP"
BOOTSTRAP_DEFAULT = "127.0.0.1:7400"

FIRST_CONTACT_MS = 2000
"""How long a command tries to reach the coordinator."""

BOOTSTRAP_OPTION = typer.Option(
    BOOTSTRAP_DEFAULT,
    "--bootstrap",
    "-b",
    envvar=BOOTSTRAP_VARIABLE,
    metavar="HOST:PORT",
    help="Coordinators of the cluster, separated by commas.",
)


@contextlib.asynccontextmanager
async def _connected(
    bootstrap: str, *, patient: bool = True, cluster_secret_file: Path | None = None, **settings: Any
) -> AsyncIterator[Client]:
    from kera.client import Client, ClientSettings
    from kera.core.runtime import MACHINE

    runtime = MACHINE
    if cluster_secret_file is not None:
        from kera.core.access.settings import as_daemon

        runtime = as_daemon(runtime, cluster_secret_file)
    loaded = ClientSettings.load(**settings)
    if "retry_timeout_ms" not in loaded.model_fields_set:
        impatient = loaded.model_copy(update={"retry_timeout_ms": FIRST_CONTACT_MS})
        async with await Client.connect(bootstrap, impatient, runtime=runtime) as client:
            await client.admin.describe_cluster()
        loaded = loaded if patient else impatient
    client = await Client.connect(bootstrap, loaded, runtime=runtime)
    try:
        yield client
    finally:
        await client.close()


Connect = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
_connect: ContextVar[Connect] = ContextVar("kera_cli_connect", default=_connected)


def connected(bootstrap: str, **options: Any) -> contextlib.AbstractAsyncContextManager[Client]:
    """A client of the cluster at `bootstrap`; `options` are fields of `ClientSettings`, and the following.

    `cluster_secret_file`: with the secret of the cluster, as one of its daemons, whoever the settings say we are.

    A program retries for half a minute while the coordinator is away; at a terminal the cluster is most likely
    not running, so that the command fails sooner, and with `patient` off every other request does, too.
    ``KERA_CLIENT_RETRY_TIMEOUT_MS`` overrides that.
    """
    return _connect.get()(bootstrap, **options)


@contextlib.contextmanager
def connecting_by(connect: Connect) -> Iterator[None]:
    """Within it, commands connect by `connect`, which takes what `connected` does."""
    token = _connect.set(connect)
    try:
        yield
    finally:
        _connect.reset(token)
