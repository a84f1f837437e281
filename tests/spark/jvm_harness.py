"""Small Java programs of the tests that use the classes of the columnar engine as Spark does.

They lie in ``tests/spark/jvm``, in packages of the engine where they use its internals. They are compiled against its
jar, which is rebuilt if it is outdated. A program is named with its package: ``kera.wire.Decoding``.
"""

import atexit
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark

from tests.spark.support import QUICK_JVM

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "jvm"
BUILD = ROOT / "spark_connector" / "jvm" / "build.py"
JAR = ROOT / "spark_connector" / "kera" / "spark_connector" / "jars" / "kera-spark-connector.jar"
LIBRARIES = f"{JAR}:{Path(pyspark.__file__).parent / 'jars' / '*'}"
QUICK = QUICK_JVM.split()
OPENED = ("java.base/java.lang", "java.base/java.nio", "java.base/java.util", "java.base/sun.nio.ch")
"""The packages to open; Spark's scripts open these and more."""


@functools.cache
def _classes() -> str:
    """Compile all programs at once, because starting the compiler takes longest; return their folder."""
    subprocess.run([sys.executable, str(BUILD)], check=True)
    folder = tempfile.TemporaryDirectory(prefix="kera-java-")
    atexit.register(folder.cleanup)
    options = [*(f"-J{option}" for option in QUICK), "--release", "17", "-Xlint:all,-path,-classfile", "-Werror"]
    subprocess.run(["javac", *options, "-cp", LIBRARIES, "-d", folder.name, *SOURCES.rglob("*.java")], check=True)
    return folder.name


def compiled(name: str) -> list[str]:
    """The command that runs the program `name`, without its arguments."""
    opened = [f"--add-opens={package}=ALL-UNNAMED" for package in OPENED]
    return ["java", "-Xmx512m", *QUICK, *opened, "-cp", f"{_classes()}:{LIBRARIES}", name]


class Harness:
    """A program that answers each line of JSON with a line, until its input ends."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to `request`; fails if the program ends before."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running(command: Sequence[str]) -> Iterator[Harness]:
    """Run the program of `command`, which must exit with 0 after its last answer."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Harness(process)
    assert process.returncode == 0


class Threads:
    """A program that obeys lines of JSON, with a thread per object: ``kera.tests.Obedient``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).set_result(answer)

    def ask(self, of: str, op: str, **arguments: Any) -> "Future[dict[str, Any]]":
        """Have the named object begin an operation; return its future outcome."""
        number = next(self._numbers)
        future = self._waiting[number] = Future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "of": of, "op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        return future


def outcome(future: "Future[dict[str, Any]]", timeout_s: float) -> dict[str, Any]:
    """The answer of an object; an exception of it becomes a `RuntimeError` with its class and text."""
    answer = future.result(timeout_s)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


@contextmanager
def threads(name: str) -> "Iterator[subprocess.Popen[str]]":
    """Run such a program; yield its process."""
    with subprocess.Popen(compiled(name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()
