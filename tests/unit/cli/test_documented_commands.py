"""The command line accepts every call of `kera` in the documentation."""

from pathlib import Path
from typing import Any

import pytest
import typer

from kera.cli._run import command_of
from kera.cli.app import app
from tests.docs_examples import PAGES, calls, commands, examples

CALLS = [
    (command.where, call)
    for page in PAGES
    for example in examples(page, "sh", "console")
    for command in commands(example)
    for call in calls(command)
]


def parse(arguments: list[str]) -> None:
    """Have the command line parse arguments without running them. Raises typer's errors."""
    command: Any = command_of(app)
    name, context, left = "kera", None, list(arguments)
    while True:
        context = command.make_context(name, left, parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, left = command.resolve_command(context, [*context._protected_args, *context.args])


def test_the_documentation_has_many_calls() -> None:
    assert len(CALLS) > 100


def mistake(where: str, arguments: list[str]) -> str:
    """The error of the command line for a call at a place of the documentation; empty: it accepts the call."""
    there = [__file__ if each.startswith("/tmp/kera/") else each for each in arguments if each != "…"]
    if arguments[0] == "verify":
        there = [str(Path(each).parent) if each == __file__ else each for each in there]
    try:
        parse(there)
    except typer.Exit:
        return ""  # --help and --version
    except Exception as error:
        text = getattr(error, "format_message", None)  # only typer's own errors have it; they lack a public base class
        if text is None:
            raise
        return f"{where}: kera {' '.join(arguments)}: {text()}"
    return ""


def test_the_command_line_accepts_each_documented_call() -> None:
    assert [found for where, call in CALLS if (found := mistake(where, call))] == []


@pytest.mark.parametrize(
    "arguments", [["stream", "make", "x"], ["stream", "create", "x", "--streamlet", "1"], ["produce"], ["check", "x"]]
)
def test_invalid_calls_are_found(arguments: list[str]) -> None:
    assert mistake("here", arguments).startswith(f"here: kera {' '.join(arguments)}: ")
