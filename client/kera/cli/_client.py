"""Shared by commands that talk to a cluster: options, and a connection."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kera.cli import _contexts
from kera.cli._contexts import BOOTSTRAP_VARIABLE, CONTEXT_VARIABLE, Context
from kera.cli._run import UsageError
from kera.cli._streams import warn
from kera.core.base.spelling import closest
from kera.core.errors import InvalidArgument, KeraError, UnknownStream

if TYPE_CHECKING:
    from kera.client import Client

BOOTSTRAP_DEFAULT = "127.0.0.1:7400"

FIRST_CONTACT_MS = 2000
"""How long a command tries to reach the coordinator."""

_NAMED = "kera.cli.context"
_FLAG = "--context"


def _remember_name(command: typer.Context, name: str | None) -> None:
    if name is None or command.resilient_parsing:
        return
    if not name:
        raise UsageError(f"{_FLAG} is empty; kera context list shows which there are")
    command.meta[_NAMED] = (name, _FLAG if is_given(command, "context", "COMMANDLINE") else CONTEXT_VARIABLE)


def is_given(command: typer.Context, parameter: str, *sources: str) -> bool:
    """Whether a parameter's value is from one of `sources`, as click calls them: COMMANDLINE, ENVIRONMENT."""
    source = command.get_parameter_source(parameter)
    return source is not None and source.name in sources


def _choose(command: typer.Context) -> tuple[str, Context | None]:
    """The context that counts for a command, which says where the cluster is if nothing else does.

    Who says where has not thought of a context that is in the environment, or the current one: and the password of that
    is for no other cluster. Nor has who has a command do something without a cluster.
    """
    by_flag, by_variable = (is_given(command, "bootstrap", source) for source in ("COMMANDLINE", "ENVIRONMENT"))
    value = command.params["bootstrap"]
    name, source = command.meta.get(_NAMED, ("", ""))
    if source != _FLAG and (by_flag or not value):
        return "", None
    if name:
        chosen: Context | None = _contexts.load().get(name, source)
    else:
        name, chosen = ("", None) if by_variable else current_context()
    if chosen is None:
        return "", None
    if by_variable and source != _FLAG and value != chosen.bootstrap:
        (variable,) = (each.envvar for each in command.command.params if each.name == "bootstrap")
        warn(f"{variable} is set and overrides context {name}, which is ignored")
        return "", None
    command.params["bootstrap"] = value if by_flag else chosen.bootstrap
    return name, chosen


def current_context() -> tuple[str, Context | None]:
    """That which `kera context use` has made the one of commands that name none."""
    try:
        contexts = _contexts.load()
    except _contexts.NotThere:
        return "", None
    if not contexts.current:
        return "", None
    return contexts.current, contexts.get(contexts.current, f"the current one of {_contexts.path()}")


@contextlib.contextmanager
def in_context(command: typer.Context) -> Iterator[None]:
    """Within it, a command goes where its context says, and is who that says, as far as it was told nothing else."""
    name, chosen = _choose(command) if "bootstrap" in command.params else ("", None)
    if chosen is not None and _NAMED in command.meta:
        winners = [each for each in _contexts.added(chosen, os.environ)[1] if each != BOOTSTRAP_VARIABLE]
        if winners:
            are = "are" if len(winners) > 1 else "is"
            warn(f"{', '.join(winners)} {are} set, which overrides context {name}")
    with _contexts.applied(chosen):
        yield


def _names() -> list[str]:
    """For completion by a shell, which has no use for an error."""
    try:
        return sorted(_contexts.load().by_name)
    except UsageError:
        return []


CONTEXT_OPTION = typer.Option(
    None,
    _FLAG,
    envvar=CONTEXT_VARIABLE,
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_remember_name,
    autocompletion=_names,
    help="Connection that kera context set has kept, in place of --bootstrap.",
)
"""Beside each option for the coordinators, see `kera.cli._commands`."""
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
        from kera.core.credential_settings import as_daemon

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
    except (UnknownStream, InvalidArgument) as error:
        raise await _with_name_meant(client, error) from error
    finally:
        await client.close()


async def _with_name_meant(client: Client, error: KeraError) -> KeraError:
    """The error, with the name of a stream or consumer group that was most likely meant, if one is like it."""
    stream, group = (error.attributes.get(name) for name in ("stream", "consumer_group"))
    with contextlib.suppress(KeraError):  # who may not list names gets the error as it is
        if isinstance(error, UnknownStream) and error.message == f"there is no stream {stream!r}":
            known = {each.name for each in await client.admin.list_streams()}
        elif error.message == f"there is no consumer group {group!r}":
            known = {each.consumer_group for each in await client.admin.consumer_groups()}
        else:
            return error
        meant = closest(str(stream or group), known)
        if meant is not None:
            return type(error)(f"{error.message}; did you mean {meant!r}?", **error.attributes)
    return error


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
