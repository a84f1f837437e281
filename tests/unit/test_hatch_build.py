"""The hook of the wheels (hatch_build.py): their contents with and without the jar and the native core."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import pytest

from kera.cli.generate import KINDS
from kera.core.base.build import commit_of

ROOT = Path(__file__).resolve().parents[2]
JAR = Path("jars", "some.jar")
EXTENSION = Path("core", "_native.abi3.so")
NATIVE = {str(EXTENSION): f"kera/core/{EXTENSION.name}"}


class NotPossible(Exception):
    pass


class Program:
    """Stands in for a program that builds the jar, or the native core."""

    NotPossible = NotPossible
    JAR = JAR
    EXTENSION = EXTENSION

    def __init__(self, missing: str) -> None:
        self._missing = missing

    def build(self) -> None:
        if self._missing:
            raise NotPossible(self._missing)

    def platform_tag(self) -> str:
        return "cp311-abi3-linux_x86_64"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("KERA_JAR", "KERA_NATIVE_BUILD", "KERA_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    return module


def build(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    version: str = "standard",
    *,
    target: str = "wheel",
    jar: str | None = None,
    native: str | None = None,
    java: bool = True,
    compiler: bool = True,
) -> dict[str, Any]:
    """The build data of a wheel with these policies on a machine with these tools."""
    missing = {module.JAR_PROGRAM: "" if java else "no JDK", module.NATIVE_PROGRAM: "" if compiler else "no compiler"}
    monkeypatch.setattr(module, "build_program", lambda _, path: Program(missing[path]))
    monkeypatch.setattr(module.Hook, "root", str(ROOT))
    monkeypatch.setattr(module.Hook, "target_name", target)
    monkeypatch.setattr(module.Hook, "config", {"adds": ["commit", "jar", "native"]})
    monkeypatch.setattr(module, "commit_of", lambda _: "")
    for name, policy in (("KERA_JAR", jar), ("KERA_NATIVE_BUILD", native)):
        if policy is not None:
            monkeypatch.setenv(name, policy)
    data: dict[str, Any] = {"force_include": {}}
    module.Hook.__new__(module.Hook).initialize(version, data)
    return data


@pytest.mark.parametrize("policy", [None, "", "require"])
def test_a_wheel_without_the_jar_is_refused_by_default(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, policy: str | None
) -> None:
    with pytest.raises(NotPossible, match="no JDK") as caught:
        build(module, monkeypatch, jar=policy, java=False)
    assert "KERA_JAR=skip" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("policy", ["auto", "skip"])
def test_a_wheel_without_the_jar_is_built_on_request(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    assert build(module, monkeypatch, jar=policy, native="skip", java=False) == {"force_include": {}}


@pytest.mark.parametrize("policy", [None, "auto", "require"])
def test_a_wheel_with_the_native_core_is_tagged_for_one_platform(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, policy: str | None
) -> None:
    assert build(module, monkeypatch, jar="skip", native=policy) == {
        "force_include": NATIVE,
        "pure_python": False,
        "tag": "cp311-abi3-linux_x86_64",
    }


@pytest.mark.parametrize("policy", [None, "", "auto", "skip"])
def test_a_wheel_built_without_a_compiler_is_for_any_machine(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy: str | None
) -> None:
    found = build(module, monkeypatch, jar="require", native=policy, compiler=False)

    assert found == {"force_include": {str(JAR): f"kera/spark_connector/jars/{JAR.name}"}}
    told = "" if policy == "skip" else "kera: built without the native core (see KERA_NATIVE_BUILD): no compiler\n"
    assert capsys.readouterr().err == told


def test_a_wheel_that_requires_the_native_core_is_refused_without_a_compiler(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotPossible, match="no compiler"):
        build(module, monkeypatch, jar="skip", native="require", compiler=False)


@pytest.mark.parametrize("variables", [{"jar": "never"}, {"jar": "skip", "native": "never"}])
def test_an_unknown_policy_is_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match="=never: one of require, auto, skip"):
        build(module, monkeypatch, **variables)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [None, "require"])
def test_an_editable_install_needs_neither_jar_nor_native_core(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, policy: str | None
) -> None:
    found = build(module, monkeypatch, "editable", jar=policy, native=policy, java=False, compiler=False)

    assert found == {"force_include": {}}
    if policy is None:
        hook = module.Hook.__new__(module.Hook)
        assert hook.dependencies() == [], "and no pyspark, which is half a gigabyte"


# -- the commit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_a_package_has_a_file_with_its_commit(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    monkeypatch.setenv("KERA_COMMIT", "0123abc")
    data: dict[str, Any] = {"force_include": {}}
    name = {"wheel": module.COMMIT_OF_WHEEL, "sdist": module.COMMIT_OF_SDIST}[target]
    module.add_commit(tmp_path, data, name)

    ((written, place),) = data["force_include"].items()
    assert (Path(written).read_text(), place) == ("0123abc\n", name)


def test_a_package_of_an_unknown_commit_has_no_file_of_the_commit(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(module, monkeypatch, target="sdist") == {"force_include": {}}


def test_the_commit_comes_from_the_sdist_or_the_work_tree(module: ModuleType, tmp_path: Path) -> None:
    assert module.commit_of(tmp_path) == ""
    (tmp_path / "COMMIT").write_text("0123abc\n")
    assert module.commit_of(tmp_path) == "0123abc"
    if (ROOT / ".git").exists():
        assert module.commit_of(ROOT) == commit_of(ROOT)


# -- packages and files of deploy/ ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_distribution_has_its_packages_and_exact_copies_of_the_files_of_deploy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "distributions" / "cli", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("kera_cli-*-py3-none-any.whl")

    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")

    kera = tmp_path / "installed" / "kera"
    assert {path.name for path in kera.iterdir()} == {"cli", "connect", "console"}
    assert (kera / "console/static/console.js").read_bytes() == (
        ROOT / "client/kera/console/static/console.js"
    ).read_bytes()
    assert not list(kera.rglob("*.pyc"))
    folder = kera / "cli" / "deploy"
    packaged = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    printed = {str(Path(kind.folder, name)) for kind in KINDS for name in kind.files}
    assert set(packaged) == printed
    assert packaged == {name: (ROOT / "deploy" / name).read_bytes() for name in printed}


def test_a_package_in_a_wheel_has_no_files_that_git_ignores(module: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "spark" / "kera" / "spark"
    ignored = ("jars/some.jar", "__pycache__/module.pyc", "module.pyc", ".coverage.host.1", ".mypy_cache/module.json")
    for name in ("module.py", "py.typed", *ignored):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    data: dict[str, Any] = {"force_include": {}}

    module.add_package(tmp_path, data, "spark/kera/spark")

    assert sorted(data["force_include"].values()) == ["kera/spark/module.py", "kera/spark/py.typed"]


def test_only_kera_has_an_sdist(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Hook, "root", str(ROOT / "distributions" / "server"))
    monkeypatch.setattr(module.Hook, "target_name", "sdist")

    with pytest.raises(ValueError, match="build this one with --wheel"):
        module.Hook.__new__(module.Hook).initialize("standard", {})
