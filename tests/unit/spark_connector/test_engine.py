"""`configure` adds the columnar engine to a new session, and raises an error where it cannot."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pyspark
import pytest

from kera.spark_connector import __main__, configure, engine, jar_path
from kera.spark_connector.engine import EngineMissing


class Builder:
    """The part of ``SparkSession.builder`` that `configure` uses."""

    def __init__(self, **options: Any) -> None:
        self._options = {name.replace("_", "."): value for name, value in options.items()}

    def config(self, name: str, value: str) -> Self:
        self._options[name] = value
        return self

    @property
    def options(self) -> dict[str, Any]:
        return self._options


@pytest.fixture(autouse=True)
def jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A jar, and an environment without Spark's variables."""
    path = tmp_path / "kera.jar"
    path.touch()
    monkeypatch.setattr(engine, "JAR", path)
    for name in ("PYSPARK_PYTHON", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "pyspark.core.context", context_with(None))
    return path


def context_with(jvm: object) -> Any:
    return SimpleNamespace(SparkContext=SimpleNamespace(_jvm=jvm))


def jvm_with(*classes: str) -> Any:
    """A running JVM that finds these classes."""

    def load(name: str) -> str:
        if name not in classes:
            raise LookupError(name)
        return name

    thread = SimpleNamespace(getContextClassLoader=lambda: SimpleNamespace(loadClass=load))
    lang = SimpleNamespace(Thread=SimpleNamespace(currentThread=lambda: thread))
    return SimpleNamespace(java=SimpleNamespace(lang=lang))


def test_the_session_gets_the_jar_and_this_python(jar: Path) -> None:
    builder = Builder()

    assert configure(builder) is builder
    assert builder.options == {"spark.jars": str(jar), "spark.kera.python": sys.executable}


def test_configure_keeps_other_jars_and_adds_its_own_once(jar: Path) -> None:
    builder = configure(configure(Builder(spark_jars="/a.jar,/b.jar")))

    assert builder.options["spark.jars"] == f"/a.jar,/b.jar,{jar}"


@pytest.mark.parametrize("folder", ["with space", "wïth umlaut", "with#hash", "with%20percent"])
def test_an_odd_path_becomes_a_uri(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / folder / "kera.jar"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setattr(engine, "JAR", path)

    jars = configure(Builder()).options["spark.jars"]

    assert jars.startswith("file:///")
    assert not set(jars) & set(" ,#ï")
    from urllib.request import url2pathname

    assert url2pathname(jars.removeprefix("file://")) == str(path)


def test_the_python_that_plans_can_be_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    said = configure(Builder(spark_kera_python="/other/python")).options
    assert said["spark.kera.python"] == "/other/python"

    monkeypatch.setenv("PYSPARK_PYTHON", "/another/python")
    assert "spark.kera.python" not in configure(Builder()).options


def test_the_error_for_a_missing_jar_says_how_to_get_one(jar: Path) -> None:
    jar.unlink()

    for ask in (jar_path, lambda: configure(Builder())):
        with pytest.raises(EngineMissing, match=r"no columnar engine.*`make jar`.*wheel"):
            ask()


@pytest.mark.parametrize("options", [{"spark_remote": "sc://h"}, {"spark_api_mode": "connect"}])
def test_a_session_of_spark_connect_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(EngineMissing, match=r"Spark Connect.*belongs to its server"):
        configure(Builder(**options))


def test_spark_connect_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://h")

    with pytest.raises(EngineMissing, match="Spark Connect"):
        configure(Builder())


def test_a_running_session_without_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.core.context", context_with(jvm_with()))
    with pytest.raises(EngineMissing, match="runs in this process already"):
        configure(Builder())

    monkeypatch.setitem(sys.modules, "pyspark.core.context", context_with(jvm_with("kera.spark.KeraSource")))
    assert "spark.jars" in configure(Builder()).options


@pytest.mark.parametrize("folder", ["with,comma", "with[brackets]", "with{braces}", "with*"])
def test_a_jar_path_that_spark_cannot_take_is_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / folder / "kera.jar"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setattr(engine, "JAR", path)

    with pytest.raises(EngineMissing, match=r"copy .*kera\.jar elsewhere"):
        configure(Builder())


def test_the_command_prints_the_path_of_the_jar(jar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["jar"]) == 0
    assert capsys.readouterr().out == f"{jar}\n"
    jar.unlink()
    assert __main__.main(["jar"]) == 1
    assert "make jar" in capsys.readouterr().err
    assert __main__.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_importing_the_connector_does_not_import_spark() -> None:
    program = (
        "import sys; from kera.spark_connector import configure, jar_path; import kera.spark_connector.service.methods;"
        "assert not {'pyspark', 'pyarrow'} & set(sys.modules), 'too much is imported';"
        "import kera.spark_connector.service.routing;"
        "assert 'pyspark' not in sys.modules, 'executors plan nothing';"
        "from pyspark_kera import DefaultSource; assert DefaultSource.name() == 'kera'"
    )

    subprocess.run([sys.executable, "-c", program], check=True)


def test_configure_refuses_an_untested_version_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    with pytest.raises(EngineMissing, match=r"made for Spark 4\.3, and this is 4\.1\.4: leave configure out"):
        configure(Builder())  # type: ignore[type-var, unused-ignore]
