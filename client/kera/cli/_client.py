"""What commands that talk to a cluster share: options, and a connection."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
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
JSON_OPTION = typer.Option(False, "--json", help="Print JSON.")


@contextlib.asynccontextmanager
async def _connected(bootstrap: str, *, patient: bool = True, **settings: Any) -> AsyncIterator[Client]:
    from kera.client import Client, ClientSettings

    loaded = ClientSettings.load(**settings)
    if "retry_timeout_ms" not in loaded.model_fields_set:
        impatient = loaded.model_copy(update={"retry_timeout_ms": FIRST_CONTACT_MS})
        async with await Client.connect(bootstrap, impatient) as client:
            await client.admin.describe_cluster()
        loaded = loaded if patient else impatient
    client = await Client.connect(bootstrap, loaded)
    try:
        yield client
    finally:
        await client.close()


Connect = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
_connect: ContextVar[Connect] = ContextVar("kera_cli_connect", default=_connected)


def connected(bootstrap: str, **options: Any) -> contextlib.AbstractAsyncContextManager[Client]:
    """A client of the cluster at `bootstrap`; `settings` are fields of `ClientSettings`.

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
