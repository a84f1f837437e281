"""The program that builds the jar (spark_connector/jvm/build.py), in temporary trees."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path("spark_connector", "jvm", "build.py")
JAR = Path("spark_connector", "kera", "spark_connector", "jars", "kera-spark-connector.jar")
SOURCES = Path("spark_connector", "jvm", "src", "main", "java", "kera", "spark")
SERVICE = Path("META-INF", "services", "org.apache.spark.sql.sources.DataSourceRegister")

EXAMPLE = """
package kera.spark;

import org.apache.spark.sql.sources.DataSourceRegister;

/** Compiles only against Spark. */
public final class Example implements DataSourceRegister {
    @Override
    public String shortName() {
        return "example";
    }
}
"""


class Tree:
    """A tree with the program, a source and a resource."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / SOURCES).mkdir(parents=True)
        (root / JAR.parents[1]).mkdir(parents=True)
        shutil.copy(ROOT / PROGRAM, root / PROGRAM)
        (root / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
        (root / SOURCES / "Example.java").write_text(EXAMPLE)
        resource = root / "spark_connector" / "jvm" / "src" / "main" / "resources" / SERVICE
        resource.parent.mkdir(parents=True)
        resource.write_text("kera.spark.Example\n")

    def run(
        self, *arguments: str, isolated: bool = False, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the program; `isolated`: with a Python that has no pyspark."""
        python = [sys.executable, "-I", "-S"] if isolated else [sys.executable]
        return subprocess.run(
            [*python, self.root / PROGRAM, *arguments],
            env=os.environ | (environment or {}),
            capture_output=True,
            text=True,
            check=False,
        )

    def build(self) -> bytes:
        """Build the jar successfully, and return its bytes."""
        built = self.run()
        assert built.returncode == 0, built.stderr
        return (self.root / JAR).read_bytes()

    def jars(self) -> list[str]:
        """The names of the files in the folder of the jar."""
        return sorted(path.name for path in (self.root / JAR.parent).glob("*"))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "a tree")


def without_java(folder: Path) -> dict[str, str]:
    """An environment without Java."""
    return {"JAVA_HOME": "", "PATH": str(folder)}


@pytest.mark.slow
def test_the_jar_has_the_classes_the_resources_and_the_version(tree: Tree) -> None:
    tree.build()

    with ZipFile(tree.root / JAR) as archive:
        assert archive.namelist() == ["META-INF/MANIFEST.MF", str(SERVICE), "kera/spark/Example.class"]
        assert archive.read(str(SERVICE)) == b"kera.spark.Example\n"
        assert b"Implementation-Version: 1.2.3\n" in archive.read("META-INF/MANIFEST.MF")
        version_of_classes = int.from_bytes(archive.read("kera/spark/Example.class")[6:8])
    assert version_of_classes == 44 + 17


@pytest.mark.slow
def test_the_jar_is_reproducible_in_another_folder(tree: Tree, tmp_path: Path) -> None:
    assert tree.build() == Tree(tmp_path / "another").build()


@pytest.mark.slow
def test_a_current_jar_is_left_alone_and_needs_no_compiler(tree: Tree, tmp_path: Path) -> None:
    tree.build()
    before = (tree.root / JAR).stat()

    again = tree.run(environment=without_java(tmp_path))

    assert again.returncode == 0, again.stderr
    assert again.stdout == again.stderr == ""
    assert (tree.root / JAR).stat() == before
    assert tree.run("--check").returncode == 0
    assert tree.run("--check", isolated=True).returncode == 0, "there is no Spark that it does not fit"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "content"),
    [
        (SOURCES / "Example.java", EXAMPLE.replace('"example"', '"other"')),
        pytest.param(
            SOURCES / "Another.java",
            "package kera.spark;\n\n/** One more. */\nfinal class Another {}\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(Path("pyproject.toml"), '[project]\nversion = "1.2.4"\n', marks=pytest.mark.slow),
    ],
)
def test_a_jar_of_changed_sources_is_rebuilt(tree: Tree, changed: Path, content: str) -> None:
    before = tree.build()
    (tree.root / changed).write_text(content)

    checked = tree.run("--check")

    assert checked.returncode == 1
    assert "not current: the sources changed" in checked.stderr
    assert tree.build() != before
    assert tree.run("--check").returncode == 0


@pytest.mark.slow
def test_a_damaged_jar_is_rebuilt(tree: Tree) -> None:
    before = tree.build()
    (tree.root / JAR).write_bytes(before[:100])

    assert tree.run("--check").returncode == 1
    assert tree.build() == before


@pytest.mark.slow
def test_a_compile_error_keeps_the_jar_and_shows_the_message_of_javac(tree: Tree) -> None:
    before = tree.build()
    (tree.root / SOURCES / "Broken.java").write_text("package kera.spark;\n\nclass Broken {\n    int x = ;\n}\n")

    built = tree.run()

    assert built.returncode == 1
    assert "Broken.java:4: error: illegal start of expression" in built.stderr
    assert "Traceback" not in built.stderr
    assert (tree.root / JAR).read_bytes() == before
    assert tree.jars() == [JAR.name]


def test_a_build_without_a_compiler_names_the_package_to_install(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("kera_jar", tree.root / PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.setattr(program, "JVM_FOLDER", tmp_path / "nothing")
    for name, value in without_java(tmp_path).items():
        monkeypatch.setenv(name, value)

    with pytest.raises(
        program.NotPossible, match="no javac 17 or newer: install openjdk-17-jdk-headless or set JAVA_HOME"
    ):
        program.build()

    assert tree.jars() == []


def test_a_build_without_spark_fails_with_one_line(tree: Tree) -> None:
    built = tree.run(isolated=True)

    assert built.returncode == 1
    assert built.stderr.startswith("jar: no pyspark in ")
    assert built.stderr.count("\n") == 1
    assert tree.jars() == []


@pytest.mark.slow
def test_a_java_home_without_a_compiler_is_skipped(tree: Tree, tmp_path: Path) -> None:
    built = tree.run(environment={"JAVA_HOME": str(tmp_path)})

    assert built.returncode == 0, built.stderr
    assert tree.jars() == [JAR.name]
