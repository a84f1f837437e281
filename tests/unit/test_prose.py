"""Pages are written in plain English: each has a limit of riddles per 100 sentences, which may only fall.

A riddle is a sentence that has to be read twice, found by its form: a noun clause as subject ("What is lost …",
"Who reads …"), an inverted relative ("of which"), a passive that hides who acts ("is told"), or filler ("so many").
The search is rough on purpose: it counts, and a page may have a few. Docstrings and comments are held to the same, and
names of tests to the crudest of these forms.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

RIDDLES = [
    re.compile(r"^(Who|Whoever|Whose|What|Whatever|Of|To whom|With whom|Where) (?!you\b)[^?]*[^?]$"),
    re.compile(r"\b(of|to|by|from|with|in) (which|whom)\b"),
    re.compile(r"\b(is|are|was|were|be|been) told\b|\btells? (of|that|for)\b"),
    re.compile(r"[,;:] (what|who|whoever|whose) (is|are|was|were|has|have|had|comes?|goes|reads?|writes?|may|can)\b"),
    re.compile(r"\b(there is not|has nothing|has none|is none|are none|so many|so much|as much as it|nobody)\b"),
]

LIMIT = 5
"""Riddles per 100 sentences that a page may have."""

DOCSTRING_RIDDLE = re.compile(r'^ *r?"""(?:What|Who|Whose|Of|Whoever|Whatever) ', re.MULTILINE)
DOCSTRINGS_LEFT = {
    "backup/kera/backup": 0,
    "broker/kera/broker": 0,
    "client/kera/cli": 0,
    "client/kera/client": 0,
    "client/kera/connect": 0,
    "client/kera/console": 0,
    "client/kera/local": 0,
    "client/kera/pytest_plugin": 0,
    "coordinator/kera/coordinator": 0,
    "core": 1,
    "core/kera/core": 0,
    "core/kera/server": 0,
    "spark_connector": 1,
    "spark_connector/kera/spark_connector": 0,
    "bench": 0,
    "demo": 0,
    "scripts": 0,
    "tests": 0,
    "tests/chaos": 0,
    "tests/fuzz": 0,
    "tests/integration": 1,
    "tests/property": 0,
    "tests/simulation": 0,
    "tests/spark": 0,
    "tests/unit": 1,
}
"""Docstrings of each package that match, without naming their subject. Lower the counts; never raise one."""


CODE_LIMIT = 3
"""Riddles per 100 sentences that the docstrings and comments of a package may have."""
CODE_TEXT = re.compile(
    r'^ *r?"""([^\0]*?)"""|((?:^ *# (?!type:|noqa|fmt:|pragma).*\n)+)|  # (?!type:|noqa|fmt:)(.*)$', re.MULTILINE
)
"""A docstring, lines of comments, or a comment behind a statement."""


NAME_RIDDLE = re.compile(
    r"""def\ test(?:
          _(?:what|whatever|who|whoever|whose|whom|where|of|it|they)_
        | \w*(?:
            _(?:and|but|by|for|from|if|of|or|to|when|with)_(?:what|whom?)_
          | _(?:by|for|from|of|to|with)_whose_
          | (?<!_say)(?<!_says)(?<!_learns)_what_(?:is|are|was|were)_
          | _(?:is|are|was|were|be|been)_told
          | _of_which_ | _none_of_ | _so_(?:many|much)_ | _that_(?:is|are)_none | nobody
        )
    )\w*""",
    re.VERBOSE,
)
"""The crudest forms in names of tests. Relative clauses are plain: a stream whose …, callers who …, says what is …."""
NAMES_LEFT = {
    "tests/integration": 2,
    "tests/property": 0,
    "tests/simulation": 0,
    "tests/spark": 2,
    "tests/unit": 6,
}
"""Names of tests that match, by folder. Lower the counts; never raise one."""


HEAD_ALONE = re.compile(r'^ *r?"""See the head of this module', re.MULTILINE)
HEAD_ALONE_LEFT = {
    "backup": 0,
    "bench": 7,
    "broker": 0,
    "client": 0,
    "coordinator": 0,
    "core": 0,
    "scripts": 0,
    "spark_connector": 0,
    "tests": 17,
}
"""Docstrings of each tree that only refer to the module head. Lower the counts; never raise one."""


MESSAGE_RIDDLES = [
    *RIDDLES[1:3],
    re.compile(r"(?:^|[.;:,(] )(?:who|whoever|what|whatever|of|to whom|where) (?!you\b)[^?]*[^?]$", re.IGNORECASE),
    re.compile(r"\b(?:what|who|whoever) (?:is|are|was|were|has|have|had|it|they|comes?|goes|reads?|writes?|may|can)\b"),
    re.compile(r"\b(?:there is not|has nothing|is none|are none|so many|so much|so long|nobody|no good)\b"),
]
MESSAGES_LEFT = {"backup": 0, "broker": 0, "client": 0, "coordinator": 0, "core": 0, "spark_connector": 0}
"""Number of riddles in errors, logs, helps and metrics, by tree. Lower the counts; never raise one."""
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
MESSAGE_CALLS = re.compile(r"(Error|Exception|Parameter|Refused|NotAllowed|Family)$")
MESSAGE_ARGUMENTS = {"help", "description", "message", "reason"}


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page: paragraphs, list items and cells of tables, without code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(    |#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|[\[*]|`[^`]*`", lambda found: "code" if found[0].startswith("`") else "", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*\d]+\.? )|\|", text):
        for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(block.split())):
            if len(sentence.split()) > 2:
                yield sentence.strip("*- ")


def riddles(sentence: str) -> int:
    return sum(1 for pattern in RIDDLES if pattern.search(sentence))


def riddles_per_100(text: str) -> float:
    found = list(sentences(text))
    return 100 * sum(map(riddles, found)) / max(len(found), 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_written_in_plain_english(page: Path) -> None:
    text = page.read_text()
    worst = [sentence for sentence in sentences(text) if riddles(sentence)]
    assert riddles_per_100(text) <= LIMIT, "\n".join(["rewrite some of these sentences:", *worst[:20]])


def package_of(path: Path) -> str:
    """The innermost package that has a limit, or else the tree."""
    name = path.relative_to(ROOT).as_posix()
    return max((each for each in DOCSTRINGS_LEFT if name.startswith(f"{each}/")), key=len, default=name.split("/")[0])


def docstring_riddles() -> dict[str, int]:
    """The docstrings that begin with a riddle, counted by `package_of`."""
    found = dict.fromkeys(DOCSTRINGS_LEFT, 0)
    for root in sorted({name.split("/")[0] for name in DOCSTRINGS_LEFT}):
        for path in (ROOT / root).rglob("*.py"):
            package, text = package_of(path), path.read_text(encoding="utf-8")
            found[package] = found.get(package, 0) + len(DOCSTRING_RIDDLE.findall(text))
    return found


def test_docstrings_name_their_subject() -> None:
    more = {package: count for package, count in docstring_riddles().items() if count > DOCSTRINGS_LEFT.get(package, 0)}
    assert not more, "begin these docstrings with the thing that they describe, not with What, Who or Of"


def test_a_docstring_without_a_subject_is_found() -> None:
    text = 'x = 1\n"""Of this version."""\n\ndef f():\n    """What is kept."""\n    return "Of it"\n'
    assert len(DOCSTRING_RIDDLE.findall(text)) == 2


def code_text(source: str) -> str:
    """The docstrings and comments of a module, a paragraph each."""
    return "\n\n".join(re.sub("^ *#? ?", "", "".join(each), flags=re.MULTILINE) for each in CODE_TEXT.findall(source))


@pytest.mark.parametrize("package", [each for each in DOCSTRINGS_LEFT if "/" in each or each == "tests"])
def test_docstrings_and_comments_are_written_in_plain_english(package: str) -> None:
    paths = [path for path in (ROOT / package).rglob("*.py") if package_of(path) == package]
    texts = [path.read_text(encoding="utf-8") for path in paths if not path.stem.endswith(("_pb2", "_pb2_grpc"))]
    found = [each for text in texts for each in sentences(code_text(text))]
    worst = [each for each in found if riddles(each)]
    assert 100 * len(worst) / len(found) <= CODE_LIMIT, "\n".join(["rewrite some of these sentences:", *worst[:20]])


@pytest.mark.parametrize("folder", NAMES_LEFT)
def test_names_of_tests_are_plain_english(folder: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
    found = [each for text in texts for each in NAME_RIDDLE.findall(text)]
    assert len(found) <= NAMES_LEFT[folder], "\n".join(["state the behaviour, with a thing as the subject:", *found])


@pytest.mark.parametrize(
    "name",
    [
        "what_is_gone_already_is_no_error",
        "of_a_long_backlog_only_the_next_groups_are_known",
        "a_gap_of_which_nobody_says_where_it_ends",
        "a_copy_that_is_told_to_end_ends",
        "commands_work_for_who_has_authenticated",
        "so_many_requests_are_in_flight",
    ],
)
def test_a_name_that_is_a_riddle_is_found(name: str) -> None:
    assert NAME_RIDDLE.findall(f"def test_{name}() -> None:\n")


@pytest.mark.parametrize("name", ["a_copy_whose_stream_is_gone_fails", "the_error_says_what_is_wrong"])
def test_a_plain_name_is_no_riddle(name: str) -> None:
    assert not NAME_RIDDLE.findall(f"def test_{name}() -> None:\n")


def test_docstrings_and_comments_are_extracted() -> None:
    source = (
        'x = 1  # noqa: E501\n"""A sentence of four."""\n    # Of two\n    # lines that follow.\nf()  # who it is\n'
    )
    assert list(sentences(code_text(source))) == ["A sentence of four.", "Of two lines that follow.", "who it is"]


def test_docstrings_do_more_than_refer_to_the_module_head() -> None:
    found = {
        tree: sum(len(HEAD_ALONE.findall(path.read_text(encoding="utf-8"))) for path in (ROOT / tree).rglob("*.py"))
        for tree in HEAD_ALONE_LEFT
    }
    more = {tree: count for tree, count in found.items() if count > HEAD_ALONE_LEFT[tree]}
    assert not more, "say in one sentence what an object of the class is and promises, not where to read it"


def test_a_docstring_that_only_refers_to_the_module_head_is_found() -> None:
    assert HEAD_ALONE.findall('class A:\n    """See the head of this module. Belongs to a loop."""\n')


def messages(source: str) -> Iterator[str]:
    """The texts of a module that people read: of exceptions, calls that log, helps of options, and metrics."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from texts(node.exc)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if (isinstance(node.func, ast.Attribute) and name in LOG_METHODS) or MESSAGE_CALLS.search(name):
                for argument in node.args:
                    yield from texts(argument)
            for keyword in node.keywords:
                if keyword.arg in MESSAGE_ARGUMENTS:
                    yield from texts(keyword.value)


def texts(node: ast.AST) -> Iterator[str]:
    """The strings of an expression of two words or more, with {} in place of values."""
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "{}" for each in node.values]
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and " " in node.value:
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def message_riddles(source: str) -> list[str]:
    return [text for text in messages(source) if any(pattern.search(text) for pattern in MESSAGE_RIDDLES)]


@pytest.mark.parametrize("tree", MESSAGES_LEFT)
def test_messages_are_written_in_plain_english(tree: str) -> None:
    paths = (path for path in (ROOT / tree).rglob("*.py") if "tests" not in path.parts)
    found = {text for path in paths for text in message_riddles(path.read_text(encoding="utf-8"))}
    assert len(found) <= MESSAGES_LEFT[tree], "\n".join(["rewrite these messages:", *sorted(found)])


@pytest.mark.parametrize(
    "source",
    [
        'raise Gone("what was here is lost")',
        'raise Gone(f"{name}: nobody knows it")',
        'log.warning("a backup is told to stop", backup_id=1)',
        'option = typer.Option("x", help="Who reads it.")',
        'family = GaugeMetricFamily("kera_x", "streams of which there is one")',
    ],
)
def test_a_message_that_is_a_riddle_is_found(source: str) -> None:
    assert message_riddles(source)


@pytest.mark.parametrize(
    "sentence",
    [
        "Who is told stale_epoch ends",
        "Of these one is kept",
        "It is told so",
        "It has a file of which nobody knows",
        "Readers are served; who is late waits",
    ],
)
def test_a_riddle_is_found(sentence: str) -> None:
    assert riddles(sentence)


@pytest.mark.parametrize("sentence", ["A broker that receives stale_epoch shuts down.", "What is a streamlet?"])
def test_a_plain_sentence_is_no_riddle(sentence: str) -> None:
    assert not riddles(sentence)
