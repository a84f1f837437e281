"""Shared by ``kera user``, ``kera acl`` and ``kera token``: the connection, and the output after a change."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._client import connected
from kera.cli._paths import path_of
from kera.cli._streams import warn

if TYPE_CHECKING:
    from kera.client.admin.access import Access

CLUSTER_SECRET_OPTION = typer.Option(
    None,
    "--cluster-secret-file",
    metavar="FILE",
    parser=path_of("--cluster-secret-file"),
    help="Act as a daemon of the cluster, with its secret in FILE: for the first user, or when no user with"
    " the right to do this can authenticate.",
)


@contextlib.asynccontextmanager
async def reading(bootstrap: str, cluster_secret_file: Path | None) -> AsyncIterator[Access]:
    """Connect to a cluster to read its users, rules and tokens."""
    async with connected(bootstrap, patient=False, cluster_secret_file=cluster_secret_file) as client:
        yield client.access


@contextlib.asynccontextmanager
async def changing(bootstrap: str, cluster_secret_file: Path | None) -> AsyncIterator[Access]:
    """Connect as `reading` does, to change something; warn afterwards if security is off, so that it has no effect."""
    async with connected(bootstrap, patient=False, cluster_secret_file=cluster_secret_file) as client:
        is_on = (await client.admin.describe_cluster()).security  # first: the change may remove the caller's own user
        yield client.access
        if not is_on:
            warn("security is off in this cluster: this takes effect once all daemons have security = true")


def warn_of_untold(untold: Iterable[str], meaning: str) -> None:
    """Warn about each daemon that still applies the previous state; `meaning` says what that allows there."""
    for each in untold:
        member, _, reason = each.partition(": ")
        warn(f"{member} could not be notified ({reason}): until it is back, {meaning} there")
