"""The program that builds the native core (core/native/build.py), in temporary trees."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from kera.core.native import native

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path("core", "native")
EXTENSION = Path("core", "kera", "core", "_native.abi3.so")
EXAMPLE = '// What it has to say.\nconst char *made_of = "kera-native-sources:" SOURCES;\n'

needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").is_file()), reason="no C compiler"
)


class Tree:
    """A tree with the program, and sources that compile quickly."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / SOURCES).mkdir(parents=True)
        (root / EXTENSION.parent).mkdir(parents=True)
        shutil.copy(ROOT / SOURCES / "build.py", root / SOURCES)
        self.write(EXAMPLE)

    def write(self, text: str) -> None:
        (self.root / SOURCES / "example.c").write_text(text)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, self.root / SOURCES / "build.py", *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def built(self) -> list[str]:
        """The names of the files in the folder of the extension."""
        return sorted(path.name for path in (self.root / EXTENSION.parent).iterdir())


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "a tree")


def program_of(tree: Tree) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kera_native", tree.root / SOURCES / "build.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@needs_compiler
def test_the_extension_is_built_once_until_its_sources_change(tree: Tree) -> None:
    assert tree.run("--check").returncode == 1
    assert tree.run().stdout == f"native: built {tree.root / EXTENSION}\n"
    before = (tree.root / EXTENSION).stat()

    again = tree.run()

    after = (tree.root / EXTENSION).stat()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert tree.run("--check").returncode == 0
    assert tree.run("--check", "--sanitize").returncode == 1

    tree.write(EXAMPLE + "int more;\n")

    assert tree.run("--check").stderr == f"native: {tree.root / EXTENSION} is not current\n"
    assert tree.run().returncode == tree.run("--check").returncode == 0
    assert tree.built() == [EXTENSION.name]


@pytest.mark.slow
@needs_compiler
def test_a_compile_error_is_shown_and_keeps_the_extension(tree: Tree) -> None:
    assert tree.run().returncode == 0
    before = (tree.root / EXTENSION).read_bytes()
    tree.write("int broken(\n")

    failed = tree.run("--auto")

    assert failed.returncode == 1
    assert failed.stderr.startswith("native: ")
    assert "example.c:1" in failed.stderr
    assert (tree.root / EXTENSION).read_bytes() == before
    assert tree.built() == [EXTENSION.name]


def test_a_build_without_a_compiler_names_the_packages_to_install(tree: Tree, tmp_path: Path) -> None:
    nothing = {"CC": "", "PATH": str(tmp_path)}
    for arguments, status in (((), 1), (("--auto",), 0)):
        ended = tree.run(*arguments, **nothing)
        assert ended.returncode == status
        assert ended.stderr == (
            "native: KerA runs without its native core, which is slower: no C compiler: install gcc and the headers of"
            " Python (Debian: apt install gcc python3-dev)\n"
        )
    assert tree.built() == []


def test_a_build_without_headers_names_the_packages_to_install(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(tree)
    monkeypatch.setattr(program.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(program.NotPossible, match=r"no Python\.h in .*: install gcc and the headers"):
        program.headers()


def test_the_platform_tag_is_for_the_stable_abi_on_linux(tree: Tree) -> None:
    kind, abi, platform = program_of(tree).platform_tag().split("-")
    assert (kind, abi) == ("cp311", "abi3")
    assert platform.startswith("linux_")


@pytest.mark.skipif(native is None, reason="it was not built")
def test_the_extension_of_this_tree_is_current() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / SOURCES / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
