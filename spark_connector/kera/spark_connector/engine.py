"""Makes Spark sessions with the columnar engine, and finds its jar.

    spark = configure(SparkSession.builder).getOrCreate()

This module imports Spark only when it needs it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kera.core.errors import KeraError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BuilderT = TypeVar("BuilderT")

JAR = Path(__file__).parent / "jars" / "kera-spark-connector.jar"
JARS = "spark.jars"
PYTHON = "spark.kera.python"
"""The Python interpreter that plans; see `service`."""
COLUMNAR_VERSIONS = ("4.3.",)
"""Prefixes of the Spark versions that the columnar engine is compiled against and tested with, because it uses internal
classes of Spark. The jar has the same list, in ``kera.spark.service.Environment``."""
_REMOTE = "spark.remote"
_API_MODE = "spark.api.mode"
_CLASS = "kera.spark.KeraSource"
_PLAIN = re.compile(r"[A-Za-z0-9/._+-]+")
"""Characters that Spark takes literally, in a path as well as in a URI."""
_NEVER = re.compile(r"[,*?\[\]{}\\]")
"""Characters that Spark always takes for a list of jars or a pattern, even if they are escaped."""


class EngineMissing(KeraError):
    """This installation has no columnar engine, or Spark cannot load it this way."""

    code = "engine_missing"


def jar_path() -> Path:
    """Return the jar of the columnar engine, for ``spark.jars`` or ``--jars``. Raises `EngineMissing`."""
    if not JAR.is_file():
        raise EngineMissing(
            f"there is no {JAR}: this installation has no columnar engine. In a source tree, build it with `make jar`;"
            " else install a wheel that has it",
            path=str(JAR),
        )
    return JAR


def configure(builder: BuilderT) -> BuilderT:
    """Configure `builder` (``SparkSession.builder``) so that its session uses the columnar engine, and return it.

    This adds the jar to ``spark.jars``, and sets the Python interpreter that plans to the current one, unless
    ``spark.kera.python`` is set, or PYSPARK_PYTHON without PYSPARK_DRIVER_PYTHON. Call it after
    ``config("spark.jars", …)``, which would replace the jars.

    Raises `EngineMissing` if there is no jar, or if the jar is not for this version of Spark; for Spark Connect, whose
    server needs the jar; and if Spark's JVM already runs without it, because a JVM takes jars only at its start.
    """
    _require_tested_version()
    given = _given(builder)
    _require_classic(builder, given)
    _require_no_other_jvm()
    jar = _as_spark_takes_it(jar_path())
    jars = [each for each in given.get(JARS, "").split(",") if each.strip()]
    if jar not in jars:
        jars.append(jar)
    _set(builder, JARS, ",".join(jars))
    # PYSPARK_DRIVER_PYTHON may be any program that starts a driver, such as a notebook.
    if PYTHON not in given and (not os.environ.get("PYSPARK_PYTHON") or os.environ.get("PYSPARK_DRIVER_PYTHON")):
        _set(builder, PYTHON, sys.executable)
    return builder


def register(spark: SparkSession) -> None:
    """Register the Python data source in `spark`, with or without the columnar engine.

    Spark normally finds it alone, but looks for no data sources if the path of Python has a space.
    """
    from pyspark.errors import AnalysisException

    from kera.spark_connector.source import KeraDataSource, RegisteredDataSource

    try:
        spark.dataSource.register(KeraDataSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        spark.dataSource.register(RegisteredDataSource)


def _require_tested_version() -> None:
    import pyspark

    if not pyspark.__version__.startswith(COLUMNAR_VERSIONS):
        made_for = ", ".join(each.rstrip(".") for each in COLUMNAR_VERSIONS)
        raise EngineMissing(
            f"the columnar engine is made for Spark {made_for}, and this is {pyspark.__version__}:"
            " leave configure out, and Python workers read, which is slower",
            version=pyspark.__version__,
        )


def _given(builder: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in builder._options.items()}  # noqa: SLF001 - it has no other way


def _set(builder: Any, name: str, value: str) -> None:
    builder.config(name, value)


def _require_classic(builder: Any, given: dict[str, str]) -> None:
    remote = _REMOTE in given or "SPARK_REMOTE" in os.environ or "SPARK_CONNECT_MODE_ENABLED" in os.environ
    if remote or given.get(_API_MODE) == "connect" or type(builder).__module__.startswith("pyspark.sql.connect"):
        raise EngineMissing(
            "this is a session of Spark Connect: the columnar engine belongs to its server. Start that with"
            " --jars $(python -m kera.spark_connector jar)"
        )


def _require_no_other_jvm() -> None:
    core = sys.modules.get("pyspark.core.context")
    jvm = None if core is None else core.SparkContext._jvm  # noqa: SLF001 - it has no other way
    if jvm is None:
        return
    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(_CLASS)
    except Exception as error:  # Spark may wrap the ClassNotFoundException in various errors
        raise EngineMissing(
            "Spark runs in this process already, without the columnar engine, and takes no jars any more: configure the"
            " builder of the first session that a process makes"
        ) from error


def _as_spark_takes_it(path: Path) -> str:
    if _NEVER.search(str(path)):
        raise EngineMissing(
            f"Spark cannot be given a jar whose path has one of , * ? [ ] {{ }} \\ in it: copy {path} elsewhere, and"
            f" name it in {JARS}",
            path=str(path),
        )
    return str(path) if _PLAIN.fullmatch(str(path)) else path.as_uri()
