"""The packages of the columnar engine: which of them may import which, and that each says what it is for.

Rules are functions from a file's text to its violations, so that a test can plant one and see it found.
"""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

JVM = Path(__file__).parents[3] / "spark_connector" / "jvm" / "src" / "main"
JAVA = JVM / "java"

MAY_IMPORT = {
    "kera.wire": set[str](),
    "kera.columns": {"kera.wire"},
    "kera.spark.service": {"kera.wire"},
    "kera.spark.read": {"kera.wire", "kera.columns", "kera.spark.service"},
    "kera.spark.write": {"kera.wire", "kera.spark.service"},
    "kera.spark": {"kera.wire", "kera.spark.service", "kera.spark.read", "kera.spark.write"},
}
LIBRARIES_OF_WIRE = (
    "java.",
    "javax.",
    "jdk.net.",
    "com.fasterxml.jackson.",
    "com.github.luben.zstd.",
    "net.jpountz.lz4.",
    "org.slf4j.",
    "org.apache.arrow.memory.util.MemoryUtil",
)
"""Spark's distribution has all of them; none is of Spark."""
LINES_OF_PACKAGE_INFO = 5

COMMENT_OR_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"', re.DOTALL)
IMPORT = re.compile(r"^import (?:static )?([\w.]+(?:\.\*)?);", re.MULTILINE)
OF_KERA = re.compile(r"\bkera(?:\.[a-z]\w*)+")
PACKAGE_INFO = re.compile(r"/\*\*\n((?: \* .+\n)+) \*/\npackage ([\w.]+);\n")


def code_of(text: str) -> str:
    return COMMENT_OR_TEXT.sub(" ", text)


def package_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(JAVA).parts)


def forbidden_packages(package: str, text: str) -> set[str]:
    """The packages of ours that the file names, be it in imports or in its code, and may not."""
    return set(OF_KERA.findall(code_of(text))) - {package} - MAY_IMPORT[package]


def forbidden_libraries(text: str) -> list[str]:
    """The imports of a file of kera.wire that are neither of KerA nor of the libraries that are allowed there."""
    return [name for name in IMPORT.findall(code_of(text)) if not name.startswith(("kera.", *LIBRARIES_OF_WIRE))]


def described_package(text: str) -> str:
    """The package that a package-info.java describes in as many lines as it should; else nothing."""
    found = PACKAGE_INFO.fullmatch(text)
    return found[2] if found and found[1].count("\n") == LINES_OF_PACKAGE_INFO else ""


def sources() -> dict[Path, str]:
    found = {path: path.read_text(encoding="utf-8") for path in JAVA.rglob("*.java")}
    assert found, "no file to check"
    return found


def test_packages_import_only_the_packages_below_them() -> None:
    tuple(TopologicalSorter(MAY_IMPORT).static_order())  # raises CycleError
    assert {package_of(path) for path in sources()} == MAY_IMPORT.keys()
    for path, text in sources().items():
        assert forbidden_packages(package_of(path), text) == set(), path


def test_each_arrow_between_packages_is_used() -> None:
    named: dict[str, set[str]] = {package: set() for package in MAY_IMPORT}
    for path, text in sources().items():
        named[package_of(path)] |= set(OF_KERA.findall(code_of(text)))
    assert {package: names - {package} for package, names in named.items()} == MAY_IMPORT


def test_the_wire_uses_no_class_of_spark() -> None:
    for path, text in sources().items():
        if package_of(path) == "kera.wire":
            assert forbidden_libraries(text) == [], path


def test_each_package_describes_itself_in_five_lines() -> None:
    for package in MAY_IMPORT:
        text = JAVA.joinpath(*package.split("."), "package-info.java").read_text(encoding="utf-8")
        assert described_package(text) == package


def test_the_jar_names_a_data_source_that_is_there() -> None:
    service = JVM / "resources" / "META-INF" / "services" / "org.apache.spark.sql.sources.DataSourceRegister"
    assert JAVA.joinpath(*service.read_text().strip().split(".")).with_suffix(".java").is_file()


@pytest.mark.parametrize(
    ("package", "line", "found"),
    [
        ("kera.wire", "import kera.columns.Columns;", "kera.columns"),
        ("kera.wire", "import static kera.spark.read.KeraQuery.partitions;", "kera.spark.read"),
        ("kera.wire", "import kera.columns.*;", "kera.columns"),
        ("kera.columns", "    kera.spark.KeraSource source = null;", "kera.spark"),
        ("kera.spark.read", "import kera.spark.write.KeraWrite;", "kera.spark.write"),
        ("kera.spark.service", "import kera.spark.KeraSource;", "kera.spark"),
    ],
)
def test_an_import_of_a_package_that_is_not_below_is_found(package: str, line: str, found: str) -> None:
    assert forbidden_packages(package, f"package {package};\n\n{line}\n") == {found}


def test_a_package_may_be_named_in_comments_and_texts() -> None:
    text = (
        'package kera.wire;\n/** As {@link kera.spark.KeraSource}. */\nString name = "kera.spark"; // of kera.columns\n'
    )
    assert forbidden_packages("kera.wire", text) == set()


@pytest.mark.parametrize(
    "name", ["org.apache.spark.TaskContext", "org.apache.arrow.vector.FieldVector", "scala.Option"]
)
def test_a_library_that_the_wire_may_not_use_is_found(name: str) -> None:
    assert forbidden_libraries(f"import java.util.List;\nimport kera.wire.Chunk;\nimport {name};\n") == [name]


@pytest.mark.parametrize("lines", [0, LINES_OF_PACKAGE_INFO - 1, LINES_OF_PACKAGE_INFO + 1])
def test_a_package_that_says_too_little_or_too_much_is_found(lines: int) -> None:
    assert described_package("/**\n" + " * A line.\n" * lines + " */\npackage kera.wire;\n") == ""
