"""Commands of `kera` in messages, hints and help texts of the product exist, with their options.

The commands are found in the string literals of the packages, and checked against the real command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_tidy import ROOT, example_app, kera_command, looked_at, modules_of_packages

pytestmark = pytest.mark.xdist_group("sources")

OTHER_TEXTS = {".html", ".java", ".js"}
NAMED = re.compile(r"(?<![\w./:@'-])kera((?:\s+(?:(?:--)?\{\}|[\w./:=\[\]<>|*-]+|…))+)")
"""`kera` and the words after it, up to the next punctuation mark. `{}` stands for a value in a message."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]*[a-z]")
OF_OTHERS = {
    *("--jars", "--shm-size"),
    *("--descriptor_set_out", "--include_imports", "--proto_path"),
}
"""Options of Spark and Docker, and of protoc."""
PROSE = {"and", "has", "in", "is", "metadata", "source", "sources"}
"""Words that follow the name of the product in a sentence."""


def unknown_commands(text: str, kera: Any) -> list[str]:
    """The commands in `text` that do not exist, or have an option that does not exist."""
    found = []
    for match in NAMED.finditer(text):
        words = [word.rstrip(".:") for word in match[1].split()]
        unknown = None if words[0] in PROSE else _unknown_word(kera, words)
        if unknown:
            found.append(f"kera {' '.join(words)}: there is no {unknown}")
    return found


def _unknown_word(command: Any, words: list[str]) -> str | None:
    """The first word that is neither a subcommand, where one is expected, nor an option of the command."""
    options = {"--help", "--{}"}
    for word in words:
        subcommands = getattr(command, "commands", {})
        options |= options_of(command)
        if word.startswith("-"):
            if word.partition("=")[0] not in options:
                return word
        elif word in subcommands:
            command = subcommands[word]
        elif subcommands:  # a plain word is wrong here; a check cannot continue after a placeholder, such as COMMAND
            return word if re.fullmatch(r"[a-z][a-z-]*", word) else None
    return None


def options_of(command: Any) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


def all_options(command: Any) -> set[str]:
    """The options of a command and of all its subcommands."""
    below = (all_options(each) for each in getattr(command, "commands", {}).values())
    return options_of(command).union({"--help", "--no"}, *below)


def product_texts() -> Iterator[tuple[Path, str]]:
    for path in modules_of_packages():
        for text in looked_at(path.read_text()).strings:
            yield path.relative_to(ROOT), text


def test_every_command_named_by_the_product_exists() -> None:
    kera = kera_command()
    named = [(path, text) for path, text in product_texts() if NAMED.search(text)]
    folders = {path.parent for path in modules_of_packages()}
    named += [(path, path.read_text()) for folder in folders for path in folder.iterdir() if path.suffix in OTHER_TEXTS]

    assert len(named) > 100, "the scan does not find the commands that messages name"
    assert [f"{path}: {unknown}" for path, text in named for unknown in unknown_commands(text, kera)] == []


def test_every_option_named_by_the_product_exists() -> None:
    known = all_options(kera_command()) | OF_OTHERS

    assert [
        f"{path}: {name}" for path, text in product_texts() for name in OPTION.findall(text) if name not in known
    ] == []


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("kera nothing makes one", "kera nothing makes one: there is no nothing"),
        ("see kera group nothing", "kera group nothing: there is no nothing"),
        ("kera group run {} --nothing", "kera group run {} --nothing: there is no --nothing"),
        (
            "(kera group run orders --rows=5 --at x --all)",
            "kera group run orders --rows=5 --at x --all: there is no --all",
        ),
    ],
)
def test_an_unknown_command_is_found(text: str, unknown: str) -> None:
    assert unknown_commands(text, example_app()) == [unknown]


@pytest.mark.parametrize(
    "text",
    [
        "kera group run {} --rows 5 shows it; --nothing is another sentence",
        "kera is a service, and has commands",
        "kera group stop {}: as kera group run, {}",
        "the option kera.group.nothing, http://kera nothing",
        "kera group {} --help",
    ],
)
def test_existing_commands_and_prose_are_no_violations(text: str) -> None:
    assert unknown_commands(text, example_app()) == []


def test_the_texts_of_a_module_are_its_literals_with_placeholders() -> None:
    module = '"""kera a"""\nraise Error(f"kera b {name}" " --c")\nx = "kera " "d"\n'

    assert sorted(looked_at(module).strings) == ["kera a", "kera b {} --c", "kera d"]
