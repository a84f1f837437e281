"""``make dist``: the published files are complete and checked, and work after their installation."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from kera.core.base.build import commit_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # an index may be slow, and pyspark is large

ROOT = Path(__file__).parents[2]
DIST_TIMEOUT_S = 800
START_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist") / "out"
    command = [sys.executable, "-m", "scripts.dist", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DIST_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "PASSED" in done.stdout
    return out


def test_dist_makes_portable_wheels_an_sdist_and_a_bill_of_materials(dist: Path) -> None:
    (wheel,) = dist.glob("kera-*.whl")

    assert "-cp311-abi3-manylinux" in wheel.name
    others = {f"kera_{name}-0.1.0-py3-none-any.whl" for name in ("cli", "server", "spark")}
    assert {path.name for path in dist.iterdir()} == {wheel.name, "kera-0.1.0.cdx.json", "kera-0.1.0.tar.gz", *others}


def test_the_wheel_and_the_sdist_contain_their_commit(dist: Path) -> None:
    commit = commit_of(ROOT)
    (wheel,), (sdist,) = dist.glob("kera-*.whl"), dist.glob("*.tar.gz")

    with ZipFile(wheel) as archive:
        assert archive.read("kera/core/COMMIT").decode().strip() == commit
    with tarfile.open(sdist) as sources:
        told = sources.extractfile("kera-0.1.0/COMMIT")
        assert told is not None
        assert told.read().decode().strip() == commit


def test_the_bill_of_materials_lists_dependencies_of_users_and_none_of_developers(dist: Path) -> None:
    bill = json.loads((dist / "kera-0.1.0.cdx.json").read_text())
    versions = {each["name"]: each["version"] for each in bill["components"]}

    assert bill["bomFormat"] == "CycloneDX"
    assert {"pyarrow", "grpcio", "lmdb", "kazoo", "typer", "pyspark"} <= versions.keys()
    assert not {"pytest", "mypy", "ruff", "twine"} & versions.keys()
    assert all(versions.values())


def test_the_wheels_work_at_a_path_with_a_space(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("kera-*.whl")
    folder = tmp_path / "some users" / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], timeout=START_TIMEOUT_S, check=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--python", folder / "bin" / "python", "install"]
    pip += ["-c", ROOT / "constraints.txt", "--find-links", dist, f"{wheel}[server,cli]"]
    subprocess.run(pip, timeout=DIST_TIMEOUT_S, check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KERA_"))}

    def kera(*arguments: str) -> str:
        # The first line of the program names the interpreter, and the kernel cuts that name at a space.
        command = [str(folder / "bin" / "kera"), *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert kera("--version").startswith(f"kera 0.1.0 (commit {commit_of(ROOT)[:12]}, native core")
    assert "Run a whole cluster" in kera("dev", "--help")
