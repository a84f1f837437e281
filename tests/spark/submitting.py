"""Spark's programs on a Java and with options that a test chooses.

The scripts of pyspark choose both themselves, and always require a module (jdk.incubator.vector) that not every
runtime has. So this module runs the same classes without the scripts.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyspark
from pyspark.sql import SparkSession

from kera.spark_connector.engine import jar_path

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
JOB_TIMEOUT_S = 240


def environment() -> dict[str, str]:
    """The environment of Spark's programs: the Python and the pyspark of this process, and this tree."""
    (sql,) = (SPARK_HOME / "jars").glob("spark-sql_*.jar")  # spark-sql_2.13-4.3.0.jar
    return {name: value for name, value in os.environ.items() if not name.startswith("SPARK")} | {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_HOME": str(SPARK_HOME),  # executors start from there
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SCALA_VERSION": sql.stem.split("-")[1].removeprefix("sql_"),
    }


def spark_command(java: Path, options: Sequence[str], main_class: str) -> list[str]:
    """The command that runs a class of Spark."""
    return [str(java), *options, "-cp", str(SPARK_HOME / "jars" / "*"), main_class]


def module_options(spark: SparkSession) -> list[str]:
    """The options that Spark's scripts pass to Java, without the module that some runtimes lack."""
    jvm: Any = spark._jvm
    options = jvm.org.apache.spark.launcher.JavaModuleOptions.defaultModuleOptionArray()
    return [option for option in options if not option.startswith("--add-modules")]


def java_of_tests() -> Path:
    """The Java of the tests: from JAVA_HOME or PATH."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else shutil.which("java")
    assert java, "no java: run make test, or set JAVA_HOME"
    return Path(java)


class Submitted(NamedTuple):
    """The outcome of a submitted job."""

    returncode: int
    lines: list[dict[str, Any]]
    log: str


def submit(
    job: Path,
    *arguments: str,
    java: Path,
    options: Sequence[str],
    folder: Path,
    master: str = "local[1]",
    jar: bool = True,
    conf: Mapping[str, str] = MappingProxyType({}),
) -> Submitted:
    """Run a job to its end: a Python program that prints lines of JSON; `jar`: with the columnar engine."""
    spark: list[str | Path] = ["--master", master]
    if jar:
        spark += ["--jars", jar_path().as_uri()]
    for name, value in {
        "spark.driver.host": "127.0.0.1",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        **conf,
    }.items():
        spark += ["--conf", f"{name}={value}"]
    command = spark_command(java, [*options, "-Xmx512m"], "org.apache.spark.deploy.SparkSubmit")
    done = subprocess.run(
        [*command, *spark, job, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=JOB_TIMEOUT_S,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return Submitted(done.returncode, lines, done.stderr)
