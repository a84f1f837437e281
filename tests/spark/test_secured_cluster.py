"""A user's Spark application on a secured cluster: executors get no password, and secrets appear nowhere.

Spark is a master and two workers, each a process. At the end its event logs, pages, checkpoints, all logs and the
system's view of its processes are searched for secrets: the cluster secret, passwords, and all tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.spark.jvm_harness import OPENED
from tests.spark.secured import SecuredCluster, password_of, secrets_in, secured_cluster
from tests.spark.shown import hidden, keep_what_is_shown
from tests.spark.standalone import Standalone, standalone
from tests.spark.submitting import environment, java_of_tests
from tests.spark.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENGINES = ("python", "columnar")
VALUES = sorted(f"{number}" for number in range(500))
WITHIN_S = 180.0
REVOKED_S = 30.0
"""The time within which a revoked right ends a query; most of it is for Spark on a busy machine."""
LIFETIME_S = 6
"""The lifetime of the tokens of a query that runs longer."""


class Application:
    """A driver that obeys commands; see secured_job.py."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def begin(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the application has ended: {self.log.read_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, do: str, **arguments: Any) -> Any:
        """Send a command; return its result."""
        self.begin(do, **arguments)
        answer = self.answer()
        assert "error" not in answer, answer["error"]
        return answer["done"]

    def refused(self, do: str, **arguments: Any) -> str:
        """Send a command; return its error."""
        self.begin(do, **arguments)
        return str(self.answer()["error"])


class World(NamedTuple):
    """The secured cluster, the Spark cluster and the application."""

    secured: SecuredCluster
    spark: Standalone
    application: Application
    folder: Path
    """The folder that is searched."""

    def options(self, engine: str, user: str = "alice", **more: str) -> dict[str, str]:
        return self.secured.options(user) | {"engine": engine, "sharedMemory": "never"} | more


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    (folder / "events").mkdir()
    (folder / "local").mkdir()
    opened = [f"--add-opens={package}=ALL-UNNAMED" for package in OPENED]
    with secured_cluster(folder, log_dir=folder / "logs", brokers=2) as secured:
        for user in ("alice", "bob"):
            secured.make_user(user)
        secured.grant("alice", "group:spark-*", "use")
        with (
            standalone(folder / "spark", java_of_tests(), opened, memory="1g") as spark,
            application(folder, spark.url, secured) as running,
        ):
            yield World(secured, spark, running, folder)


@contextmanager
def application(folder: Path, master: str, secured: SecuredCluster) -> Iterator[Application]:
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.executor.memory": "1g",
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.streaming.noDataProgressEventInterval": "500",
        "spark.ui.port": "0",
        "spark.ui.showConsoleProgress": "false",
        # Over the network, as between hosts: a Unix socket of the broker's own user needs no credentials.
        "spark.executorEnv.KERA_CLIENT_TRANSPORT": "tcp",
        "spark.executorEnv.KERA_CLIENT_RETRY_TIMEOUT_MS": "5000",
    }
    alice = {
        "KERA_CLIENT_TRANSPORT": "tcp",
        "KERA_CLIENT_TLS_CA": str(secured.ca),
        "KERA_CLIENT_USER": "alice",
        "KERA_CLIENT_PASSWORD": password_of("alice"),  # in the worst place
        "KERA_CLIENT_RETRY_TIMEOUT_MS": "5000",
    }
    log = folder / "driver.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.secured_job", json.dumps({"master": master, "conf": conf})],
            env=environment() | alice,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        yield Application(process, log)
    finally:
        process.terminate()
        process.communicate()


def streams(world: World, name: str, user: str = "alice") -> tuple[str, str]:
    """Create two streams that a user may read and write; the first has values."""
    source, sink = f"{name}-in", f"{name}-out"
    for stream in (source, sink):
        world.secured.create(stream, streamlets=2)
        world.secured.grant(user, f"stream:{stream}", "read", "write")
    send(world, source, VALUES)
    return source, sink


def send(world: World, stream: str, values: Sequence[str]) -> None:
    world.secured.send(stream, [value.encode() for value in values])


def values(world: World, stream: str) -> list[str]:
    return [value.decode() for value in world.secured.values(stream)]


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_are_read_and_written_with_options_or_the_environment(world: World, engine: str) -> None:
    source, sink = streams(world, f"batch-{engine}")
    by_environment = {"kera.bootstrap.servers": world.secured.bootstrap, "engine": engine, "sharedMemory": "never"}

    assert world.application.do("read", stream=source, options=by_environment) == VALUES
    assert world.application.do("read", stream=source, options=world.options(engine)) == VALUES
    world.application.do("copy", stream=source, to=sink, options=world.options(engine))

    assert values(world, sink) == VALUES


@pytest.mark.parametrize("engine", ENGINES)
def test_a_query_runs_longer_than_the_lifetime_of_its_tokens(world: World, engine: str) -> None:
    source, sink = streams(world, f"long-{engine}")
    options = world.options(engine, **{"token.lifetime": f"{LIFETIME_S}s"})
    checkpoint = str(world.folder / "checkpoints" / f"long-{engine}")
    world.application.do("start", stream=source, to=sink, options=options, checkpoint=checkpoint, name=engine)
    begun, sent = time.monotonic(), list(VALUES)
    while time.monotonic() < begun + 4 * LIFETIME_S:
        sent.append(f"more-{len(sent)}")
        send(world, source, sent[-1:])
        count = len(sent)
        wait_until(lambda count=count: len(values(world, sink)) >= count, "what was sent", WITHIN_S)  # type: ignore[misc]
    world.application.do("stop", name=engine)
    assert values(world, sink) == sorted(sent)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_runs_longer_than_the_lifetime_of_its_token(world: World, engine: str) -> None:
    source, _ = streams(world, f"slow-{engine}")
    options = world.options(engine, **{"token.lifetime": f"{LIFETIME_S}s"})
    begun = time.monotonic()
    pause_s = 3 * LIFETIME_S * 2 / len(VALUES)  # there are two tasks
    assert world.application.do("read_slowly", stream=source, options=options, pause_s=pause_s) == VALUES
    assert time.monotonic() > begun + 2 * LIFETIME_S
    assert world.application.do("read", stream=source, options=options) == VALUES


@pytest.mark.parametrize("engine", ENGINES)
def test_work_ended_by_a_revoked_token_can_be_restarted_even_by_another_user(world: World, engine: str) -> None:
    name = f"ended-{engine}"
    source, sink = streams(world, name)
    checkpoint = str(world.folder / "checkpoints" / name)
    how: dict[str, Any] = {"stream": source, "to": sink, "checkpoint": checkpoint}
    world.application.do("start", options=world.options(engine), name=name, **how)
    wait_until(lambda: values(world, sink) == VALUES, "the values", WITHIN_S)
    assert world.application.do("read", stream=source, options=world.options(engine)) == VALUES
    assert world.secured.revoke_tokens(source) == 1  # the query and the batch have it together
    world.application.begin("wait", name=name)
    send(world, source, ["more"])
    assert "AuthenticationFailed: the token is not known" in str(world.application.answer()["done"])

    def read() -> bool:
        world.application.begin("read", stream=source, options=world.options(engine))
        return world.application.answer().get("done") == sorted([*VALUES, "more"])

    wait_until(read, "another token for batches", WITHIN_S)
    bobs = world.options(engine, "bob")
    assert f"no stream is called '{source}'" in world.application.refused("start", options=bobs, name=name, **how)
    world.secured.grant("bob", f"stream:{source}", "read")
    world.secured.grant("bob", f"stream:{sink}", "write")
    world.application.do("start", options=bobs, name=name, **how)
    wait_until(lambda: values(world, sink) == sorted([*VALUES, "more"]), "the rest", WITHIN_S)
    world.application.do("stop", name=name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", ["read", "write"])
def test_a_revoked_right_ends_a_query(world: World, engine: str, what: Any) -> None:
    name = f"revoked-{what}-{engine}"
    source, sink = streams(world, name)
    of = source if what == "read" else sink
    checkpoint = str(world.folder / "checkpoints" / name)
    options = world.options(engine)
    world.application.do("start", stream=source, to=sink, options=options, checkpoint=checkpoint, name=name)
    wait_until(lambda: values(world, sink) == VALUES, "the values", WITHIN_S)
    world.application.begin("wait", name=name)
    world.secured.revoke("alice", f"stream:{of}", what)
    revoked = time.monotonic()
    send(world, source, ["secret"])

    error = str(world.application.answer()["done"])

    assert f"NotAllowed: user:alice may not {what} stream:{of}" in error
    assert time.monotonic() < revoked + REVOKED_S
    assert values(world, sink) == VALUES
    assert secrets_in(error.encode()) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_hiding_the_stream_of_a_query_ends_it(world: World, engine: str) -> None:
    name = f"unseen-{engine}"
    source, sink = streams(world, name)
    checkpoint = str(world.folder / "checkpoints" / name)
    options = world.options(engine)
    world.application.do("start", stream=source, to=sink, options=options, checkpoint=checkpoint, name=name)
    wait_until(lambda: values(world, sink) == VALUES, "the values", WITHIN_S)
    world.application.begin("wait", name=name)
    world.secured.revoke("alice", f"stream:{source}")
    revoked = time.monotonic()
    send(world, source, ["secret"])

    error = str(world.application.answer()["done"])

    assert "UnknownStream" in error
    assert source in error
    assert time.monotonic() < revoked + REVOKED_S
    assert values(world, sink) == VALUES


# -- the search for secrets, after all other tests -----------------------------------------------------------------


def test_pages_logs_processes_and_files_contain_no_secret(world: World) -> None:
    application, said = world.application, world.folder / "said"
    said.mkdir()
    for engine in ENGINES:
        source, sink = streams(world, f"shown-{engine}")
        options = world.options(engine)
        assert application.do("read", stream=source, options=options) == VALUES
        application.do("copy", stream=source, to=sink, options=options)
        checkpoint = str(world.folder / "checkpoints" / f"shown-{engine}")
        how = {"options": options, "checkpoint": checkpoint, "name": f"shown-{engine}"}
        application.do("start", stream=source, to=sink, **how)
        wait_until(lambda sink=sink: len(values(world, sink)) == 2 * len(VALUES), "the values", WITHIN_S)  # type: ignore[misc]
        (said / f"progress-{engine}").write_text(application.do("progress", name=f"shown-{engine}"))
        (said / f"explained-{engine}").write_text(application.do("explain", stream=source, options=options))
        bobs = world.options(engine, "bob")
        (said / f"refused-{engine}").write_text(application.refused("read", stream=source, options=bobs))
    (said / "configuration").write_text(application.do("configuration"))
    shown = keep_what_is_shown(world.spark, application.do("ui"), said)
    assert any("/StreamingQuery/" in url for url in shown)
    assert "pyspark.daemon" in (said / "executors").read_text()

    # While the driver runs, and after its end, with the files that it writes then.
    assert hidden(world.folder, world.secured.folder) == {}
    assert world.secured.tokens() != []
    application.do("end")
    application.process.wait()
    assert list((world.folder / "events").rglob("*")) != []
    assert hidden(world.folder, world.secured.folder) == {}
    wait_until(lambda: world.secured.tokens() == [], "all tokens to be revoked", WITHIN_S)


def test_the_search_finds_a_planted_secret(world: World) -> None:
    issued = world.secured.run(lambda client: client.access.issue_token(), "alice")
    (world.folder / "leak").write_text(f"… {issued.secret} …")
    assert [Path(each).name for each in hidden(world.folder, world.secured.folder)] == ["leak"]
