"""What the commands that talk to a cluster share: where it is, a connection, names of places in messages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kera.client import Client

BOOTSTRAP_VARIABLE = "KERA_BOOTSTRAP"
BOOTSTRAP_DEFAULT = "127.0.0.1:7400"

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
async def connected(bootstrap: str, **settings: Any) -> AsyncIterator[Client]:
    """A client of the cluster at `bootstrap`; `settings` are fields of `ClientSettings`."""
    from kera.client import Client, ClientSettings

    client = await Client.connect(bootstrap, ClientSettings.load(**settings))
    try:
        yield client
    finally:
        await client.close()
