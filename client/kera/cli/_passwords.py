"""Commands read a password from a file, standard input, the environment, or a terminal, never from an argument.

An argument is kept in the shell's history, and every user of the host can see it while the command runs.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import typer

from kera.cli._run import UsageError, ended_by_signals
from kera.cli._streams import warn

VARIABLE = "KERA_USER_PASSWORD"
STANDARD_INPUT = "-"
FLAG = "--password-file"

PASSWORD_FILE_OPTION = typer.Option(
    None,
    FLAG,
    metavar="FILE",
    help=f"File with the password; {STANDARD_INPUT}: standard input. Without: {VARIABLE}, or you are asked for it.",
)
NO_PASSWORD_OPTION = typer.Option(
    False, "--no-password", help="For a user that shows a certificate or the token of another issuer, and no password."
)


@ended_by_signals()
def new_password(user: str, file: str | None, *, none: bool) -> str | None:
    """Read the new password of a user; None if `none` is set. White space around it is dropped, as when it is used.

    Raises `UsageError` for an invalid password, and if there is no source of a password.
    """
    if none:
        if file is not None:
            raise UsageError(f"--no-password and {FLAG} are mutually exclusive")
        return None
    if file is not None and not (file == STANDARD_INPUT and sys.stdin.isatty()):
        return _checked(FLAG, _in_file(file))
    if file is None and VARIABLE in os.environ:
        return _checked(VARIABLE, os.environ[VARIABLE].strip())
    if not sys.stdin.isatty():
        raise UsageError(
            f"which password? give {FLAG} FILE ({STANDARD_INPUT}: standard input) or --no-password, or set {VARIABLE}"
        )
    text: str = typer.prompt(f"Password of {user}", hide_input=True, confirmation_prompt="The same again", err=True)
    return _checked("the password", text.strip())


def _checked(source: str, password: str) -> str:
    from kera.core.access.passwords import check_password
    from kera.core.errors import InvalidArgument

    if not password:
        raise UsageError(f"{source} is empty")
    try:
        return check_password(password)
    except InvalidArgument as error:
        raise UsageError(f"{source}: {error.message}") from error


def _in_file(name: str) -> str:
    from kera.core.access.credentials import secret_from, secret_in
    from kera.core.errors import AuthenticationFailed

    try:
        if name == STANDARD_INPUT:
            return secret_from(f"{FLAG}: standard input", sys.stdin.buffer)
        if not name:
            raise UsageError(f"{FLAG} is empty; name a file, or {STANDARD_INPUT} for standard input")
        text = secret_in(FLAG, Path(name))
    except AuthenticationFailed as error:
        raise UsageError(error.message) from error
    mode = Path(name).expanduser().stat().st_mode
    if stat.S_ISREG(mode) and mode & 0o077:
        warn(f"others on this host may read {name}: chmod 600 {name}")
    return text
