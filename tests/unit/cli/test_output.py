"""`--output`: one document in two forms, made in one place; and the commands with this option."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kera.cli._output import Output, rendered
from kera.cli._run import run_app
from kera.cli.app import app

CLI = Path(__file__).parents[3] / "client" / "kera" / "cli"
MAKE_JSON = {
    "_audit_stream.py": "records of a stream",
    "_contexts.py": "a file",
    "_format.py": "records",
    "_output.py": "the place",
    "_records.py": "records",
    "bench/_processes.py": "between processes",
    "bench/_worker.py": "between processes",
    "connect/_telling.py": "lines of progress",
}


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All commands below one, by the words that a user types."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, each in command.commands.items():
        yield from commands(each, f"{name} {word}".strip())


def options(command: Any) -> set[str]:
    return {option for each in command.params for option in each.opts}


ALL = dict(commands(typer.main.get_command(app)))


def kera(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_app(app, list(arguments))
    return code, *capsys.readouterr()


def test_all_commands_that_list_or_describe_have_the_option() -> None:
    named = [name for name in ALL if name.split()[-1] in {"list", "describe", "show", "health", "recoveries"}]
    assert len(named) > 8
    assert [name for name in named if not {"--output", "-o", "--json"} <= options(ALL[name])] == []


def test_commands_that_print_json_can_print_yaml() -> None:
    records = {"produce", "consume", "connect copy"}  # JSON of records or of progress, not of a result
    has_json = {name for name, each in ALL.items() if "--json" in options(each)} - records
    assert {name for name in has_json if "--output" not in options(ALL[name])} == set()
    assert {name for name, each in ALL.items() if "--output" in options(each)} == has_json


def test_commands_make_json_only_in_one_place() -> None:
    makes = {
        str(each.relative_to(CLI)) for each in CLI.rglob("*.py") if re.search(r"\bjson\.dumps?\(", each.read_text())
    }
    assert makes - set(MAKE_JSON) == set()


class Word(enum.StrEnum):
    A = "a"


def test_both_forms_have_the_same_values() -> None:
    document: dict[str, Any] = {
        "name": "orders",
        "none": None,
        "flag": True,
        "words": [
            "yes",
            "no",
            "on",
            "null",
            "~",
            "",
            " x ",
            "#",
            "a: b",
            "- c",
            "é 🙂",
            "\x1b[31m",
            "a\nb\n",
            "\ud800",
        ],
        "numbers": [0, -1, 1 << 63, 0.5, 1e300],
        "texts": ["1", "1e3", "0x1f", "0o17", "12:30:45", "2026-01-31", ".5", "+1", "=", "1234e5678901234"],
        "tuple": (1, 2),
        "word": Word.A,
        "empty": [{}, []],
        "deep": [[{"a": [1]}]],
    }
    assert yaml.safe_load(rendered(document, Output.YAML)) == json.loads(rendered(document, Output.JSON))
    assert rendered(document, Output.YAML).isascii()


@pytest.mark.parametrize("text", ["1234e5678901234", "0o17", "1e3", "16c1932da1014479"])
def test_text_that_newer_yaml_reads_as_a_number_is_quoted(text: str) -> None:
    assert rendered({"id": text}, Output.YAML) == f"id: '{text}'"


def test_a_repeated_object_is_written_twice_in_yaml() -> None:
    one = {"a": [1]}
    assert rendered([one, one], Output.YAML) == "- a:\n  - 1\n- a:\n  - 1"


@pytest.mark.parametrize(("document", "text"), [([], "[]"), ({}, "{}"), (None, "null"), ("a", "a"), (1, "1")])
def test_empty_and_scalar_documents_are_rendered(document: Any, text: str) -> None:
    assert rendered(document, Output.YAML) == text


@pytest.mark.parametrize("flags", [["--json"], ["-o", "json"], ["-ojson"], ["--output=JSON"], ["--json", "-o", "json"]])
def test_several_flags_select_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    code, out, _ = kera(capsys, "tls", "init", str(tmp_path / "made"), *flags)
    assert code == 0
    assert json.loads(out)["ca"] == str(tmp_path / "made" / "ca.pem")


@pytest.mark.parametrize("flags", [["--json", "-o", "yaml"], ["-o", "table", "--json"]])
def test_contradictory_output_flags_are_refused_before_the_command_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    code, out, err = kera(capsys, "tls", "init", str(tmp_path / "made"), *flags)
    assert (code, out) == (2, "")
    assert "contradict each other" in err
    assert not (tmp_path / "made").exists()


def test_tls_init_prints_yaml_without_private_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kera(capsys, "tls", "init", str(tmp_path / "made"), "-o", "yaml")
    assert code == 0
    assert [each["name"] for each in yaml.safe_load(out)["certificates"]] == ["localhost"]
    assert "PRIVATE" not in out
