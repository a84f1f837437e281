"""The wheels in clean environments: their features, and the errors about missing ones.

This tree and the packages of this environment are not on the path there. constraints.txt has the versions.
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
CLIENT = """
import asyncio, sys
import kera.client
from kera.client import Client

async def work(bootstrap, stream):
    async with await Client.connect(bootstrap) as client:
        async with client.producer() as producer:
            await producer.prepare(stream)
            for number in range(5):
                await producer.send(stream, f"value-{number}".encode())
        async with client.consumer(stream, start="earliest", end="latest") as consumer:
            found = [record.value.decode() async for record in consumer]
    print(kera.client.__file__, *found)

asyncio.run(work(*sys.argv[1:]))
"""
"""Sends records to a stream and reads them."""
CLUSTER = """
import subprocess, sys
from kera.local.cluster import LocalCluster

small = dict(arena_bytes=64 << 20, backup_memory_bytes=64 << 20, segment_bytes=1 << 20)
with LocalCluster.running(backups=1, **small) as cluster:
    create = [sys.executable, "-I", "-m", "kera.cli", "stream", "create", "orders", "--bootstrap", cluster.bootstrap]
    subprocess.run(create, check=True, stdout=sys.stderr)
    subprocess.run([sys.executable, "-I", "-c", sys.argv[1], cluster.bootstrap, "orders"], check=True)
"""
"""Runs the program with another cluster."""
PIP_TIMEOUT_S = 400
JOB_TIMEOUT_S = 150


class Clean(NamedTuple):
    """An environment with only the wheel of `kera` and its dependencies."""

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
    """The wheel of `kera`; the wheels of the other distributions lie beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    build: list[str | Path] = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    build += [ROOT, *(path.parent for path in ROOT.glob("distributions/*/pyproject.toml"))]
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, *build], env=os.environ | {"KERA_JAR": "require"}, timeout=PIP_TIMEOUT_S, check=True)
    (built,) = folder.glob("kera-*.whl")
    return built


def hatchling(target: str, folder: Path, project: Path = ROOT, **environment: str) -> list[Path]:
    """Build a target into an empty folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=project, env=os.environ | environment, timeout=PIP_TIMEOUT_S, check=True)
    return list(folder.iterdir())


def installed(wheel: Path, folder: Path, extras: str = "") -> Clean:
    """An environment with the wheel and its `extras` (``[cli,spark]``)."""
    # Without pip, which takes seconds and is not needed there.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], timeout=PIP_TIMEOUT_S, check=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--python", folder / "bin" / "python"]
    pins: list[str | Path] = ["--constraint", CONSTRAINTS, "--build-constraint", CONSTRAINTS]
    given: list[str | Path] = ["--find-links", wheel.parent, f"{wheel}{extras}"]
    subprocess.run([*pip, "install", "--no-compile", *pins, *given], timeout=PIP_TIMEOUT_S, check=True)
    subprocess.run([*pip, "check"], timeout=PIP_TIMEOUT_S, check=True)
    return Clean(folder)


@pytest.mark.parametrize(
    ("name", "packages", "shared"),
    [
        ("kera", {"client", "core", "pytest_plugin", "v1"}, {"kera/constraints.txt"}),
        ("kera_cli", {"cli", "connect", "console"}, set()),
        (
            "kera_server",
            {"backup", "broker", "coordinator", "local", "server"},
            {f"doc/kera/{page}.md" for page in ("connect", "operations", "runbooks")},
        ),
        ("kera_spark", {"spark_connector"}, set()),
    ],
)
def test_a_wheel_has_the_packages_of_its_distribution_and_nothing_else(
    wheel: Path, name: str, packages: set[str], shared: set[str]
) -> None:
    (of_it,) = wheel.parent.glob(f"{name}-*.whl")
    with ZipFile(of_it) as archive:
        names = archive.namelist()

    roots = {each.split("/")[0] for each in names}
    namespaces = {"kera", "pyspark_kera"} if name == "kera_spark" else {"kera"}
    assert {root for root in roots if not root.endswith((".dist-info", ".data"))} == namespaces
    assert {each.split("/")[1] for each in names if each.startswith("kera/")} == packages
    assert {each.partition(".data/data/share/")[2] for each in names if ".data/" in each} == shared
    assert any(each.endswith(".dist-info/licenses/LICENSE") for each in names)


def test_only_the_spark_wheel_has_the_jar_of_this_tree(wheel: Path) -> None:
    (of_spark,) = wheel.parent.glob("kera_spark-*-py3-none-any.whl")
    with ZipFile(of_spark) as archive:
        jars = [name for name in archive.namelist() if name.endswith(".jar")]

        assert jars == ["kera/spark_connector/jars/kera-spark-connector.jar"]
        assert archive.read(jars[0]) == jar_path().read_bytes()
    with ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".jar")]


@pytest.mark.skipif(native is None, reason="no native core here")
def test_the_wheel_has_the_native_core_and_a_platform_tag(wheel: Path, tmp_path: Path) -> None:
    clean = installed(wheel, tmp_path / "clean")

    ran = clean.run("python", "-I", "-c", "from kera.core import native; print(native.describe(), native.native)")

    assert "-cp311-abi3-linux_" in wheel.name
    assert ran.stdout.startswith("native core <module "), ran.stderr
    assert str(clean.folder) in ran.stdout


@pytest.mark.parametrize("project", [ROOT, ROOT / "distributions" / "spark"], ids=["client", "spark"])
def test_wheels_can_be_built_without_the_native_core_and_the_jar(project: Path, tmp_path: Path) -> None:
    (built,) = hatchling("wheel", tmp_path, project, KERA_JAR="skip", KERA_NATIVE_BUILD="skip")

    assert built.name.endswith("-py3-none-any.whl")
    with ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".jar", ".so"))]


def test_the_source_distribution_has_all_sources_and_no_build_results(tmp_path: Path) -> None:
    (built,) = hatchling("sdist", tmp_path)

    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    jvm = ROOT / "spark_connector" / "jvm"
    paths = [*(jvm / "src").rglob("*"), *(ROOT / "core" / "native").glob("*.[ch]")]
    sources = {path.relative_to(ROOT).as_posix() for path in paths if path.is_file()}
    sources |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("distributions/*/*")}
    assert sources | {"hatch_build.py", "spark_connector/jvm/build.py", "core/native/build.py"} <= names
    assert not [name for name in names if name.endswith((".jar", ".so"))]


def test_the_wheel_without_extras_is_a_working_client_and_nothing_else(
    wheel: Path, kera: Kera, stream: str, tmp_path: Path
) -> None:
    clean = installed(wheel, tmp_path / "clean")
    kera.create(stream, streamlets=1)

    client = clean.run("python", "-I", "-c", CLIENT, kera.bootstrap, stream)

    assert client.returncode == 0, client.stderr
    place, *values = client.stdout.split()
    assert Path(place).is_relative_to(clean.folder)
    assert values == [f"value-{number}" for number in range(5)]
    assert {each.name for each in Path(place).parents[1].iterdir()} == {"client", "core", "pytest_plugin", "v1"}
    assert not (clean.folder / "bin" / "kera").exists()


def test_the_wheel_with_the_server_extra_starts_a_cluster(wheel: Path, tmp_path: Path) -> None:
    clean = installed(wheel, tmp_path / "clean", "[server]")

    cluster = clean.run("python", "-I", "-c", CLUSTER, CLIENT)

    assert cluster.returncode == 0, cluster.stderr
    assert cluster.stdout.split()[1:] == [f"value-{number}" for number in range(5)]
    assert (clean.folder / "share/doc/kera/runbooks.md").is_file()


def test_the_wheel_with_cli_and_spark_extras_has_the_command_and_both_engines(
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
