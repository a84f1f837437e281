"""A standalone Spark cluster for tests: a master and workers, each a process, as Spark's scripts start them.

Each process can have its own address and a command that runs it (``ip netns exec …``), so that one machine can stand
in for several. Executors are children of their worker, in its process group.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.spark.submitting import environment, spark_command
from tests.spark.support import wait_until

STARTED_WITHIN_S = 120.0
STOPPED_WITHIN_S = 20.0


class Place(NamedTuple):
    """The place where a process runs."""

    host: str = "127.0.0.1"
    """The address that it listens at and announces."""
    prefix: tuple[str, ...] = ()
    """The words before its command. They must become the process (``exec``), and not start a child."""


class Daemon(NamedTuple):
    """A running master or worker."""

    process: subprocess.Popen[bytes]
    log: Path
    folder: Path
    """Its working folder; a worker has a folder there for each application, and in it for each executor, with its
    jars."""


class Standalone(NamedTuple):
    """A running cluster."""

    url: str
    """The master URL for applications."""
    master: Daemon
    workers: list[Daemon]


@contextmanager
def standalone(
    folder: Path,
    java: Path,
    options: Sequence[str],
    *,
    workers: Sequence[Place] = (Place(), Place()),
    master: Place = Place(),  # noqa: B008  # it cannot be changed
    cores: int = 1,
    memory: str = "1g",
) -> Iterator[Standalone]:
    """Run a cluster whose workers have registered, each with `cores` and `memory` for executors.

    Logs and the files of applications are in `folder`; `options` are Java's for the master and the workers, whose
    executors get Spark's own. All processes end with the block.
    """
    with ExitStack() as stack:
        command = [*spark_command(java, [*options, "-Xmx256m"], "org.apache.spark.deploy.master.Master"), "--port", "0"]
        leader = stack.enter_context(running(folder / "master", master, [*command, "--host", master.host], java))
        url = wait_until(
            lambda: found_in(leader, r"Starting Spark master at (spark://\S+)"), "Spark's master", STARTED_WITHIN_S
        )[0]
        followers = []
        for number, place in enumerate(workers):
            command = spark_command(java, [*options, "-Xmx256m"], "org.apache.spark.deploy.worker.Worker")
            command += ["--host", place.host, "--port", "0", "--cores", str(cores), "--memory", memory, url]
            followers.append(stack.enter_context(running(folder / f"worker-{number}", place, command, java)))
        for worker in followers:
            wait_until(
                lambda worker=worker: found_in(worker, "Successfully registered with master"),  # type: ignore[misc]
                "a worker of Spark",
                STARTED_WITHIN_S,
            )
        yield Standalone(url, leader, followers)


@contextmanager
def running(folder: Path, place: Place, command: list[str], java: Path) -> Iterator[Daemon]:
    """Run a process in its own folder and process group; it and its children end with the block."""
    folder.mkdir(parents=True)
    spark = {
        "JAVA_HOME": str(java.resolve().parents[1]),  # workers start executors with it
        "SPARK_LOCAL_IP": place.host,
        "SPARK_WORKER_DIR": str(folder),
        "SPARK_MASTER_WEBUI_PORT": "0",
        "SPARK_WORKER_WEBUI_PORT": "0",
    }
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*place.prefix, *command],
            cwd=folder,
            env=environment() | spark,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Daemon(process, log, folder)
    finally:
        process.terminate()  # a worker ends its executors before itself
        try:
            process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def found_in(daemon: Daemon, pattern: str) -> list[str]:
    """The matches of `pattern` in the log of a daemon that still runs."""
    text = daemon.log.read_text(errors="replace")
    assert daemon.process.poll() is None, f"it has ended by itself:\n{text[-4000:]}"
    return re.findall(pattern, text)
