"""Options and the connection for commands that talk to a cluster."""

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
    """Return the context that applies to a command, and its name; set the command's `bootstrap` from it if needed.

    A user who names the coordinators with a flag, or a command that is run without a cluster, ignores a context from
    the environment and the current context: the password in it is for another cluster. Coordinators from the
    environment override the current context, and also a context from the environment that names others.
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
    """Return the name and the context that `kera context use` has chosen for commands that name none."""
    try:
        contexts = _contexts.load()
    except _contexts.NotThere:
        return "", None
    if not contexts.current:
        return "", None
    return contexts.current, contexts.get(contexts.current, f"the current one of {_contexts.path()}")


@contextlib.contextmanager
def in_context(command: typer.Context) -> Iterator[None]:
    """Context manager in which a command uses the cluster and credentials of its context.

    Flags and variables of the environment override the context; variables that override a named one cause a warning.
    """
    name, chosen = _choose(command) if "bootstrap" in command.params else ("", None)
    if chosen is not None and _NAMED in command.meta:
        winners = [each for each in _contexts.added(chosen, os.environ)[1] if each != BOOTSTRAP_VARIABLE]
        if winners:
            are = "are" if len(winners) > 1 else "is"
            warn(f"{', '.join(winners)} {are} set, which overrides context {name}")
    with _contexts.applied(chosen):
        yield


def _names() -> list[str]:
    """Return the names of contexts for completion by a shell, which could not show an error."""
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
"""`kera.cli._commands` adds it beside each option for the coordinators."""
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
    """Return the error, with the most similar name of a stream or consumer group if there is one."""
    stream, group = (error.attributes.get(name) for name in ("stream", "consumer_group"))
    with contextlib.suppress(KeraError):  # a user without the right to list names gets the original error
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
    """Open a client of the cluster at `bootstrap`; `options` are fields of `ClientSettings`, and the following.

    `cluster_secret_file`: connect as a daemon, with the cluster's secret, in place of the credentials in the settings.

    `patient`: a program retries for half a minute while the coordinator is away. At a terminal the cluster is most
    likely not running, so the first request of a command fails sooner, and with `patient` off every other one does,
    too. ``KERA_CLIENT_RETRY_TIMEOUT_MS`` overrides that.
    """
    return _connect.get()(bootstrap, **options)


@contextlib.contextmanager
def connecting_by(connect: Connect) -> Iterator[None]:
    """Context manager in which commands connect by `connect`, which takes the arguments of `connected`."""
    token = _connect.set(connect)
    try:
        yield
    finally:
        _connect.reset(token)
