"""The packages of the columnar engine: the allowed imports between them, and a description of each.

Rules are functions from a file's text to its violations, so that a test can plant a violation.
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
"""Libraries in Spark's distribution that are not a part of Spark."""
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
    """The packages of KerA that the file names in imports or code without being allowed to."""
    return set(OF_KERA.findall(code_of(text))) - {package} - MAY_IMPORT[package]


def forbidden_libraries(text: str) -> list[str]:
    """The imports of a file of kera.wire that are neither of KerA nor of the allowed libraries."""
    return [name for name in IMPORT.findall(code_of(text)) if not name.startswith(("kera.", *LIBRARIES_OF_WIRE))]


def described_package(text: str) -> str:
    """The package that a package-info.java describes in the required number of lines, or ''."""
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


def test_each_allowed_import_between_packages_is_used() -> None:
    named: dict[str, set[str]] = {package: set() for package in MAY_IMPORT}
    for path, text in sources().items():
        named[package_of(path)] |= set(OF_KERA.findall(code_of(text)))
    assert {package: names - {package} for package, names in named.items()} == MAY_IMPORT


def test_the_wire_uses_no_class_of_spark() -> None:
    for path, text in sources().items():
        if package_of(path) == "kera.wire":
            assert forbidden_libraries(text) == [], path


def test_each_package_has_a_description_of_five_lines() -> None:
    for package in MAY_IMPORT:
        text = JAVA.joinpath(*package.split("."), "package-info.java").read_text(encoding="utf-8")
        assert described_package(text) == package


def test_the_jar_names_an_existing_data_source() -> None:
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
def test_the_check_finds_an_import_of_a_package_that_is_not_below(package: str, line: str, found: str) -> None:
    assert forbidden_packages(package, f"package {package};\n\n{line}\n") == {found}


def test_the_check_ignores_packages_in_comments_and_strings() -> None:
    text = (
        'package kera.wire;\n/** As {@link kera.spark.KeraSource}. */\nString name = "kera.spark"; // of kera.columns\n'
    )
    assert forbidden_packages("kera.wire", text) == set()


@pytest.mark.parametrize(
    "name", ["org.apache.spark.TaskContext", "org.apache.arrow.vector.FieldVector", "scala.Option"]
)
def test_the_check_finds_a_library_that_the_wire_may_not_use(name: str) -> None:
    assert forbidden_libraries(f"import java.util.List;\nimport kera.wire.Chunk;\nimport {name};\n") == [name]


@pytest.mark.parametrize("lines", [0, LINES_OF_PACKAGE_INFO - 1, LINES_OF_PACKAGE_INFO + 1])
def test_the_check_finds_a_description_that_is_too_short_or_too_long(lines: int) -> None:
    assert described_package("/**\n" + " * A line.\n" * lines + " */\npackage kera.wire;\n") == ""
