"""Questions before something is done that cannot be taken back."""

from __future__ import annotations

import sys

import typer

from kera.cli._run import UsageError

YES_OPTION = typer.Option(False, "--yes", "-y", help="Do not ask for confirmation.")


def confirm(doing: str, question: str, *, yes: bool) -> None:
    """Ask, unless the answer is `yes`. Raises `UsageError` where there is nobody to ask, `typer.Abort` for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{doing} needs --yes when standard input is not a terminal")
    typer.confirm(question, abort=True)
