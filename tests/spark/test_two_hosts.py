"""Tasks of the columnar engine run on the host of their records and read them in place; elsewhere they pull.

Two hosts with a broker and a worker of Spark each, and a third one for the rest, are namespaces of this machine.
Spark's event log has the host of each task and the counters of its reader. The rows themselves name the host that
really read them.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kera.local.cluster import LocalCluster
from kera.local.running import run_in_thread
from tests.namespaces import Host, hosts, why_not
from tests.spark import standalone
from tests.spark.standalone import Place, Standalone
from tests.spark.submitting import environment
from tests.spark.support import wait_until
from tests.spark.two_hosts_job import RECORD_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
STREAMLETS = 4
RECORDS = 2000
COLUMNAR = {"engine": "columnar", "startingOffsets": "earliest"}
IN_PLACE = "bytes read in brokers' memory"
PULLED = "bytes sent by brokers"
NO_WAIT = "0s"
LONG_WAIT = "60s"
"""Longer than a task has to wait here, even on a busy machine."""

Row = tuple[int, int, int, str]


class Task(NamedTuple):
    """A successful task."""

    host: str
    """The name of its worker."""
    locality: str
    bytes_in_place: int
    bytes_pulled: int


class Stream(NamedTuple):
    """A stream with records on both hosts."""

    name: str
    rows: list[Row]
    hosts: dict[int, str]
    """The name of the broker's host, by streamlet."""

    def of(self, host: Host) -> list[int]:
        """The streamlets on one host."""
        return [streamlet for streamlet, name in self.hosts.items() if name == host.name]

    def only(self, streamlets: list[int]) -> dict[str, str]:
        """Options for reading only these streamlets."""
        return COLUMNAR | {"assign": json.dumps({self.name: streamlets})}


class JobError(Exception):
    """An error at the driver."""


class Driver:
    """The process of the driver, which runs one command at a time."""

    def __init__(self, process: subprocess.Popen[str], events: Path, log: Path) -> None:
        self._process = process
        self._events = events
        self._log = log

    def ask(self, what: str, **arguments: Any) -> Any:
        """Send a command; return the answer, or raise `JobError`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the driver has ended:\n{self._log.read_text()[-4000:]}"
        answer = json.loads(line)
        if "error" in answer:
            raise JobError(answer["error"])
        return answer["answer"]

    def tasks(self, group: str) -> list[Task]:
        """Wait until the event log has the ends of all jobs of `group`; return their tasks."""
        return wait_until(lambda: tasks_of(group, self._events), f"the end of {group} in the event log", 20)


class SpreadCluster(LocalCluster):
    """A cluster with its coordinator on the first host, and a broker on each of the others."""

    def __init__(self, on: list[Host]) -> None:
        super().__init__(brokers=len(on) - 1, arena_bytes=64 * MIB, segment_bytes=MIB)
        self._on = {"broker-" + str(number) if number else "coordinator": host for number, host in enumerate(on)}

    def _argv_of(self, name: str) -> list[str]:
        host = self._on[name]
        return [*host.enter, *super()._argv_of(name), "--host", host.address, "--insecure"]


def tasks_of(group: str, events: Path) -> list[Task]:
    """The tasks of the jobs of `group`; empty while one of these runs."""
    running: set[int] = set()
    stages: set[int] = set()
    found: list[Task] = []
    (log,) = events.iterdir()
    complete_lines = log.read_text().rpartition("\n")[0].splitlines()
    for event in map(json.loads, complete_lines):
        match event["Event"]:
            case "SparkListenerJobStart" if event["Properties"].get("spark.jobGroup.id") == group:
                running.add(event["Job ID"])
                stages.update(event["Stage IDs"])
            case "SparkListenerJobEnd":
                running.discard(event["Job ID"])
            case "SparkListenerTaskEnd" if event["Stage ID"] in stages:
                if event["Task End Reason"]["Reason"] == "Success":
                    info = event["Task Info"]
                    counted = {each["Name"]: each["Update"] for each in info["Accumulables"]}
                    in_place, pulled = (int(counted.get(name, 0)) for name in (IN_PLACE, PULLED))
                    found.append(Task(info["Host"], info["Locality"], in_place, pulled))
    return [] if running else found


@pytest.fixture(scope="module")
def places() -> Iterator[list[Host]]:
    """A host for the driver and other single processes, and two hosts for records and tasks."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts("kera-front", "kera-one", "kera-two") as made:
        yield made


@pytest.fixture(scope="module")
def workers(places: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    front, one, two = places
    java = shutil.which("java")
    assert java is not None
    # Spark knows a host by the name or the address that its worker was given.
    at = [Place(one.name, tuple(one.enter)), Place(two.address, tuple(two.enter))]
    master = Place(front.address, tuple(front.enter))
    folder = tmp_path_factory.mktemp("standalone")
    with standalone.standalone(folder, Path(java).resolve(), [], workers=at, master=master) as made:
        yield made


@pytest.fixture(scope="module")
def driver(places: list[Host], workers: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("driver")
    with (
        run_in_thread(SpreadCluster(places)) as cluster,
        started(places[0], workers.url, cluster.bootstrap, folder) as made,
    ):
        yield made


@contextmanager
def started(host: Host, master: str, bootstrap: str, folder: Path) -> Iterator[Driver]:
    """Start the driver on `host`."""
    events = folder / "events"
    events.mkdir()
    log = folder / "log"
    settings = {
        "spark.master": master,
        "spark.driver.host": host.address,
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*host.enter, sys.executable, "-m", "tests.spark.two_hosts_job", bootstrap, json.dumps(settings)],
            env=environment() | {"SPARK_LOCAL_IP": host.address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield Driver(process, events, log)
    finally:
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def clicks(driver: Driver, places: list[Host]) -> Stream:
    made = driver.ask("produce", stream="clicks", records=RECORDS, streamlets=STREAMLETS)
    at = {int(streamlet): node.partition("/")[0] for streamlet, node in made["nodes"].items()}
    assert sorted(at.values()) == [host.name for host in places[1:] for _ in range(STREAMLETS // 2)]
    return Stream("clicks", [(*place, value) for *place, value in made["rows"]], at)


@pytest.fixture
def both(driver: Driver, places: list[Host]) -> list[Host]:
    """The two hosts with records; each has an executor, and tasks wait for theirs."""
    _, one, two = places
    driver.ask("executors", hosts=[one.name, two.address])
    driver.ask("locality_wait", wait=LONG_WAIT)
    return [one, two]


@pytest.fixture(scope="module")
def left(driver: Driver, places: list[Host], workers: Standalone) -> list[Host]:
    """The same two hosts after the second one has lost its worker for good: for the last tests of this file."""
    _, one, two = places
    gone = workers.workers[1].process
    gone.terminate()
    gone.wait(20)
    driver.ask("executors", hosts=[one.name])
    driver.ask("locality_wait", wait=LONG_WAIT)
    return [one, two]


def rows_and_hosts(answer: list[Any]) -> tuple[list[Row], dict[int, set[str]]]:
    """The rows of an answer, and the hosts that read them, by streamlet."""
    read_on: dict[int, set[str]] = {}
    for streamlet, *_, host in answer:
        read_on.setdefault(streamlet, set()).add(host)
    return sorted(tuple(row) for *row, _ in answer), read_on


def require_in_place(tasks: list[Task]) -> None:
    """Require that tasks on their preferred hosts read the whole stream in place."""
    assert {task.locality for task in tasks} == {"NODE_LOCAL"}
    assert sum(task.bytes_in_place for task in tasks) > RECORDS * RECORD_BYTES
    assert sum(task.bytes_pulled for task in tasks) == 0


@pytest.mark.usefixtures("both")
def test_each_task_of_a_batch_runs_on_its_brokers_host_and_reads_in_place(driver: Driver, clicks: Stream) -> None:
    rows, read_on = rows_and_hosts(driver.ask("batch", group="batch", stream=clicks.name, options=COLUMNAR))

    assert rows == sorted(clicks.rows)
    assert read_on == {streamlet: {host} for streamlet, host in clicks.hosts.items()}
    tasks = driver.tasks("batch")
    assert len(tasks) == STREAMLETS
    require_in_place(tasks)


@pytest.mark.usefixtures("both")
def test_each_task_of_a_micro_batch_runs_on_its_brokers_host_and_reads_in_place(
    driver: Driver, clicks: Stream, tmp_path: Path
) -> None:
    options = COLUMNAR | {"maxOffsetsPerTrigger": str(RECORDS // 3)}

    done = driver.ask("micro_batches", stream=clicks.name, checkpoint=str(tmp_path), options=options)

    assert len(done["batches"]) >= 3
    for answer in done["batches"]:
        _, read_on = rows_and_hosts(answer)
        assert read_on == {streamlet: {clicks.hosts[streamlet]} for streamlet in read_on}
    rows, read_on = rows_and_hosts([row for answer in done["batches"] for row in answer])
    assert rows == sorted(clicks.rows)
    assert len(read_on) == STREAMLETS
    require_in_place(driver.tasks(done["group"]))


def test_a_task_whose_host_stays_busy_runs_elsewhere_and_pulls(
    driver: Driver, clicks: Stream, both: list[Host], tmp_path: Path
) -> None:
    one, two = both
    streamlets = clicks.of(two)
    over = tmp_path / "over"
    driver.ask("occupy", options=clicks.only(streamlets[:1]), until=str(over))
    driver.ask("locality_wait", wait=NO_WAIT)

    try:
        answer = driver.ask("batch", group="busy", stream=None, options=clicks.only(streamlets))
    finally:
        over.touch()
        driver.ask("free")

    rows, read_on = rows_and_hosts(answer)
    assert rows == sorted(row for row in clicks.rows if row[0] in streamlets)
    assert set.union(*read_on.values()) == {one.name}
    tasks = driver.tasks("busy")
    assert {task.locality for task in tasks} == {"ANY"}
    assert sum(task.bytes_pulled for task in tasks) > len(rows) * RECORD_BYTES
    assert sum(task.bytes_in_place for task in tasks) == 0


def test_tasks_whose_host_has_no_executor_run_elsewhere_at_once_and_pull(
    driver: Driver, clicks: Stream, left: list[Host]
) -> None:
    one, _ = left  # a task that prefers the other host would wait too long for this test

    rows, read_on = rows_and_hosts(driver.ask("batch", group="left", stream=clicks.name, options=COLUMNAR))

    assert rows == sorted(clicks.rows)
    assert set.union(*read_on.values()) == {one.name}
    tasks = driver.tasks("left")
    in_place = [task for task in tasks if task.locality == "NODE_LOCAL"]
    elsewhere = [task for task in tasks if task.locality != "NODE_LOCAL"]
    assert len(in_place) == len(elsewhere) == STREAMLETS // 2
    assert all(task.bytes_in_place > 0 and task.bytes_pulled == 0 for task in in_place)
    assert all(task.bytes_pulled > 0 and task.bytes_in_place == 0 for task in elsewhere)


def test_the_error_for_required_shared_memory_names_the_brokers_node(
    driver: Driver, clicks: Stream, left: list[Host]
) -> None:
    _, two = left
    options = COLUMNAR | {"sharedMemory": "always"}

    with pytest.raises(JobError, match=rf"shared_memory is 'always', but broker \d+ is on another node, {two.name}/"):
        driver.ask("batch", group="always", stream=clicks.name, options=options)
