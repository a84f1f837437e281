"""The examples in the documentation: code in fences, and the commands in terminal sessions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("**/README.md")])
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SEPARATORS = {"|", "||", "&&", ";", "&"}


class Example(NamedTuple):
    """The code in a fence."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    """A typed command, and the shown part of its output."""

    where: str
    text: str
    output: str


def examples(page: Path, *languages: str) -> list[Example]:
    """The examples of a page in these languages, in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        indentation, language, body = fence.groups()
        if language in languages:
            lines = [line.removeprefix(indentation) for line in body.splitlines()]
            found.append(Example(page, text.count("\n", 0, fence.start()) + 2, language, "\n".join(lines)))
    return found


def commands(example: Example) -> Iterator[Command]:
    """The typed commands: all of `sh`, and the lines of `console` after a prompt. A backslash continues a line."""
    typed: list[list[str]] = []
    is_console, goes_on = example.language == "console", False
    for line in example.text.splitlines():
        if goes_on:
            typed[-1][0] += f"\n{line}"
        elif not is_console or line.startswith("$ "):
            typed.append([line.removeprefix("$ ") if is_console else line])
        elif typed:
            typed[-1].append(line)
            continue
        goes_on = line.endswith("\\")
    for text, *output in typed:
        if text.strip() and not text.lstrip().startswith("#"):
            yield Command(str(example), text, "\n".join(output))


def calls(command: Command, program: str = "kera") -> Iterator[list[str]]:
    """The arguments of each call of a program in a command, as the shell would pass them."""
    lexer = shlex.shlex(command.text.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>")
    lexer.commenters = "#"
    lexer.whitespace_split = True
    call: list[str] = []
    for token in [*lexer, ";"]:
        if token in _SEPARATORS or token in {"<", ">", ">>"}:
            names = [each for each in call if "=" not in each] if call and "=" in call[0] else call
            if names and Path(names[0]).name == program:
                yield names[1:]
            call = []
        else:
            call.append(token)
