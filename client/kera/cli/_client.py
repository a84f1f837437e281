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

FIRST_CONTACT_MS = 2000
"""How long a command tries to reach the coordinator at all."""

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
async def connected(bootstrap: str, *, patient: bool = True, **settings: Any) -> AsyncIterator[Client]:
    """A client of the cluster at `bootstrap`; `settings` are fields of `ClientSettings`.

    A program rides out a coordinator that is away for half a minute; someone who waits at a terminal, most
    likely for a cluster that does not run, is told sooner, and with `patient` off also whatever else the cluster
    cannot do now. ``KERA_CLIENT_RETRY_TIMEOUT_MS`` says otherwise.
    """
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
