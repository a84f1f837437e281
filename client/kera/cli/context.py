"""``kera context``: named connections, which save options for the cluster's address and the user's credentials."""

from __future__ import annotations

import dataclasses
import os
import stat
import sys
from pathlib import Path

import typer

from kera.cli import _contexts
from kera.cli._commands import Commands
from kera.cli._contexts import CONTEXT_VARIABLE, Context
from kera.cli._output import OUTPUT_OPTION, Output, show_list, show_result
from kera.cli._paths import expanded_path
from kera.cli._run import UsageError
from kera.cli._streams import warn
from kera.cli._table import fields
from kera.core.errors import InvalidArgument

app = Commands(help="Keep named connections, and choose one.", no_args_is_help=True)

NONE = "none"
SYSTEM = "system"
"""Value of tls_ca that names no file."""
SECRET = ("password_file", "token_file")

NAME_ARGUMENT = typer.Argument(..., metavar="NAME", help="Name of the context.")
LABELS = {
    "bootstrap": "bootstrap",
    "user": "user",
    "password_file": "password file",
    "token_file": "token file",
    "tls_ca": "tls ca",
    "tls_cert": "tls cert",
    "tls_key": "tls key",
}


@app.command("set")
def set_(
    name: str = NAME_ARGUMENT,
    coordinators: str | None = typer.Option(
        None, "--bootstrap", "-b", metavar="HOST:PORT", help="Coordinators, separated by commas. A new one needs it."
    ),
    user: str | None = typer.Option(None, "--user", metavar="NAME", help="User to authenticate as, with a password."),
    password_file: str | None = typer.Option(None, "--password-file", metavar="FILE", help="File with the password."),
    token_file: str | None = typer.Option(None, "--token-file", metavar="FILE", help="File with a token, in place."),
    tls_ca: str | None = typer.Option(
        None, "--tls-ca", metavar="FILE", help="Authorities whose certificates daemons have; system: the host's."
    ),
    tls_cert: str | None = typer.Option(None, "--tls-cert", metavar="FILE", help="Our certificate."),
    tls_key: str | None = typer.Option(None, "--tls-key", metavar="FILE", help="Its key."),
) -> None:
    """Make a context, or change one: options that are not given stay, and the value none removes one.

    It has no password, only the name of a file with one, which is read whenever the password is used.
    """
    _contexts.check_name(name)
    given = {
        "bootstrap": coordinators,
        "user": user,
        "password_file": password_file,
        "token_file": token_file,
        "tls_ca": tls_ca,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
    }
    said = {field: _checked(field, value) for field, value in given.items() if value is not None}
    with _contexts.changing() as contexts:
        before = contexts.by_name.get(name)
        if before is None and not said.get("bootstrap"):
            raise UsageError(f"--bootstrap HOST:PORT is missing: there is no context {name!r} yet")
        if not said:
            raise UsageError("give an option to change; kera context set --help lists them")
        made = Context(**said) if before is None else dataclasses.replace(before, **said)
        _check_together(made)
        contexts.by_name[name] = made
        is_current = contexts.current == name
    print(f"context {name}: {_in_words(made)}")
    if before is None and not is_current:
        print(f"to make it the default: kera context use {name}", file=sys.stderr)


def _checked(field: str, value: str) -> str:
    """Return the value to store for a field. Raises `UsageError`."""
    from kera.core.access.identity import check_name
    from kera.core.coordinators import Coordinators

    flag = f"--{field.replace('_', '-')}"
    if not value:
        way_out = "" if field == "bootstrap" else f"; {NONE} takes away what a context has"
        raise UsageError(f"{flag} is empty{way_out}")
    if value == NONE:
        if field == "bootstrap":
            raise UsageError(f"{flag}: a context needs the address of its cluster")
        return ""
    try:
        if field == "bootstrap":
            return ",".join(Coordinators(value).addresses)
        if field == "user":
            return check_name("user", value)
    except InvalidArgument as error:
        raise UsageError(f"{flag}: {error.message}") from error
    return value if (field, value) == ("tls_ca", SYSTEM) else _file(flag, value, secret=field in SECRET)


def _file(flag: str, value: str, *, secret: bool) -> str:
    """Return the absolute path of a file. Raises `UsageError` if there is none; with `secret`, it leaves out the value.

    A user may have given a password in place of a path.
    """
    path = expanded_path(flag, Path(value)).absolute()  # a link is kept: it may lead elsewhere later
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # ValueError: a null character in the path
        mode = 0
    if not stat.S_ISREG(mode):
        if secret:
            what = flag.removeprefix("--").removesuffix("-file")
            raise UsageError(f"{flag} names no file that is there; it takes the path of one, never the {what} itself")
        raise UsageError(f"{flag}: there is no file {value}")
    if secret and mode & 0o077:
        warn(f"others can read {path}, or write to it: chmod 600 {path}")
    return str(path)


def _check_together(made: Context) -> None:
    """Raise `UsageError` for fields that do not go together."""
    if made.token_file and (made.user or made.password_file):
        raise UsageError(
            "a token names its user: remove the token (--token-file none) or the user (--user none --password-file"
            " none)"
        )
    if bool(made.user) != bool(made.password_file):
        raise UsageError("--user and --password-file belong together: give both")
    if bool(made.tls_cert) != bool(made.tls_key):
        raise UsageError("--tls-cert and --tls-key belong together: give both")
    if made.tls_cert and not made.tls_ca:
        raise UsageError("--tls-cert needs --tls-ca, to verify daemons")


def _in_words(context: Context) -> str:
    who = f" as {context.user}" if context.user else " with a token" if context.token_file else ""
    certificate = " and a certificate" if context.tls_cert else ""
    return f"{context.bootstrap}{who}{', TLS' if context.tls_ca else ''}{certificate}"


@app.command()
def use(
    name: str | None = typer.Argument(None, metavar="[NAME]", help="Name of the context."),
    none: bool = typer.Option(False, "--none", help="Use none, as before."),
) -> None:
    """Make a context the current one: of all commands that name neither a context nor a cluster."""
    if (name is None) is not none:
        raise UsageError("give either a NAME or --none")
    with _contexts.changing() as contexts:
        chosen = None if name is None else contexts.get(name)
        contexts.current = name or ""
    print("commands that name none use no context" if chosen is None else f"using {name}: {_in_words(chosen)}")
    variable = os.environ.get(CONTEXT_VARIABLE, "")
    if variable not in {"", name}:
        warn(f"{CONTEXT_VARIABLE}={variable} is set, and overrides it")


@app.command("list")
def list_(output: Output = OUTPUT_OPTION) -> None:
    """List all contexts."""
    contexts = _contexts.load()
    documents = [_document(contexts, name) for name in sorted(contexts.by_name)]
    rows = [
        ("*" if name == contexts.current else " ", name, each.bootstrap, each.user, "yes" if each.tls_ca else "no")
        for name, each in sorted(contexts.by_name.items())
    ]
    show_list(documents, ("CURRENT", "NAME", "BOOTSTRAP", "USER", "TLS"), rows, output, none="no contexts")


@app.command()
def show(
    name: str | None = typer.Argument(None, metavar="[NAME]", help="Name of the context. Default: the current one."),
    output: Output = OUTPUT_OPTION,
) -> None:
    """Show a context, and which variables of the environment override it."""
    contexts = _contexts.load()
    variable = os.environ.get(CONTEXT_VARIABLE, "")
    chosen = name or variable or contexts.current
    if not chosen:
        raise UsageError("there is no current context: kera context use NAME makes one that; or give a NAME")
    source = "" if name else CONTEXT_VARIABLE if variable else f"the current one of {_contexts.path()}"
    context = contexts.get(chosen, source)
    winners = _contexts.added(context, os.environ)[1]
    pairs: list[tuple[str, object]] = [("context", chosen + (" (current)" if chosen == contexts.current else ""))]
    pairs += [(LABELS[field], value) for field, value in dataclasses.asdict(context).items() if value]
    pairs += [("overridden by", ", ".join(winners))] if winners else []
    show_result({**_document(contexts, chosen), "overridden_by": winners}, fields(pairs), output)


def _document(contexts: _contexts.Contexts, name: str) -> dict[str, object]:
    said = dataclasses.asdict(contexts.by_name[name])
    return {
        "name": name,
        "current": name == contexts.current,
        **{field: value or None for field, value in said.items()},
    }


@app.command()
def delete(name: str = NAME_ARGUMENT) -> None:
    """Delete a context. The files that it names stay."""
    with _contexts.changing() as contexts:
        contexts.get(name)
        was_current = contexts.current == name
        del contexts.by_name[name]
        contexts.current = "" if was_current else contexts.current
    print(f"deleted {name}" + (", which was the current one: now there is none" if was_current else ""))
