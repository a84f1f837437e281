"""Prints the result of a command: text for people, or one document as JSON or YAML.

This module alone decides how a document looks. It has the same names and values in both forms, and is ASCII only, so
that the encoding of a terminal or a pipe does not change it.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from kera.cli._run import UsageError
from kera.cli._table import table

_JSON_GIVEN = "kera.cli.json"


class Output(enum.StrEnum):
    """The values of ``--output``."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_document(self) -> bool:
        """Whether the output is for a program: then the command prints the document and nothing else."""
        return self is not Output.TABLE


def _chosen(context: typer.Context, value: Output) -> Output:
    if not context.meta.get(_JSON_GIVEN):
        return value
    source = context.get_parameter_source("output")
    if source is not None and source.name == "COMMANDLINE" and value is not Output.JSON:
        raise UsageError(f"--json and --output {value.value} contradict each other: give one of them")
    return Output.JSON


def _remember_json(context: typer.Context, value: bool) -> None:
    context.meta[_JSON_GIVEN] = value


OUTPUT_OPTION = typer.Option(
    Output.TABLE, "--output", "-o", case_sensitive=False, callback=_chosen, help="How to print the result."
)
JSON_OPTION = typer.Option(
    False, "--json", is_eager=True, expose_value=False, callback=_remember_json, help="The same as --output json."
)
"""`kera.cli._commands` adds it beside each `OUTPUT_OPTION`, whose `Output` has the result of both options."""

INTERNAL_OPTION = typer.Option(
    False, "--internal", help="Include internal streams and consumer groups (their names begin with _)."
)
"""For commands that list streams or consumer groups, see `kera.core.base.internal_names`."""


def rendered(document: Any, output: Output, *, indent: int | None = 2) -> str:
    """Return the document as text, without a final line end. `indent`: of JSON; None: all on one line."""
    text = json.dumps(document, indent=indent)
    return text if output is Output.JSON else _as_yaml(json.loads(text))


def show_document(document: Any, output: Output, *, indent: int | None = 2) -> None:
    """Print the document."""
    print(rendered(document, output, indent=indent))


def show_result(document: Any, text: str, output: Output, *, indent: int | None = 2) -> None:
    """Print the document, or the text if the output is for people."""
    print(rendered(document, output, indent=indent) if output.is_document else text)


def show_list(
    documents: Iterable[Any],
    heading: Sequence[str],
    rows: Sequence[Sequence[object]],
    output: Output,
    *,
    none: str | None = None,
) -> None:
    """Print all `documents` as one, or a table if the output is for people. `none`: a remark if there are no rows."""
    if output.is_document:
        show_document(list(documents), output)
    elif rows or none is None:
        print(table(heading, rows))
    else:
        print(none, file=sys.stderr)


def _as_yaml(document: Any) -> str:
    """Return YAML that has only the types of JSON, without aliases and Python's own types."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes texts that might be numbers: PyYAML follows YAML 1.1, and YAML 1.2 reads more texts as numbers."""

    def text(dumper: Any, value: str) -> Any:
        style = "'" if value[:1] in set("0123456789+-.") else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    dumped: str = yaml.dump(document, Dumper=Dumper, sort_keys=False, width=1 << 20)
    return dumped.removesuffix("\n").removesuffix("\n...")
