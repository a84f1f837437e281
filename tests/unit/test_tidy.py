"""Rules of this tree that no linter knows, as tests.

Most rules are a function from a file's text to its violations, so that a test can plant a violation and have it
found: a rule that cannot fail protects nothing. In each section the tests over the tree come first, the planted
violations after them.

The searched words and paths are composed of parts, so that this file passes its own rules.
"""

import ast
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.examples import first_quick

# With the other tests that look at every module, which then parse each only once.
pytestmark = pytest.mark.xdist_group("sources")

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE_ROOTS: list[str] = PYPROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]
DISTRIBUTIONS = {
    path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("distributions/*/pyproject.toml")
}
PACKAGES: list[str] = [
    *PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"],
    *chain.from_iterable(
        each["tool"]["hatch"]["build"]["hooks"]["custom"]["packages"] for each in DISTRIBUTIONS.values()
    ),
]
BUILD_FOLDERS = {Path("core/native"), Path("spark_connector/jvm")}  # below a source root, with sources of builds

# Folders without our own files. Folders whose name starts with a dot are skipped too, except those of CI.
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "metastore_db", "node_modules", "spark-warehouse", "target"}
DOT_FOLDERS = {".ci", ".github"}

CODE_SUFFIXES = {".c", ".go", ".h", ".java", ".kts", ".proto", ".py", ".scala", ".sh", ".toml", ".yaml", ".yml"}
CODE_NAMES = {"Dockerfile", "Makefile", "run"}


def files() -> Iterator[Path]:
    """Every written or generated file of the tree, without the leftovers of tools."""
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in SKIPPED_FOLDERS and (not name.startswith(".") or name in DOT_FOLDERS)
        ]
        yield from (Path(folder, name) for name in names)


def code() -> list[Path]:
    return [path for path in files() if path.suffix in CODE_SUFFIXES or path.name in CODE_NAMES]


def modules_of_packages() -> list[Path]:
    modules = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [path for path in modules if "_pb2" not in path.name]


def text_of(path: Path) -> str:
    """The file's text; empty for one that is binary."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


class Looked(NamedTuple):
    """The parts of a module's syntax tree that rules need. The tree itself is too large to be kept."""

    docstring: str | None
    wall_clock: list[str]
    """Lines that read the wall clock."""
    crowded: list[str]
    """Classes with too many public methods."""
    imports: list[tuple[str, list[str]]]
    """Modules of `from` imports, and the full names of the imported objects."""
    strings: list[str]
    """The string literals; `{}` stands for a value in an f-string."""


@functools.cache
def looked_at(text: str) -> Looked:
    """Look at a module: in one pass, because parsing and walking all modules takes seconds."""
    tree, lines = ast.parse(text), text.splitlines()
    looked = Looked(ast.get_docstring(tree), [], [], [], [])
    parts: set[int] = set()  # literals within f-strings
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = getattr(node.value, "id", "") or getattr(node.value, "attr", "")
            if f"{of}.{node.attr}" in WALL_CLOCK_NAMES or (node.attr == "now_us" and "clock" in of):
                looked.wall_clock.append(lines[node.lineno - 1].strip())
        elif isinstance(node, ast.ImportFrom):
            if node.module == "time" and any(each.name in {"time", "time_ns"} for each in node.names):
                looked.wall_clock.append(lines[node.lineno - 1].strip())
            looked.imports.append((node.module or "", [f"{node.module}.{each.name}" for each in node.names]))
        elif isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            values = (str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
            looked.strings.append("".join(values))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in parts:
                looked.strings.append(node.value)
        elif isinstance(node, ast.ClassDef) and node in tree.body:
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            methods = sum(not each.name.startswith("_") for each in functions)
            if methods > METHODS_MAX:
                looked.crowded.append(f"class {node.name} of {methods} public methods")
    return looked


def violations(paths: Iterable[Path], rule: Callable[[str], list[str]]) -> list[str]:
    """The findings of `rule`, each with its file. A run over no file would prove nothing, so it fails."""
    checked = list(paths)
    assert checked, "no file to check"
    return [f"{path.relative_to(ROOT)}: {found}" for path in checked for found in rule(text_of(path))]


# --- leftovers, and paths of one machine -------------------------------------------------------------------

NOTES = ("TO" + "DO", "FIX" + "ME")
NOTE_WITHOUT_REASON = re.compile(rf"\b(?:{'|'.join(NOTES)})\b(?!\(\s*[^)\s][^)]*\))")
DEVELOPER_PATH = re.compile(r"(?<![\w.$})-])/(?:ro" + r"ot|wo" + r"rk|home/\w+|Users/\w+)/")


def notes_without_reason(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if NOTE_WITHOUT_REASON.search(line)]


def developer_paths(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if DEVELOPER_PATH.search(line)]


def test_a_note_for_later_gives_its_reason_in_parentheses() -> None:
    assert violations(code(), notes_without_reason) == []


def test_no_file_has_a_path_of_a_developers_machine() -> None:
    assert violations(files(), developer_paths) == []


@pytest.mark.parametrize("note", NOTES)
def test_a_note_without_a_reason_is_found(note: str) -> None:
    for line in (f"# {note}", f"# {note}: later", f"x = 1  # {note}()", f"// {note}( )"):
        assert notes_without_reason(line) == [line]
    assert notes_without_reason(f"# {note}(needs format version 2): drop the padding") == []


@pytest.mark.parametrize("home", ["/ro" + "ot", "/wo" + "rk", "/home/" + "ada", "/Users/" + "ada"])
def test_a_path_of_a_developers_machine_is_found(home: str) -> None:
    for line in (f"{home}/x", f'open("{home}/x")', f"DIR={home}/x", f"file://{home}/x"):
        assert developer_paths(line) == [line]
    for line in (f"/opt/spark{home}/x", f"${{PREFIX}}{home}/x", f"..{home}/x"):
        assert developer_paths(line) == []


# --- the wall clock decides nothing that waits --------------------------------------------------------------

WALL_CLOCK = {
    "client/kera/cli/_audit_stream.py": "says when something happened to access, and decides nothing",
    "bench/due.py": "values begin with when they were due, for readers in other processes",
    "bench/epochs_live.py": "how old records are when they are read, which another process has made",
    "bench/latency_path.py": "records carry when they were sent, by another process",
    "bench/latency_reader.py": "records carry when they were accepted, by another process",
    "bench/spark_paced.py": "records carry when they were made, and Spark tells when it was at work",
    "bench/recovery.py": "compared with the times in the coordinator's report",
    "bench/spark_engines.py": "compared with when values were due, which another process has written into them",
    "broker/kera/broker/latency/manager.py": "clients are told it, to measure how far theirs is from it",
    "broker/kera/broker/engine.py": "when the first records of a launch were appended: retention by age",
    "broker/kera/broker/steady_time.py": "retention by age compares with when records were appended",
    "client/kera/connect/files/lines.py": "timestamps of records that have none",
    "client/kera/client/json_form/records.py": "timestamps of records that have none",
    "client/kera/cli/bench/_report.py": "when a report was made",
    "client/kera/cli/bench/_worker.py": "latency from when a chunk was made, in another process",
    "client/kera/cli/doctor.py": "how long a certificate is good yet",
    "client/kera/cli/consume.py": "--since 5m is that long before now",
    "client/kera/cli/epochs.py": "how far entries are behind, as shown",
    "client/kera/cli/group/__init__.py": "how old the oldest unread record is, as shown",
    "client/kera/cli/group/resets.py": "--to 2h is that long before now",
    "client/kera/console/pages/streams.py": "how far entries are behind, as shown",
    "client/kera/cli/top/_collector.py": "when a sample was taken, as shown",
    "client/kera/cli/top/_polling.py": "since when somebody has not answered, as shown",
    "client/kera/client/admin/daemons.py": "how far the clocks of daemons are off",
    "client/kera/client/consuming/traced.py": "when a span has begun, as shown",
    "client/kera/client/producing/appender.py": "timestamps of records that have none",
    "client/kera/client/producing/open_chunks/batches.py": "timestamps of records that have none",
    "client/kera/client/producing/producer.py": "timestamps of records; brokers are told how far it is ahead",
    "coordinator/kera/coordinator/application.py": "epochs are above what the clock says, too",
    "coordinator/kera/coordinator/access/service.py": "when users were changed, as shown; when tokens expire",
    "coordinator/kera/coordinator/schemas/service.py": "when a schema was registered, as shown",
    "coordinator/kera/coordinator/latency/service.py": "when a constraint was made and changed, as shown",
    "coordinator/kera/coordinator/schemas/columns.py": "likewise",
    "coordinator/kera/coordinator/coordinator.py": "when a copy of the metadata was made, for people",
    "coordinator/kera/coordinator/cluster/state.py": "ids and epochs are above what the clock says, too",
    "coordinator/kera/coordinator/recovery/carry_out.py": "when phases of a recovery ended, as shown",
    "coordinator/kera/coordinator/recovery/records.py": "when recoveries began or were cancelled, as shown",
    "coordinator/kera/coordinator/operations/members.py": "what time it is here, for brokers that compare",
    "coordinator/kera/coordinator/operations/streams.py": "when a stream was created, as shown",
    "core/kera/server/access/jwt_tokens.py": "when tokens of other issuers expire, which says when and not how soon",
    "client/kera/client/cluster/at_work.py": "compared with the times of records that an application makes",
    "core/kera/core/base/clock.py": "the one behind the protocol",
    "core/kera/server/monitoring/certificates.py": "how long a certificate is good yet",
    "core/kera/server/monitoring/monitor.py": "what time it is here, for those who compare clocks",
    "core/kera/core/security/issuing.py": "from when and until when a certificate is good",
    "demo/feeder.py": "compared with when Spark says that it was done",
    "demo/progress.py": "compared with what the feeder wrote; shown",
    "spark_connector/kera/spark_connector/reading/batch.py": "a start of now-5m is that long before now",
    "spark_connector/kera/spark_connector/reading/latency/pace.py": "how old a record is, and never younger",
    "spark_connector/kera/spark_connector/reading/streaming.py": "a start of now-5m is that long before now",
}
"""Modules that read the wall clock, and their reasons. It is set ahead and back while programs run: so no wait,
time-out, expiry or lease uses it."""

WALL_CLOCK_NAMES = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
JAVA_WALL_CLOCK = {
    "spark_connector/jvm/src/main/java/kera/wire/ChunkSender.java": "timestamps of records that have none",
}
WALL_CLOCK_OF_JAVA = re.compile(
    r"currentTimeMillis|\bInstant\.now|\bnew Date\(|(?:Local|Zoned|Offset)DateTime\.now|\bClock\."
)


def wall_clock_reads(text: str) -> list[str]:
    """Lines that read the wall clock, through `kera.core.base.clock` or directly."""
    if not re.search(r"import time|from time|datetime|date\b|now_us", text):  # parsing all modules takes long
        return []
    return looked_at(text).wall_clock


def wall_clock_reads_of_java(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if WALL_CLOCK_OF_JAVA.search(line)]


def test_the_wall_clock_is_read_only_in_modules_with_a_reason() -> None:
    folders = [*PACKAGES, "bench", "demo", "scripts"]
    paths = {path for folder in folders for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name}
    read = {str(path.relative_to(ROOT)) for path in paths if wall_clock_reads(text_of(path))}
    assert read == WALL_CLOCK.keys()
    java_read = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "spark_connector").rglob("*.java")
        if wall_clock_reads_of_java(text_of(path))
    }
    assert java_read == JAVA_WALL_CLOCK.keys()


@pytest.mark.parametrize(
    "line",
    [
        "now = time.time()",
        "now = time.time_ns() // 1000",
        "clock = time.time",
        "from time import time",
        "at = datetime.now()",
        "at = datetime.datetime.now(datetime.UTC)",
        "due = self._clock.now_us() + 5",
    ],
)
def test_a_read_of_the_wall_clock_is_found(line: str) -> None:
    assert wall_clock_reads(f"import time\n{line}\nlater = time.monotonic() + loop.time() + clock.monotonic_s()") == [
        line
    ]


def test_a_read_of_the_wall_clock_in_java_is_found() -> None:
    assert wall_clock_reads_of_java("long now = System.currentTimeMillis();\nlong end = System.nanoTime();") == [
        "long now = System.currentTimeMillis();"
    ]


# --- tests wait for conditions, never for time -------------------------------------------------------------


def is_sleep(node: ast.AST) -> bool:
    """Whether `node` calls the sleep of time or asyncio. A sleep of 0 only lets others run."""
    match node:
        case ast.Call(args=[ast.Constant(value=0)]):
            return False
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep")):
            return True
        case ast.Call(func=ast.Name(id="sleep")):
            return True
    return False


def fixed_sleeps(text: str) -> list[str]:
    """Sleeps that are not the pause of a polling `while` loop and give no reason (`# sleep: …`)."""
    if "sleep(" not in text:  # parsing all tests takes long
        return []
    lines = text.splitlines()

    def found(node: ast.AST, *, polling: bool) -> Iterator[str]:
        if is_sleep(node) and not polling:
            line = lines[node.lineno - 1]  # type: ignore[attr-defined]  # a call has a line
            if not re.search(r"# sleep: \S", line):
                yield line.strip()
        if isinstance(node, ast.While):
            polling = True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.For | ast.AsyncFor):
            polling = False
        for child in ast.iter_child_nodes(node):
            yield from found(child, polling=polling)

    return list(found(ast.parse(text), polling=False))


def test_tests_wait_for_conditions_and_not_for_time() -> None:
    assert violations((ROOT / "tests").rglob("*.py"), fixed_sleeps) == []


@pytest.mark.parametrize(
    "text",
    [
        "time.sleep(1)",
        "from time import sleep\nsleep(0.1)",
        "async def f():\n    await asyncio.sleep(pause_s)",
        "for _ in range(10):\n    time.sleep(0.1)",
        "while waiting:\n    def f():\n        time.sleep(1)",
        "time.sleep(1)  # sleep:",
    ],
)
def test_a_fixed_sleep_is_found(text: str) -> None:
    assert len(fixed_sleeps(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "while not done():\n    time.sleep(0.01)",
        "async def f():\n    await asyncio.sleep(0)",
        "clock.sleep(5)",
        "time.sleep(1)  # sleep: the kernel's clock ticks once a second",
    ],
)
def test_polls_yields_fake_clocks_and_sleeps_with_a_reason_are_no_fixed_sleeps(text: str) -> None:
    assert fixed_sleeps(text) == []


# --- generated code ----------------------------------------------------------------------------------------


def proto_check(root: Path) -> subprocess.CompletedProcess[str]:
    script = root / "scripts" / "proto-check.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(["sh", script], env=environment, capture_output=True, text=True, check=False)


def test_generated_messages_are_current() -> None:
    assert list(ROOT.glob("proto/kera/v1/*.proto"))

    checked = proto_check(ROOT)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def edit_a_proto(folder: Path) -> None:
    proto = min(folder.glob("*.proto"))
    proto.write_text(proto.read_text() + "\nmessage AddedByTheTidyTest {}\n")


def lose_a_generated_file(folder: Path) -> None:
    min(folder.glob("*_pb2.py")).unlink()


def lose_a_stub(folder: Path) -> None:
    min(folder.glob("*_pb2.pyi")).unlink()


def leave_a_generated_file_behind(folder: Path) -> None:
    (folder / "gone_pb2.py").touch()


@pytest.mark.parametrize(
    "spoil",
    first_quick([edit_a_proto, lose_a_generated_file, lose_a_stub, leave_a_generated_file_behind], 1),
)
def test_generated_messages_that_are_not_current_are_found(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    copy = tmp_path / "a tree"
    for name in ("proto", "scripts"):
        shutil.copytree(ROOT / name, copy / name)
    spoil(copy / "proto" / "kera" / "v1")

    checked = proto_check(copy)

    assert checked.returncode == 1
    assert "run make proto" in checked.stderr


# --- packages ----------------------------------------------------------------------------------------------


def without_docstring(text: str) -> list[str]:
    return [] if looked_at(text).docstring else ["has no module docstring"]


def unlisted_packages(root: Path) -> list[str]:
    """Folders of Python modules below the source roots that no wheel would have."""
    folders = (path.parent.relative_to(root) for name in SOURCE_ROOTS for path in (root / name).rglob("*.py"))
    listed = [*map(Path, PACKAGES), *BUILD_FOLDERS]
    return sorted({str(folder) for folder in folders if not any(map(folder.is_relative_to, listed))})


def packages_without_marker(root: Path) -> list[str]:
    return [package for package in PACKAGES if not (root / package / "py.typed").is_file()]


def namespace_inits(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.glob("*/kera/__init__.py*")]


def test_every_module_of_a_package_has_a_docstring() -> None:
    assert violations(modules_of_packages(), without_docstring) == []


def test_every_package_is_in_one_wheel_and_is_marked_as_typed() -> None:
    assert unlisted_packages(ROOT) == []
    assert len(PACKAGES) == len(set(PACKAGES))
    assert packages_without_marker(ROOT) == []


def test_kera_is_a_namespace_package() -> None:
    assert namespace_inits(ROOT) == []
    assert not (ROOT / "kera").exists()


def test_a_violation_in_a_package_is_found(tmp_path: Path) -> None:
    assert without_docstring("import os\n")
    assert without_docstring('"""What it is."""\n') == []

    stray = tmp_path / "core" / "kera" / "stray"
    stray.mkdir(parents=True)
    (stray / "module.py").touch()
    (tmp_path / "core" / "kera" / "__init__.py").touch()

    assert unlisted_packages(tmp_path) == ["core/kera", "core/kera/stray"]
    assert packages_without_marker(tmp_path) == PACKAGES
    assert namespace_inits(tmp_path) == ["core/kera/__init__.py"]


# --- Java and C ----------------------------------------------------------------------------------------------

COLUMNS_MAX = 120
JAVA_TYPE = re.compile(
    r"(?:(?:public|protected|private|abstract|static|final|sealed|non-sealed) )*(?:class|@?interface|record|enum) \w"
)


def badly_laid_out(text: str) -> list[str]:
    """Lines that are too long, have a tab or end with a space."""
    return [line for line in text.splitlines() if len(line) > COLUMNS_MAX or "\t" in line or line != line.rstrip()]


def without_javadoc(text: str) -> list[str]:
    """Declarations of types with no comment right above them, or above their annotations."""
    found, documented = [], False
    for line in map(str.strip, text.splitlines()):
        if line.endswith("*/"):
            documented = True
        elif JAVA_TYPE.match(line):
            found += [] if documented else [line]
            documented = False
        elif not line.startswith("@"):
            documented = False
    return found


def java() -> list[Path]:
    return [path for path in files() if path.suffix == ".java"]


def test_java_and_c_have_short_lines_without_tabs_and_trailing_spaces() -> None:
    assert violations(java(), badly_laid_out) == []
    assert violations([path for path in files() if path.suffix in {".c", ".h"}], badly_laid_out) == []


def test_every_java_type_has_a_comment() -> None:
    assert violations(java(), without_javadoc) == []


@pytest.mark.parametrize("line", ["x" * 121, "int x;\t// tab", "int x; "])
def test_java_that_is_badly_laid_out_is_found(line: str) -> None:
    assert badly_laid_out(f"class A {{\n{line}\n}}\n") == [line]


@pytest.mark.parametrize(
    "declaration", ["class A {", "public final class A<T> {", "record A(int b) {}", "private enum A { B }"]
)
def test_a_java_type_without_a_comment_is_found(declaration: str) -> None:
    assert without_javadoc(f"import b.B;\n\n{declaration}\n") == [declaration]
    assert without_javadoc(f"/** What it is. */\nint a;\n\n    {declaration}\n") == [declaration]
    assert without_javadoc(f"/**\n * What it is: a class of its own.\n */\n@Evolving\n{declaration}\n") == []


# --- pinned dependencies -----------------------------------------------------------------------------------


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def unpinned(project: dict[str, Any], constraints: str) -> list[str]:
    """Dependencies of the project without an exact version in the constraints."""
    pinned = {canonical(line.split("==")[0]) for line in constraints.splitlines() if "==" in line}
    wanted = [*project["dependencies"], *chain.from_iterable(project.get("optional-dependencies", {}).values())]
    names = {canonical(re.split(r"[^\w.-]", requirement)[0]) for requirement in wanted}
    return sorted(names - pinned - {"kera", *(f"kera-{name}" for name in DISTRIBUTIONS)})


BENCH = tomllib.loads((ROOT / "bench" / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "project", [PYPROJECT, BENCH, *DISTRIBUTIONS.values()], ids=lambda described: described["project"]["name"]
)
def test_every_dependency_is_pinned(project: dict[str, Any]) -> None:
    assert unpinned(project["project"], (ROOT / "constraints.txt").read_text()) == []


def test_an_extra_requires_its_distribution_at_the_common_version() -> None:
    version = PYPROJECT["project"]["version"]
    extras = PYPROJECT["project"]["optional-dependencies"]

    for name, described in DISTRIBUTIONS.items():
        project = described["project"]
        own = [each for each in project["dependencies"] if each.startswith("kera")]
        assert (project["name"], project["version"]) == (f"kera-{name}", version)
        assert f"kera=={version}" in own
        assert all(each.endswith(f"=={version}") for each in own)
        assert extras[name] == [f"kera-{name}=={version}"]


def test_a_dependency_without_a_pin_is_found() -> None:
    project = {
        "name": "kera",
        "dependencies": ["prometheus-client>=0.21"],
        "optional-dependencies": {"a": ["lmdb>=1.5"], "dev": ["kera[a]"]},
    }
    assert unpinned(project, "prometheus_client==0.26.0\nlmdb>=1\n") == ["lmdb"]


# --- commands in the documentation exist -------------------------------------------------------------------

FENCE = re.compile(r"^[ ]*(```+|~~~+)[ ]*(\w*)[^\n]*\n(.*?)^[ ]*\1[ ]*$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
SHELLS = {"", "bash", "console", "sh", "shell"}
OPERATORS = set("();<>|&")
OPTIONS_OF_MAKE_WITH_VALUE = {"-C", "-f"}


def documents() -> list[Path]:
    folders = [ROOT / "docs", ROOT / "bench"]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(path for each in folders for path in each.rglob("*.md"))]


def shell_lines(markdown: str) -> Iterator[str]:
    """Shell lines in code blocks, and inline code. A block with prompts counts only its lines with a prompt."""
    for _, language, block in FENCE.findall(markdown):
        if language in SHELLS:
            lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
            prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            yield from prompted or lines
    yield from INLINE_CODE.findall(FENCE.sub("", markdown))


def commands(markdown: str) -> Iterator[list[str]]:
    """Each command as its words, without variables set before it."""
    for line in shell_lines(markdown):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # an apostrophe: the text is not shell, but may name a command
            words = line.split()
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= OPERATORS:
                if command:
                    yield command
                command = []
            elif command or not re.match(r"\w+=", word):
                command.append(word)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def unknown_target(arguments: list[str]) -> str | None:
    """The first argument of make that is not a target, but should be one."""
    waiting = iter(arguments)
    for argument in waiting:
        if argument in OPTIONS_OF_MAKE_WITH_VALUE:
            next(waiting, None)
        elif not argument.startswith("-") and "=" not in argument and argument not in make_targets():
            return argument
    return None


def unknown_program(package: str, arguments: list[str]) -> str | None:
    """The unknown name after `python -m` with bench or tests.chaos. A placeholder, such as NAME, is not a name."""
    from bench.__main__ import BENCHMARKS
    from tests.chaos.__main__ import PROGRAMS

    name = arguments[0] if arguments else ""
    return name if re.match(r"[a-z]", name) and name not in (BENCHMARKS if package == "bench" else PROGRAMS) else None


def unknown_module(name: str) -> str | None:
    """The module, if it should be a program of this tree and does not exist."""
    path = ROOT.joinpath(*name.split("."))
    there = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    return name if name.split(".", maxsplit=1)[0] in {"bench", "tests"} and not there else None


def kera_command() -> Any:
    import typer

    from kera.cli.app import app

    return typer.main.get_command(app)


def unknown_word(command: Any, arguments: list[str]) -> str | None:
    """The first argument that is neither a subcommand, where `command` expects one, nor an option."""
    waiting = iter(arguments)
    for argument in waiting:
        subcommands = getattr(command, "commands", {})
        if argument in {"--help", "…", "..."}:
            continue
        if argument.startswith("-") and argument != "-":  # a dash is standard input
            name, equals, _ = argument.partition("=")
            options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
            if name not in options:
                return argument
            if not equals and not (options[name].is_flag or options[name].count):
                next(waiting, None)
        elif argument in subcommands:
            command = subcommands[argument]
        elif subcommands:
            return argument
    return None


def unknown_commands(markdown: str, kera: Any) -> list[str]:
    """Commands of make, of kera and of the benchmarks in the document that do not exist."""
    found = []
    for command in commands(markdown):
        program = Path(command[0]).name
        unknown = None
        if program == "make":
            run = next((each.removeprefix("RUN=") for each in command if each.startswith("RUN=")), "")
            unknown = unknown_target(command[1:]) or unknown_program(command[1] if run else "bench", run.split())
        elif program == "kera":
            unknown = unknown_word(kera, command[1:])
        elif program.startswith("python") and command[1:3] == ["-m", "kera.cli"]:
            unknown = unknown_word(kera, command[3:])
        elif program.startswith("python") and command[2:3] in (["bench"], ["tests.chaos"]):
            unknown = unknown_program(command[2], command[3:])
        elif program.startswith("python") and command[1:2] == ["-m"]:
            unknown = unknown_module(command[2])
        if unknown:
            found.append(f"{shlex.join(command)}: there is no {unknown}")
    return found


def test_commands_in_the_documentation_exist() -> None:
    kera = kera_command()
    assert any(commands((ROOT / "README.md").read_text())), "README.md shows no command"

    assert violations(documents(), lambda text: unknown_commands(text, kera)) == []


def test_every_target_is_explained_by_make_help() -> None:
    explained = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert set(re.findall(r"^  ([a-z-]+) ", explained, re.MULTILINE)) == make_targets()


@pytest.mark.parametrize(
    ("markdown", "unknown"),
    [
        ("Run `make nothing`.", "make nothing: there is no nothing"),
        ("```sh\nmake setup  # and then\nX=1 make -C . nothing\n```", "make -C . nothing: there is no nothing"),
        ("```console\n$ make help && make nothing\nmake no command\n```", "make nothing: there is no nothing"),
        ("Run `.venv/bin/kera nothing`.", ".venv/bin/kera nothing: there is no nothing"),
        ("```\nkera group nothing\n```", "kera group nothing: there is no nothing"),
        ("```\nkera \\\n  group run --nothing 1\n```", "kera group run --nothing 1: there is no --nothing"),
        ("`python -m kera.cli nothing`", "python -m kera.cli nothing: there is no nothing"),
        ('`make bench RUN="nothing --quick"`', "make bench 'RUN=nothing --quick': there is no nothing"),
        ('`make chaos RUN="nothing --rounds 2"`', "make chaos 'RUN=nothing --rounds 2': there is no nothing"),
        ("`python -m bench nothing`", "python -m bench nothing: there is no nothing"),
        ("`python -m bench.nothing`", "python -m bench.nothing: there is no bench.nothing"),
    ],
)
def test_an_unknown_command_is_found(markdown: str, unknown: str) -> None:
    assert unknown_commands(markdown, example_app()) == [unknown]


@pytest.mark.parametrize(
    "markdown",
    [
        "Run `make`, `make help`, `make test PYTEST_ARGS='-k chunk'` or `kera --help`.",
        "```sh\nkera --verbose --at host:1 group run orders - --rows=5 --rows 5 | head\n```",
        "```python\nmake nothing\n```",
        "`make bench`, `make bench RUN=$each`, `python -m bench compare --quick`, `python -m bench NAME`",
        "`make chaos`, `make chaos RUN=kill`, `python -m tests.chaos kill --rounds 2`",
        "`python -m bench.compare`, `python -m bench.compare.report`, `python -m venv x`",
        "The package `kera.client`; `don't make nothing`; `kera group …`.",
    ],
)
def test_existing_commands_are_no_violations(markdown: str) -> None:
    assert unknown_commands(markdown, example_app()) == []


def example_app() -> Any:
    """A command line with `kera [--verbose] [--at ADDRESS] group run NAME [--rows N]`."""
    import typer

    app, group = typer.Typer(), typer.Typer()

    @app.callback()
    def main(verbose: bool = False, at: str = "") -> None: ...

    @group.command()
    def run(name: str, rows: int = 1) -> None: ...

    @group.command()
    def stop(name: str) -> None: ...

    app.add_typer(group, name="group")
    return typer.main.get_command(app)


# --- scripts -----------------------------------------------------------------------------------------------


def test_the_script_of_ci_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# --- invariants and their tests ----------------------------------------------------------------------------


def missing_tests(text: str) -> list[str]:
    """Tests that a document names as `path::function`, but that do not exist."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    return [
        f"{path}::{function}"
        for path, function in named
        if not re.search(
            rf"^\s*(?:async )?def {function}\(", text_of(ROOT / path) if (ROOT / path).exists() else "", re.MULTILINE
        )
    ]


def test_each_invariant_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text()
    rows = re.findall(r"^\| [A-Z]\d+ \|.*$", text, re.MULTILINE)
    assert rows
    assert [row for row in rows if "`tests/" not in row] == [], "an invariant that no test holds"
    assert violations([ROOT / "docs" / "invariants.md"], missing_tests) == []


def test_a_named_test_that_does_not_exist_is_found() -> None:
    here = "tests/unit/test_tidy.py"
    assert missing_tests(f"`{here}::missing_tests` `{here}::never_written` `tests/unit/never.py::missing_tests`") == [
        f"{here}::never_written",
        "tests/unit/never.py::missing_tests",
    ]


# --- places in the architecture ----------------------------------------------------------------------------

SHORT_FOR = {
    "B": "broker/kera/broker",
    "C": "coordinator/kera/coordinator",
    "K": "backup/kera/backup",
    "L": "client/kera/client",
    "S": "spark_connector/kera/spark_connector",
    "J": "spark_connector/jvm/src/main/java/kera",
    "P": "client/kera",
    "core": "core/kera/core",
    "server": "core/kera/server",
}


DEFINED = {".py": r"\b(?:def|class) {}\b", ".java": r"^ +(?!return|new|throw)(?:[\w<>\[\], ]+ ){}\([^;]*\{{$"}
MARKED = re.compile(r"`([\w/.]+)`")


def missing_places(text: str) -> list[str]:
    """Files and functions that a document names as `B/path.py` (`function`, …), but that do not exist."""
    found = []
    for short, path, names in re.findall(
        rf"`({'|'.join(SHORT_FOR)})/(?!kera/)([\w/]+\.(?:py|java))`(?: \(([^)|]*)\))?", text
    ):
        place = ROOT / SHORT_FOR[short] / path
        source = text_of(place) if place.exists() else None
        if source is None:
            found.append(f"{short}/{path}")
        else:
            found += [
                f"{short}/{path}: {name}"
                for name in re.findall(r"`(\w+)`", names)
                if not re.search(DEFINED[place.suffix].format(name), source, re.MULTILINE)
            ]
    return found


def test_the_places_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for short, path in SHORT_FOR.items():
        assert re.search(rf"`{short}` (?:is )?`{path}`", text), f"{short} is not said to be {path}"
    assert violations([ROOT / "docs" / "architecture.md"], missing_places) == []


def unnamed_packages(text: str) -> list[str]:
    """Packages that a document does not name as a folder or by one of their files."""
    paths = [
        re.sub(r"^(\w+)(?=/)", lambda short: SHORT_FOR.get(short[1], short[1]), path) for path in MARKED.findall(text)
    ]
    named = [*paths, *(SHORT_FOR[short] for short in MARKED.findall(text) if short in SHORT_FOR)]
    files_of_packages = [
        *chain.from_iterable(ROOT.glob(f"{root}/kera/**/__init__.py") for root in SOURCE_ROOTS),
        *ROOT.glob(f"{SHORT_FOR['J']}/**/package-info.java"),
    ]
    packages = [str(path.parent.relative_to(ROOT)) for path in files_of_packages]
    return sorted(each for each in packages if not any(f"{path}/".startswith(f"{each}/") for path in named))


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert unnamed_packages(text) == [], "give it a row below Where to look"
    assert unnamed_packages(text.replace("/tracing/", "/traces/")) == ["core/kera/core/tracing"]
    assert unnamed_packages(text.replace("J/columns/", "J/")) == ["spark_connector/jvm/src/main/java/kera/columns"]


def test_a_named_place_that_does_not_exist_is_found() -> None:
    text = (
        "`core/errors.py` (`invariant`: x; `never_written`) `C/never.py` (`a`) `J/columns/Columns.java` (`load`, `x`)"
    )
    assert missing_places(text) == ["core/errors.py: never_written", "C/never.py", "J/columns/Columns.java: x"]


# --- rooms and wiring --------------------------------------------------------------------------------------

METHODS_MAX = 25
CLOSET_LINES_MAX = 60
"""Modules with fewer lines and one importer are closets: they belong into the module that imports them."""
ROOMS_OF_THEIR_OWN = {
    "kera.backup.health": "each daemon has one",
    "kera.broker.latency.budgets": "decides, without a clock",
    "kera.broker.latency.series": "a metric of a feature that the broker's own metrics do not know",
    "kera.broker.replication.placement": "decides, without I/O",
    "kera.broker.steady_time": "the only module of the broker that reads the wall clock",
    "kera.cli.bench._payload": "benchmarks outside of the product use it",
    "kera.cli.tls": "a group of commands",
    "kera.client.producing.quotas": "plugged in: the way of chunks knows nothing of quotas",
    "kera.connect.kafka.committed": "its importer is in another package",
    "kera.console.pages.members": "a page",
    "kera.console.pages.signing": "a page",
    "kera.coordinator.cluster.placement": "decides, without I/O",
    "kera.coordinator.cluster.stream_brokers": "decides, without I/O",
    "kera.coordinator.health": "each daemon has one",
    "kera.coordinator.service": "the wire's side, without a decision",
    "kera.coordinator.store.data_dir": "other stores will need it without LMDB",
    "kera.core.base.silent_grpc": "has effects when it is imported",
    "kera.core.format.key_hashes": "its importer is in another package",
    "kera.core.rpc.grpc_forks": "has effects when it is imported",
    "kera.server.monitoring.certificates": "a source of health and metrics, as the modules beside it",
    "kera.server.monitoring.histogram": "its importer is in another package",
    "kera.spark_connector.planning.lag": "decides, without a connection",
}
"""Small modules that stay, and why."""


def crowded_classes(text: str) -> list[str]:
    """Classes with too many public methods: they have several ideas, and each deserves its own class."""
    return looked_at(text).crowded


def closets(texts: Mapping[str, str]) -> list[str]:
    """The small modules in `texts`, by name, that exactly one other module imports."""
    importers: dict[str, set[str]] = {name: set() for name in texts}
    for name, text in texts.items():
        for module, imported in looked_at(text).imports:
            for each in (module, *imported):
                importers.get(each, set()).add(name)
    return [
        name
        for name, others in importers.items()
        if len(others) == 1 and len(texts[name].splitlines()) < CLOSET_LINES_MAX
    ]


def callbacks_set_from_outside(text: str) -> list[str]:
    """Assignments to a callback (`on_…`) of another object: callbacks belong into the constructor."""
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(?!self\.on_)[\w.]+\.on_\w+(?:: .+)? = ", line)]


def test_a_class_with_too_many_public_methods_is_found() -> None:
    methods = "    def f(self): ...\n    def _g(self): ...\n"
    assert crowded_classes("class A:\n" + methods * 26) == ["class A of 26 public methods"]
    assert crowded_classes("class A:\n" + methods * 25) == []


def test_no_class_has_too_many_public_methods() -> None:
    assert violations(modules_of_packages(), crowded_classes) == []


def test_a_closet_is_found() -> None:
    large = "x = 1\n" * CLOSET_LINES_MAX
    texts = {"a": "from p import b\n", "p.b": "", "c": "from p.b import x\nfrom d import y\n", "d": large, "e": ""}
    assert closets(texts) == []
    assert closets({**texts, "c": "from e import x\n"}) == ["p.b", "e"]


def test_small_modules_with_one_importer_have_a_reason() -> None:
    texts = {}
    for path in modules_of_packages():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "kera" in parts:
            texts[".".join(parts[parts.index("kera") :])] = text_of(path)
    assert set(closets(texts)) == set(ROOMS_OF_THEIR_OWN)


def test_a_callback_that_is_set_from_outside_is_found() -> None:
    text = "self.on_work = a\nmemory.on_work = b\nself.memory.on_room: Done = c\nself._x.call(on_room=1)\n"
    assert callbacks_set_from_outside(text) == ["memory.on_work = b", "self.memory.on_room: Done = c"]


def test_callbacks_are_given_to_constructors() -> None:
    assert violations(modules_of_packages(), callbacks_set_from_outside) == []
