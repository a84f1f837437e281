"""Other versions of Spark, as docs/spark.md describes them. `make test-spark-versions` runs these tests.

Each version is installed into another environment, a download of some 400 MB; so the default suite leaves them out.
``KERA_SPARK_VERSIONS`` names the versions, as in "4.0 4.1"; ``KERA_SPARK_VERSIONS_DIR`` is the folder of the
environments.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("version_job.py")
VERSIONS = os.environ.get("KERA_SPARK_VERSIONS", "").split()
FOLDER = Path(os.environ.get("KERA_SPARK_VERSIONS_DIR", ROOT / ".venv" / "spark-versions"))
INSTALL_TIMEOUT_S = 1200
JOB_TIMEOUT_S = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_TIMEOUT_S + JOB_TIMEOUT_S)]


def environment(version: str, folder: Path) -> Path:
    """The Python of an environment with this version of Spark and this tree."""
    home = FOLDER / version
    python, done = home / "bin" / "python", home / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", home], timeout=120, check=True)
        pins = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        pins.write_text("\n".join(line for line in lines if not line.startswith("pyspark==")))
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install"]
        wanted: list[str | Path] = ["--constraint", pins, f"pyspark=={version}.*", *_dependencies()]
        subprocess.run([*pip, *wanted], timeout=INSTALL_TIMEOUT_S, check=True)
        done.touch()
    (packages,) = home.glob("lib/python*/site-packages")
    parts = ("proto", "core", "client", "spark_connector")
    (packages / "kera.pth").write_text("\n".join(str(ROOT / part) for part in parts))
    return python


def _dependencies() -> list[str]:
    """The client's dependencies from pyproject.toml."""
    import tomllib

    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


@pytest.mark.parametrize("version", VERSIONS or [pytest.param("", marks=pytest.mark.skip("KERA_SPARK_VERSIONS"))])
def test_a_version_of_spark_can_do_what_the_documentation_says(version: str, tmp_path: Path) -> None:
    python = environment(version, tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK", "PYTHON"))}
    with LocalCluster.running(brokers=2, arena_bytes=64 * MIB, segment_bytes=MIB) as cluster:
        done = subprocess.run(
            [python, JOB, cluster.bootstrap, tmp_path / "job"],
            env=kept | {"PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=JOB_TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told.pop("spark").startswith(f"{version}.")
    told.pop("python")
    limits, epochs, columnar = told.pop("limits"), told.pop("epochs"), told.pop("columnar")
    assert told == dict.fromkeys(told, True)
    if version in {"4.0", "4.1"}:
        assert re.search(rf"this is Spark {version}\.\d+, which cannot bound the micro-batches", limits)
        assert re.search(rf"option epoch: this is Spark {version}\.\d+", epochs)
    else:
        assert (limits, epochs) == ("obeyed", "obeyed")
    assert f"made for Spark 4.3, and this is {version}." in columnar
