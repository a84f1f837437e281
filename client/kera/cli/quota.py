"""``kera quota``: limits on the use of a cluster by its users."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._access import CLUSTER_SECRET_OPTION, changing, reading, warn_of_untold
from kera.cli._client import BOOTSTRAP_OPTION
from kera.cli._commands import Commands
from kera.cli._output import OUTPUT_OPTION, Output, show_result
from kera.cli._run import UsageError
from kera.cli._sizes import parse_size
from kera.cli._table import table
from kera.core.base.sizes import format_size

if TYPE_CHECKING:
    from kera.client.admin.access import Access
    from kera.client.admin.quotas import Quota

app = Commands(help="Set, show and clear quotas, the limits of users.", no_args_is_help=True)

NONE = "none"
"""Given in place of a number: no limit."""
SIZES = frozenset({"bytes_in_per_s", "bytes_out_per_s", "stored_bytes"})
HEADING = ("USER", "BYTES IN/S", "BYTES OUT/S", "REQUESTS/S", "CONNECTIONS", "STREAMS", "STORED")
_NUMBER = re.compile(r"[0-9]{1,20}")
DEFAULT = "(default)"
"""Shown in place of a user's name for the default quota."""

NAME_ARGUMENT = typer.Argument(None, metavar="NAME", help="Name of the user.")
DEFAULT_OPTION = typer.Option(
    False, "--default", help="The quota of all users without one of their own, except super users."
)


@app.command("set")
async def set_(
    name: str | None = NAME_ARGUMENT,
    default: bool = DEFAULT_OPTION,
    bytes_in_per_s: str | None = typer.Option(
        None, "--bytes-in-per-s", metavar="SIZE", help="Chunks written to each broker per second, as 10MiB; none."
    ),
    bytes_out_per_s: str | None = typer.Option(
        None, "--bytes-out-per-s", metavar="SIZE", help="Chunks read from each broker per second; none."
    ),
    requests_per_s: str | None = typer.Option(
        None, "--requests-per-s", metavar="NUMBER", help="Requests to each daemon per second; none."
    ),
    connections: str | None = typer.Option(
        None, "--connections", metavar="NUMBER", help="Connections to each broker; none."
    ),
    streams: str | None = typer.Option(
        None, "--streams", metavar="NUMBER", help="Streams that it has created and that are there; none."
    ),
    stored_bytes: str | None = typer.Option(
        None, "--stored-bytes", metavar="SIZE", help="Bytes of the chunks in these streams; none."
    ),
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Limit what a user may use, or take a limit away (none). Limits that are not given stay unchanged.

    A user above a rate gets its answers later; anything beyond one of the other limits is refused. Limits hold at
    once, and end no connection. The default quota does not apply to a user who has a quota.
    """
    given = {
        "bytes_in_per_s": bytes_in_per_s,
        "bytes_out_per_s": bytes_out_per_s,
        "requests_per_s": requests_per_s,
        "connections": connections,
        "streams": streams,
        "stored_bytes": stored_bytes,
    }
    user = _user(name, default=default)
    limits = {limit: _parsed(limit, text) for limit, text in given.items() if text is not None}
    if not limits:
        raise UsageError(f"give a limit: {', '.join(map(_flag, given))}")
    async with changing(bootstrap, cluster_secret_file) as access:
        known = await _quotas(access)
        quota = dataclasses.replace(known[user], **limits) if user in known else _quota(limits)
        change = await _put(access, user, quota)
        print(f"{_whose(user)}: {_in_words(quota) if quota else _cleared(user)}")
        warn_of_untold(change, "the previous quota applies")


@app.command()
async def show(
    name: str | None = NAME_ARGUMENT,
    default: bool = DEFAULT_OPTION,
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Show the quota that holds for a user, or the default one; without a name, all quotas."""
    user = None if name is None and not default else _user(name, default=default)
    async with reading(bootstrap, cluster_secret_file) as access:
        quotas = await _quotas(access)
    if user is None:
        shown = {each: quota for each, quota in quotas.items() if quota or not each}
    else:
        shown = {user: quotas.get(user) or quotas[""]}
    found = [{"user": each or None, **dataclasses.asdict(quota)} for each, quota in shown.items()]
    text = table(HEADING, [(each or DEFAULT, *_cells(quota)) for each, quota in shown.items()])
    show_result(found if user is None else found[0], text, output)


@app.command()
async def clear(
    name: str | None = NAME_ARGUMENT,
    default: bool = DEFAULT_OPTION,
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Remove the quota of a user, so that the default one holds; or remove the default one."""
    user = _user(name, default=default)
    async with changing(bootstrap, cluster_secret_file) as access:
        change = await _put(access, user, _quota({}))
        print(f"{_whose(user)}: {_cleared(user)}")
        warn_of_untold(change, "the previous quota applies")


async def _quotas(access: Access) -> dict[str, Quota]:
    """Return the quotas by user; the default one comes first, under ""."""
    return {"": await access.default_quota(), **{each.name: each.quota for each in await access.users()}}


async def _put(access: Access, user: str, quota: Quota) -> tuple[str, ...]:
    """Set a quota; return the members that could not be notified."""
    limits = dataclasses.asdict(quota)
    change = await (access.set_quota(user, **limits) if user else access.set_default_quota(**limits))
    return change.untold


def _quota(limits: dict[str, int | None]) -> Quota:
    from kera.client.admin.quotas import Quota

    return Quota(**limits)


def _user(name: str | None, *, default: bool) -> str:
    """Return the user's name; empty for the default quota. Raises `UsageError`."""
    if (name is None) != default or name == "":
        raise UsageError("give either the NAME of a user, or --default")
    return name or ""


def _whose(user: str) -> str:
    return f"quota of {user}" if user else "default quota"


def _flag(limit: str) -> str:
    return f"--{limit.replace('_', '-')}"


def _parsed(limit: str, text: str) -> int | None:
    if text.lower() == NONE:
        return None
    if limit in SIZES:
        return parse_size(text, name=_flag(limit))
    if not _NUMBER.fullmatch(text):
        raise UsageError(f"{_flag(limit)}: {text!r} is not a number, and not {NONE}")
    return int(text)


def _text(limit: str, value: int | None) -> str:
    if value is None:
        return "-"
    return format_size(value) if limit in SIZES else str(value)


def _cells(quota: Quota) -> tuple[str, ...]:
    return tuple(_text(limit, value) for limit, value in dataclasses.asdict(quota).items())


def _in_words(quota: Quota) -> str:
    limits = [
        f"{limit.removesuffix('_per_s').replace('_', ' ')} {_text(limit, value)}"
        + ("/s" if limit.endswith("_per_s") else "")
        for limit, value in dataclasses.asdict(quota).items()
        if value is not None
    ]
    return ", ".join(limits)


def _cleared(user: str) -> str:
    return "cleared, so that the default one holds" if user else "cleared"
