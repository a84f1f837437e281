"""The wheel, installed into clean environments: what works there, and what is said about what does not.

Nothing of this tree and no package of this environment is on the path there. The versions are those of constraints.txt.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

from kera.core.native import native
from kera.spark_connector.engine import jar_path
from tests.spark.support import Kera

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # an index may be slow, and pyspark is large

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("wheel_job.py")
CONSTRAINTS = ROOT / "constraints.txt"
PIP_TIMEOUT_S = 400
JOB_TIMEOUT_S = 150


class Clean(NamedTuple):
    """An environment into which only the wheel was installed, with what it asks for."""

    folder: Path

    def run(self, program: str, *arguments: str | Path, timeout_s: int = 60) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from this tree."""
        spark = {"PYSPARK_PYTHON": str(self.folder / "bin" / "python"), "SPARK_LOCAL_IP": "127.0.0.1"}
        others = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK", "KERA_"))
        }
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.folder,
            env=others | spark,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build: list[str | Path] = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, *build], env=os.environ | {"KERA_JAR": "require"}, timeout=PIP_TIMEOUT_S, check=True)
    (built,) = folder.glob("*.whl")
    return built


def hatchling(target: str, folder: Path, **environment: str) -> list[Path]:
    """Build a target into an empty folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, timeout=PIP_TIMEOUT_S, check=True)
    return list(folder.iterdir())


def installed(wheel: Path, folder: Path, extras: str = "") -> Clean:
    """An environment with the wheel and its `extras` (``[cli,spark]``)."""
    # Without pip in it, which is not needed there and takes seconds.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], timeout=PIP_TIMEOUT_S, check=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--python", folder / "bin" / "python"]
    pins: list[str | Path] = ["--constraint", CONSTRAINTS, "--build-constraint", CONSTRAINTS]
    subprocess.run([*pip, "install", "--no-compile", *pins, f"{wheel}{extras}"], timeout=PIP_TIMEOUT_S, check=True)
    return Clean(folder)


def test_the_wheel_has_the_namespace_and_where_spark_looks_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()

    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith((".dist-info", ".data"))} == {"kera", "pyspark_kera"}
    shared = {name.partition(".data/data/")[2] for name in names if ".data/" in name}
    assert shared == {f"share/doc/kera/{page}.md" for page in ("operations", "runbooks")}


def test_the_wheel_has_the_jar_of_this_tree(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        jars = [name for name in archive.namelist() if name.endswith(".jar")]

        assert jars == ["kera/spark_connector/jars/kera-spark-connector.jar"]
        assert archive.read(jars[0]) == jar_path().read_bytes()


@pytest.mark.skipif(native is None, reason="no native core here")
def test_the_wheel_has_the_native_core_and_says_for_which_machines_it_is(wheel: Path, tmp_path: Path) -> None:
    clean = installed(wheel, tmp_path / "clean")

    ran = clean.run("python", "-I", "-c", "from kera.core import native; print(native.describe(), native.native)")

    assert "-cp311-abi3-linux_" in wheel.name
    assert ran.stdout.startswith("native core <module "), ran.stderr
    assert str(clean.folder) in ran.stdout


def test_a_wheel_can_do_without_what_is_built(tmp_path: Path) -> None:
    (built,) = hatchling("wheel", tmp_path, KERA_JAR="skip", KERA_NATIVE_BUILD="skip")

    assert built.name.endswith("-py3-none-any.whl")
    with ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".jar", ".so"))]


def test_the_source_distribution_has_what_is_built_from_it_and_not_what_comes_of_it(tmp_path: Path) -> None:
    (built,) = hatchling("sdist", tmp_path)

    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    jvm = ROOT / "spark_connector" / "jvm"
    paths = [*(jvm / "src").rglob("*"), *(ROOT / "core" / "native").glob("*.[ch]")]
    sources = {path.relative_to(ROOT).as_posix() for path in paths if path.is_file()}
    assert sources | {"hatch_build.py", "spark_connector/jvm/build.py", "core/native/build.py"} <= names
    assert not [name for name in names if name.endswith((".jar", ".so"))]


def test_without_extras_there_is_the_client_and_the_command_says_what_it_lacks(wheel: Path, tmp_path: Path) -> None:
    clean = installed(wheel, tmp_path / "clean")

    client = clean.run("python", "-I", "-c", "import kera.client; print(kera.client.__file__)")
    command = clean.run("kera", "--help")

    assert client.returncode == 0, client.stderr
    assert Path(client.stdout.strip()).is_relative_to(clean.folder)
    assert command.returncode == 1
    assert "pip install 'kera[cli]'" in command.stderr


def test_with_its_extras_the_command_works_and_spark_reads_a_stream_with_both_engines(
    wheel: Path, kera: Kera, stream: str, tmp_path: Path
) -> None:
    clean = installed(wheel, tmp_path / "clean", "[cli,spark]")
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(300))

    listed = clean.run("kera", "stream", "describe", stream, "--bootstrap", kera.bootstrap)
    broker = clean.run("kera", "broker", "--data-dir", tmp_path / "broker")
    job = clean.run("python", "-I", JOB, kera.bootstrap, stream, tmp_path, timeout_s=JOB_TIMEOUT_S)
    jar = clean.run("python", "-I", "-m", "kera.spark_connector", "jar")

    assert stream in listed.stdout, listed.stderr
    assert broker.returncode == 1
    assert "pip install 'kera[server]'" in broker.stderr
    assert job.returncode == 0, job.stderr[-4000:]
    found = json.loads(job.stdout)
    values = sorted(record.value.decode() for record in produced)
    assert found["read"] == {
        "columnar": {"values": values, "columns": True},
        "python": {"values": values, "columns": False},
    }
    assert found["values"] == values
    assert all(Path(place).is_relative_to(clean.folder) for place in [found["driver"], *found["workers"]])
    assert len(found["workers"]) == 1
    assert Path(jar.stdout.strip()).is_relative_to(clean.folder), jar.stderr
