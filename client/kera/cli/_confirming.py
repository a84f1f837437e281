"""Questions before an action that cannot be undone."""

from __future__ import annotations

import sys

import typer

from kera.cli._run import UsageError, ended_by_signals

YES_OPTION = typer.Option(False, "--yes", "-y", help="Do not ask for confirmation.")


def check_can_ask(doing: str, *, yes: bool) -> None:
    """Raise `UsageError` without `yes` if standard input is not a terminal; for a check before work is done."""
    if not yes and not sys.stdin.isatty():
        raise UsageError(f"{doing} needs --yes when standard input is not a terminal")


def confirm(doing: str, question: str, *, yes: bool) -> None:
    """Ask, unless `yes` answers. Raises `UsageError` if standard input is not a terminal, `typer.Abort` for a no."""
    check_can_ask(doing, yes=yes)
    if not yes:
        with ended_by_signals():
            typer.confirm(question, abort=True)
