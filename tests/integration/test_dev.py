"""`kera dev` and `LocalCluster`, with real daemons: they start, stop in order, and leave nothing behind.

Each test has its own directories for shared memory and temporary files, so that it can check that nothing is left,
however many clusters run beside it.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client
from kera.core.errors import InvalidArgument, NotReplicated, TooFewBackups, Uncertain
from kera.local.cluster import LocalCluster
from tests.integration.command_line import run_kera

BOUND_S = 60
NOBODY = 65_534
ARENA = ("--arena-bytes", "16MiB", "--segment-bytes", "1MiB")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {BOUND_S} s: {what}"
        time.sleep(0.02)


@dataclasses.dataclass
class Surroundings:
    """Where the processes of a test keep anything that they might leave behind."""

    shm: Path
    temporary: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "KERA_BROKER_SHM_DIR": str(self.shm), "TMPDIR": str(self.temporary)}

    def left(self) -> list[str]:
        return sorted(path.name for path in (*self.shm.iterdir(), *self.temporary.iterdir()))


@pytest.fixture
def around() -> Iterator[Surroundings]:
    # Short paths: the path of a unix socket has 107 bytes at most.
    name = f"kera-test-{secrets.token_hex(4)}"
    places = Surroundings(Path("/dev/shm", name), Path("/tmp", name))
    places.shm.mkdir()
    places.temporary.mkdir()
    yield places
    shutil.rmtree(places.shm)
    shutil.rmtree(places.temporary)


class Dev:
    """A running ``kera dev``."""

    def __init__(self, around: Surroundings, *flags: str | Path) -> None:
        argv = [sys.executable, "-m", "kera.cli", "dev", "--port", "0", *ARENA, *map(str, flags)]
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=around.environment
        )

    def read_welcome(self) -> str:
        """The text that it prints when the cluster runs."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("Ctrl-C"):
                return "".join(lines)
        raise AssertionError(f"it ended: {self.process.communicate()}")

    def children(self) -> dict[str, int]:
        """Pids of its daemons, by their names (coordinator, broker-1, …)."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                argv = (path / "cmdline").read_text().split("\0")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and "--data-dir" in argv:
                    found[Path(argv[argv.index("--data-dir") + 1]).name] = int(path.name)
        return found

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Signal it; returns its exit code and its standard error."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, errors


StartDev = Callable[..., Dev]


@pytest.fixture
def start_dev(around: Surroundings) -> Iterator[StartDev]:
    started = []

    def start(*flags: str | Path) -> Dev:
        started.append(Dev(around, *flags))
        return started[-1]

    yield start
    for dev in started:
        if dev.process.poll() is None:
            dev.end(signal.SIGTERM)
        dev.process.communicate()


def exists(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def bootstrap_of(welcome: str) -> str:
    match = re.search(r"bootstrap +(\S+)", welcome)
    assert match
    return match[1]


def kera(*arguments: str, stdin: str = "") -> str:
    ended = run_kera(*arguments, stdin=stdin.encode())
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode()


# --- kera dev: its life ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_daemons_and_leaves_nothing_behind(
    start_dev: StartDev, around: Surroundings, number: signal.Signals
) -> None:
    dev = start_dev()
    dev.read_welcome()
    pids = dev.children().values()
    assert len(pids) == 2
    assert len(around.left()) == 2, "an arena and a temporary directory"

    assert dev.end(number) == (0, "")

    assert not any(exists(pid) for pid in pids)
    assert around.left() == []


def test_the_shown_addresses_are_right_and_the_suggested_commands_work(
    start_dev: StartDev, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcome = start_dev("--brokers", "2").read_welcome()

    assert "a cluster of 2 brokers on this machine" in welcome
    assert "16 MiB per broker, segments of 1 MiB" in welcome
    cluster = json.loads(kera("cluster", "describe", "--json", "--bootstrap", bootstrap_of(welcome)))
    for broker in cluster["brokers"]:
        assert (
            f"broker {broker['broker_id']}   grpc {broker['grpc_address']}, frames {broker['frames_address']}"
            in welcome
        )
    assert len(cluster["brokers"]) == 2

    export, create, produce, consume = welcome.partition("Try:\n")[2].strip().splitlines()[:4]
    variable, _, value = export.strip().removeprefix("export ").partition("=")
    monkeypatch.setenv(variable, value)
    kera(*create.split()[1:])
    echo, _, command = produce.partition(" | ")
    kera(*command.split()[1:], stdin=echo.split()[1] + "\n")
    assert kera(*consume.split()[1:], "--until-end") == "hello\n"


@pytest.mark.slow
def test_a_signal_during_the_start_stops_it(start_dev: StartDev, around: Surroundings) -> None:
    dev = start_dev()
    wait_until(lambda: bool(dev.children()), "the coordinator is being started")

    code, errors = dev.end(signal.SIGTERM)

    assert (code, errors) == (0, "")
    assert dev.children() == {}
    assert around.left() == []


@pytest.mark.slow
def test_the_death_of_a_broker_is_reported_and_ends_the_others(start_dev: StartDev, around: Surroundings) -> None:
    dev = start_dev("--brokers", "2")
    dev.read_welcome()
    pids = dev.children()

    os.kill(pids["broker-2"], signal.SIGKILL)
    _, errors = dev.process.communicate(timeout=BOUND_S)

    assert dev.process.returncode == 1
    first, *tail = errors.splitlines()
    assert first == "kera: error: broker-2 was killed by SIGKILL; stopping the others. The end of its log:"
    assert any("info ready" in line and "broker_id=" in line for line in tail)  # 1 or 2: which registered first
    assert not any(exists(pid) for pid in pids.values())
    assert around.left() == []


@pytest.mark.slow
def test_the_death_of_a_broker_is_a_warning_if_others_can_take_over(start_dev: StartDev, around: Surroundings) -> None:
    dev = start_dev("--brokers", "2", "--backups", "1", "--replication", "1")
    bootstrap = bootstrap_of(dev.read_welcome())
    kera("stream", "create", "kept", "--streamlets", "2", "--bootstrap", bootstrap)
    os.kill(dev.children()["broker-2"], signal.SIGKILL)

    def recovered() -> bool:
        shown = kera("cluster", "recoveries", "--bootstrap", bootstrap)
        return "phase" in shown and "done" in shown

    wait_until(recovered, "the other one has taken over")
    code, errors = dev.end()
    assert (code, errors) == (0, "kera: warning: broker-2 was killed by SIGKILL; the others keep running\n")
    assert around.left() == []


# --- kera dev: the same place twice ------------------------------------------------------------------------


def test_a_directory_or_port_that_is_in_use_is_refused(start_dev: StartDev, tmp_path: Path) -> None:
    dev = start_dev("--data-dir", tmp_path / "data")
    bootstrap = bootstrap_of(dev.read_welcome())

    same_directory = start_dev("--data-dir", tmp_path / "data")
    _, errors = same_directory.process.communicate(timeout=BOUND_S)
    assert same_directory.process.returncode == 2
    assert errors == f"kera: error: another local cluster uses {tmp_path}/data; stop it or choose another directory\n"

    same_port = start_dev("--port", bootstrap.partition(":")[2])
    _, errors = same_port.process.communicate(timeout=BOUND_S)
    assert same_port.process.returncode == 2
    (line,) = errors.splitlines()
    assert line.startswith("kera: error: coordinator: ")
    assert bootstrap in line


def test_too_little_memory_is_reported_in_one_line(start_dev: StartDev, around: Surroundings) -> None:
    dev = start_dev("--arena-bytes", "1PiB")
    _, errors = dev.process.communicate(timeout=BOUND_S)

    assert dev.process.returncode == 2
    (line,) = errors.splitlines()
    assert line.startswith(f"kera: error: broker-1: {around.shm} has ")
    assert around.left() == []


@pytest.mark.slow
def test_a_restarted_cluster_has_its_streams(start_dev: StartDev, tmp_path: Path) -> None:
    first = start_dev("--brokers", "2", "--data-dir", tmp_path / "data")
    kera("stream", "create", "kept", "--streamlets", "2", "--bootstrap", bootstrap_of(first.read_welcome()))
    assert first.end() == (0, "")

    second = start_dev("--brokers", "2", "--data-dir", tmp_path / "data")
    bootstrap = bootstrap_of(second.read_welcome())

    assert [stream["name"] for stream in json.loads(kera("stream", "list", "--json", "-b", bootstrap))] == ["kept"]
    kera("produce", "kept", "-b", bootstrap, stdin="after\n")
    assert "after\n" in kera("consume", "kept", "--until-end", "-b", bootstrap)


# --- kera dev: backups -------------------------------------------------------------------------------------


BACKUPS = ("--backups", "2", "--backup-memory-bytes", "16MiB")


def test_a_cluster_with_backups_takes_replicated_streams_and_stops_in_order(
    start_dev: StartDev, around: Surroundings, tmp_path: Path
) -> None:
    dev = start_dev(*BACKUPS, "--replication", "2", "--log-dir", tmp_path / "logs")
    welcome = dev.read_welcome()
    assert "a cluster of 1 broker and 2 backups on this machine" in welcome
    assert re.search(r"^  replication +2 backups$", welcome, re.MULTILINE)
    assert "16 MiB per broker, 16 MiB per backup, segments of 1 MiB" in welcome
    at = ("--bootstrap", bootstrap_of(welcome))

    kera("stream", "create", "copied", *at)
    kera("produce", "copied", *at, stdin="a\nb\n")
    assert kera("consume", "copied", "--from", "earliest", "--until-end", *at) == "a\nb\n"

    config = json.loads(kera("stream", "describe", "copied", "--json", *at))["config"]
    assert (config["replication"], config["durability"]) == (2, "replicated")
    assert "replication  on 2 backups, through 1 virtual log on each broker" in kera(
        "stream", "describe", "copied", *at
    )
    backups = json.loads(kera("cluster", "describe", "--json", *at))["backups"]
    assert [(backup["backup_id"], backup["alive"]) for backup in backups] == [(1, True), (2, True)]
    assert {(backup["memory_bytes"], backup["segment_bytes"]) for backup in backups} == {(16 << 20, 1 << 20)}
    assert re.search(r"^ +2 +yes .* of 16 MiB ", kera("cluster", "describe", *at), re.MULTILINE)
    pids = dev.children().values()
    assert len(pids) == 4

    assert dev.end() == (0, "")

    assert not any(exists(pid) for pid in pids)
    assert around.left() == []

    def time_of(event: str, name: str) -> str:
        records = map(json.loads, (tmp_path / "logs" / f"{name}.log").read_text().splitlines())
        (time_of_event,) = (record["timestamp"] for record in records if record["event"] == event)
        return str(time_of_event)

    names = [f"backup-{n}" for n in (1, 2)]
    assert time_of("stopped", "broker-1") < min(time_of("stopping", name) for name in names)
    assert max(time_of("stopped", name) for name in names) < time_of("stopping", "coordinator")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the user who runs the tests has no rights anyway")
def test_an_unprivileged_user_can_run_a_cluster(around: Surroundings) -> None:
    for path in (around.shm, around.temporary):
        os.chown(path, NOBODY, NOBODY)
    command = [sys.executable, "-m", "kera.cli", "dev", "--port", "0", "--backups", "1", "--replication", "1", *ARENA]
    try:
        process = subprocess.Popen(
            command,
            cwd=around.temporary,
            env=around.environment | {"HOME": str(around.temporary), "PYTHONDONTWRITEBYTECODE": "1"},
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except PermissionError:
        pytest.skip(f"no other user may run {sys.executable}")
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        said = list(itertools.takewhile(lambda line: "Ctrl-C" not in line, lines))
        found = re.search(r"bootstrap +(\S+)", "".join(said))
        assert found is not None, said
        assert run_kera("stream", "create", "s", "--bootstrap", found[1]).returncode == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND_S) == 130
    finally:
        process.kill()
        process.communicate()
    assert around.left() == []


def test_a_restarted_replicated_cluster_has_its_records(start_dev: StartDev, tmp_path: Path) -> None:
    flags = (*BACKUPS, "--replication", "1", "--data-dir", tmp_path / "data")
    first = start_dev(*flags)
    at = ("--bootstrap", bootstrap_of(first.read_welcome()))
    kera("stream", "create", "kept", *at)
    kera("produce", "kept", *at, stdin="before\n")
    assert first.end() == (0, "")

    second = start_dev(*flags)
    at = ("--bootstrap", bootstrap_of(second.read_welcome()))

    kera("produce", "kept", *at, stdin="after\n")
    assert kera("consume", "kept", "--from", "earliest", "--until-end", *at) == "before\nafter\n"
    backups = json.loads(kera("cluster", "describe", "--json", *at))["backups"]
    assert [backup["backup_id"] for backup in backups] == [1, 2]


# --- kera dev: crashes -------------------------------------------------------------------------------------


def test_children_end_when_the_supervisor_is_killed(start_dev: StartDev, around: Surroundings) -> None:
    dev = start_dev("--brokers", "2")
    dev.read_welcome()
    pids = dev.children().values()

    dev.end(signal.SIGKILL)

    wait_until(lambda: not any(exists(pid) for pid in pids), "the children are gone")
    assert list(around.shm.iterdir()) == [], "they stopped cleanly"


@pytest.mark.slow
def test_starting_children_end_when_the_supervisor_is_killed(start_dev: StartDev) -> None:
    dev = start_dev()
    wait_until(lambda: bool(dev.children()), "the coordinator is being started")
    pids = dev.children().values()

    dev.end(signal.SIGKILL)

    wait_until(lambda: not any(exists(pid) for pid in pids), "the children are gone")


@pytest.mark.slow
@pytest.mark.parametrize("ephemeral", [True, False])
def test_the_start_after_a_crash_takes_over_or_removes_the_remains(
    start_dev: StartDev, around: Surroundings, tmp_path: Path, ephemeral: bool
) -> None:
    flags = [] if ephemeral else ["--data-dir", str(tmp_path / "data")]
    crashed = start_dev("--brokers", "2", *flags)
    crashed.read_welcome()
    pids = [crashed.process.pid, *crashed.children().values()]
    crashed.process.send_signal(signal.SIGSTOP)  # it must not see its children die
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(exists(pid) for pid in pids), "all are gone")
    left = set(around.left())
    assert len(left) == 2 + ephemeral, "two arenas, and a temporary directory"

    dev = start_dev("--brokers", "2", *flags)
    dev.read_welcome()

    if ephemeral:
        assert left.isdisjoint(around.left())
    else:
        assert left == set(around.left()), "the memory of brokers that keep what they have"
    assert dev.end() == (0, "")
    assert around.left() == []


# --- LocalCluster ------------------------------------------------------------------------------------------


@pytest.fixture
def in_surroundings(around: Surroundings, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    """A `LocalCluster` of this process also leaves its traces there."""
    for name in ("KERA_BROKER_SHM_DIR", "TMPDIR"):
        monkeypatch.setenv(name, around.environment[name])
    monkeypatch.setattr("tempfile.tempdir", None)
    return around


SMALL: dict[str, Any] = {"arena_bytes": 16 << 20, "segment_bytes": 1 << 20}


async def test_a_local_cluster_serves_and_leaves_nothing_behind(in_surroundings: Surroundings, tmp_path: Path) -> None:
    logs, env = tmp_path / "logs", {"KERA_BROKER_METRICS_PORT": "0"}
    async with LocalCluster(brokers=2, env=env, log_dir=logs, **SMALL) as cluster:
        assert list(cluster.processes) == ["coordinator", "broker-1", "broker-2"]
        served = sorted(name for name, ready in cluster.ready.items() if "metrics_address" in ready)
        assert served == ["broker-1", "broker-2"]
        assert [cluster.ready[f"broker-{n}"]["broker_id"] for n in (1, 2)] == [1, 2]
        async with await Client.connect(cluster.bootstrap) as client:
            brokers = (await client.admin.describe_cluster()).brokers
            assert [(broker.broker_id, broker.alive) for broker in brokers] == [(1, True), (2, True)]
            assert {broker.arena_bytes for broker in brokers} == {16 << 20}
        assert await cluster.stop() == []
        assert cluster.processes == {}
        assert in_surroundings.left() == []
    assert sorted(path.name for path in logs.iterdir()) == ["broker-1.log", "broker-2.log", "coordinator.log"]


async def test_a_child_killed_on_purpose_is_not_reported_and_can_be_restarted(in_surroundings: Surroundings) -> None:
    async with LocalCluster(brokers=2, **SMALL) as cluster:
        death = asyncio.create_task(cluster.wait())
        bootstrap = cluster.bootstrap
        for name in ("broker-2", "coordinator"):
            pid = cluster.processes[name]
            await cluster.kill(name)
            assert name not in cluster.processes
            await cluster.restart(name)
            assert cluster.processes[name] != pid
        await cluster.restart("broker-1")
        assert cluster.bootstrap == bootstrap
        assert cluster.ready["broker-2"]["broker_id"] == 2
        assert not death.done()

        os.kill(cluster.processes["broker-1"], signal.SIGKILL)

        assert (await asyncio.wait_for(death, BOUND_S)).name == "broker-1"
        with pytest.raises(InvalidArgument, match="no child is called broker-3; there are: coordinator, broker-1"):
            await cluster.kill("broker-3")
    assert in_surroundings.left() == []


@pytest.mark.slow
@pytest.mark.usefixtures("in_surroundings")
async def test_a_record_waits_for_backups_until_its_delivery_timeout() -> None:
    async with (
        LocalCluster(backups=1, replication=1, backup_memory_bytes=16 << 20, **SMALL) as cluster,
        await Client.connect(cluster.bootstrap) as client,
    ):
        await client.admin.create_stream("s")
        producer = client.producer(delivery_timeout_ms=1000)
        await producer.prepare("s")
        assert (await producer.send("s", b"a")).backups == (1,)
        await cluster.kill("backup-1")
        with contextlib.suppress(TooFewBackups, Uncertain):  # it may be under way before the broker knows
            await producer.send("s", b"b")

        with pytest.raises((TooFewBackups, NotReplicated), match="backup"):
            await producer.send("s", b"b")
        await producer.close(flush=False)

        async with client.producer() as patient:
            await patient.prepare("s")
            waiting = patient.send("s", b"c")
            await cluster.restart("backup-1")
            assert (await waiting).backups == (1,)


async def test_a_local_cluster_without_a_broker_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one broker"):
        LocalCluster(brokers=0)


@pytest.mark.slow
def test_a_local_cluster_works_in_synchronous_code(in_surroundings: Surroundings) -> None:
    with LocalCluster.running(brokers=1, **SMALL) as cluster:
        kera("stream", "create", "s", "--bootstrap", cluster.bootstrap)
        cluster.kill("broker-1")
        assert list(cluster.processes) == ["coordinator"]
        cluster.restart("broker-1")
        assert list(cluster.processes) == ["coordinator", "broker-1"]
        assert (cluster.log_dir / "broker-1.log").exists()
    assert in_surroundings.left() == []
