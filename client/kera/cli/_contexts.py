"""Named connections of one user: the cluster's address, our user there, and the authorities that certify the cluster.

One file in the user's configuration has them, readable by the user alone. It has no passwords and no tokens, only the
names of files with these. Processes that change the file at the same time wait for each other, and a reader sees the
whole file as it was either before or after a change.

A context sets the same values as variables of the environment: `applied` sets these for a command and the processes
that it starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kera.cli._paths import written_for_owner
from kera.cli._run import UsageError
from kera.core.base.home import expanded
from kera.core.base.spelling import hint
from kera.core.errors import InvalidArgument

CONTEXT_VARIABLE = "KERA_CONTEXT"
BOOTSTRAP_VARIABLE = "KERA_BOOTSTRAP"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OTHERS_WRITE = 0o022
_TOGETHER = (("user", "password", "password_file", "token", "token_file"), ("tls_cert", "tls_key"), ("tls_ca",))
"""Groups of settings that have to come from the same place: mixed, they would name no user, or the wrong one."""


class NotThere(UsageError):
    """This user has no place for contexts, or may not look there."""

    code = "no_contexts"


@dataclasses.dataclass(frozen=True)
class Context:
    """A connection. Empty fields are not set."""

    bootstrap: str
    user: str = ""
    password_file: str = ""
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def variables(self) -> dict[str, str]:
        """Return the context as variables of the environment."""
        said = {f"KERA_CLIENT_{name}".upper(): value for name, value in dataclasses.asdict(self).items() if value}
        return {BOOTSTRAP_VARIABLE: said.pop("KERA_CLIENT_BOOTSTRAP"), **said}


@dataclasses.dataclass
class Contexts:
    """All contexts of a user."""

    by_name: dict[str, Context] = dataclasses.field(default_factory=dict)
    current: str = ""
    """Name of the default context of commands; empty: no default."""

    def get(self, name: str, source: str = "") -> Context:
        """Return the context `name`; `source` says where the name is from. Raises `UsageError` if it does not exist."""
        if name not in self.by_name:
            where = f" ({source})" if source else ""
            meant = hint(name, self.by_name) if self.by_name else "; kera context set makes one"
            raise UsageError(f"there is no context {name!r}{where}{meant}")
        return self.by_name[name]


def check_name(name: str) -> str:
    """Return `name`. Raises `UsageError` if a context cannot have it."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"a context cannot be called {name!r}: letters, digits, and . _ - within, at most 64 of them")
    return name


def path() -> Path:
    """Return the path of the file with contexts, which need not exist. Raises `NotThere`."""
    directory = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        directory = directory if directory.is_absolute() else expanded(Path("~/.config"))
    except InvalidArgument as error:
        raise NotThere(f"there is no place for contexts: {error.message}; XDG_CONFIG_HOME can name one") from error
    return directory / "kera" / "contexts.json"


def load() -> Contexts:
    """Return the stored contexts. Raises `UsageError` that names the file, and says what to do."""
    file = path()
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            data = opened.read()
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except PermissionError as error:  # also after su, which may leave HOME at the other user's directory
        raise NotThere(f"cannot read contexts from {file}: {error.strerror}") from error
    except OSError as error:
        raise UsageError(f"cannot read contexts from {file}: {error.strerror}") from error
    if mode & _OTHERS_WRITE:
        raise UsageError(
            f"other users can write to {file}, and could have your password sent to their own cluster; check its"
            f" content, then run: chmod 600 {file}"
        )
    try:
        return _parsed(data)
    except (ValueError, RecursionError) as error:  # no JSON, not even text, or other JSON
        raise UsageError(
            f"contexts in {file} cannot be read: {error}; repair the file, or remove it and create contexts with"
            " kera context set; --bootstrap needs no context"
        ) from error


def _parsed(data: bytes) -> Contexts:
    """Parse the file. Raises `ValueError` that says what is wrong."""
    document = json.loads(data.decode())
    if not isinstance(document, dict) or not isinstance(document.get("contexts"), dict):
        raise ValueError('it has no object "contexts"')  # noqa: TRY004 - as what json raises
    current = document.get("current", "")
    if not isinstance(current, str):
        raise ValueError('"current" is not text')  # noqa: TRY004
    return Contexts({name: _context(name, said) for name, said in document["contexts"].items()}, current)


def _context(name: str, said: Any) -> Context:
    fields = {each.name for each in dataclasses.fields(Context)}
    if not isinstance(said, dict):
        raise ValueError(f"context {name!r} is not an object")  # noqa: TRY004
    for field, value in said.items():
        if field in {"password", "token"}:
            raise ValueError(f"context {name!r} has a {field}: name a file with it, as {field}_file")
        if field not in fields:
            raise ValueError(f"context {name!r} has {field!r}{hint(field, fields)}")
        if not isinstance(value, str):
            raise ValueError(f"{field} of context {name!r} is not text")  # noqa: TRY004
    if not said.get("bootstrap"):
        raise ValueError(f"context {name!r} has no bootstrap")
    return Context(**said)


@contextlib.contextmanager
def changing() -> Iterator[Contexts]:
    """Context manager that yields all contexts, and stores them if the block does not raise. Raises `UsageError`."""
    file = path()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(file.parent, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"cannot keep contexts in {file}: {error.strerror}") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # until it is closed, so that no other process's change is lost
        contexts = load()
        yield contexts
        _save(contexts, file)
    finally:
        os.close(directory)


def _save(contexts: Contexts, file: Path) -> None:
    by_name = {name: _said(each) for name, each in sorted(contexts.by_name.items())}
    text = json.dumps({"current": contexts.current, "contexts": by_name}, indent=2)
    place = Path(os.path.realpath(file))  # a link is kept, and its target replaced
    try:
        with written_for_owner(place) as written:
            written.write(f"{text}\n".encode())
    except OSError as error:
        raise UsageError(f"cannot keep contexts in {file}: {error.strerror}") from error


def _said(context: Context) -> dict[str, str]:
    return {name: value for name, value in dataclasses.asdict(context).items() if value}


def added(context: Context, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a context adds to an environment, and the variables there that override it.

    The second list has only variables whose values differ. Each group of settings comes either from the context or from
    the environment: a user from one never gets a password from the other.
    """
    said, there = context.variables(), {name.upper(): value for name, value in environ.items()}
    together = [tuple(f"KERA_CLIENT_{name}".upper() for name in names) for names in _TOGETHER]
    adds: dict[str, str] = {}
    winners: list[str] = []
    for names in [(BOOTSTRAP_VARIABLE,), *together]:
        wins = [name for name in names if there.get(name)]
        if wins:
            winners += [name for name in wins if there[name] != said.get(name)]
        else:
            adds |= {name: said[name] for name in names if name in said}
    return adds, winners


@contextlib.contextmanager
def applied(context: Context | None) -> Iterator[None]:
    """Context manager that sets the context's variables in the environment, unless the environment overrides them."""
    if context is None:
        yield
        return
    adds = {name: value for name, value in added(context, os.environ)[0].items() if name != BOOTSTRAP_VARIABLE}
    before = {name: os.environ.get(name) for name in adds}
    os.environ.update(adds)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
