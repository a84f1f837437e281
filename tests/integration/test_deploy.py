"""The content of deploy/: units, settings and script of hosts, alerts and dashboards; and the runbooks that use
them.
"""

from __future__ import annotations

import asyncio
import fcntl
import fnmatch
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from kera.backup.settings import BackupSettings
from kera.broker.settings import BrokerSettings
from kera.cli.check._options import Options
from kera.client import Client
from kera.coordinator.settings import CoordinatorSettings
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from kera.core.base.settings import MIB
from kera.core.security.issuing import Authority
from kera.local.cluster import LocalCluster
from tests.chaos.checked import LOAD_S_MAX, under_check

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
RULES = DEPLOY / "prometheus" / "kera.rules.yml"
RUNBOOKS = ROOT / "docs" / "runbooks.md"
SECURITY = ROOT / "docs" / "security.md"
EXPOSURE_MAX = 20
"""Up to this exposure, of 100, systemd-analyze says "OK"."""
HEADROOM_GIB = 2
TIMEOUT_S = 60.0
BOOTSTRAP = "127.77.0.1:7400"
HOSTS_MAX = 5
HOSTS_S = 1500
"""For a test with hosts, which three others may precede."""
SMALL = {
    "KERA_BROKER_ARENA_BYTES": "64MiB",
    "KERA_BACKUP_MEMORY_BYTES": "64MiB",
    "KERA_COORDINATOR_MOVE_REST_MS": "3000",
}


def run(*command: str | Path, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    """The output of a command, run in a folder; fails with that output if the command fails."""
    done = subprocess.run(
        command,
        env=os.environ | (environment or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def needs(program: str) -> str:
    """The path of a program of this machine; skips the test without it."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


def settings_of(unit: Path) -> dict[str, str]:
    """The settings of a unit; the last value of each."""
    lines = [line.partition("=") for line in unit.read_text().splitlines() if "=" in line and line[:1] != "#"]
    return {name: value for name, _, value in lines}


def environment_of(unit: Path) -> dict[str, str]:
    """The environment that a unit sets for its daemon."""
    found = re.findall(r"^Environment=(\w+)=(.*)$", unit.read_text(), re.MULTILINE)
    return dict(found)


# -- units ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_valid_and_restricts_its_daemon(unit: Path, tmp_path: Path) -> None:
    analyze = needs("systemd-analyze")
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace("/opt/kera/bin/kera", "/usr/bin/env"))

    assert run(analyze, "verify", "--man=no", here).strip() == ""
    run(analyze, "security", "--offline=yes", "--no-pager", f"--threshold={EXPOSURE_MAX}", unit)


@pytest.mark.parametrize(("name", "variable"), [("broker", "ARENA_BYTES"), ("backup", "MEMORY_BYTES")])
def test_the_memory_limit_of_a_unit_is_that_of_its_daemon_plus_two_gib(name: str, variable: str) -> None:
    unit = DEPLOY / "systemd" / f"kera-{name}.service"
    taken = environment_of(unit)[f"KERA_{name.upper()}_{variable}"]
    most = settings_of(unit)["MemoryMax"]

    assert int(most.removesuffix("G")) == int(taken.removesuffix("GiB")) + HEADROOM_GIB


def test_a_units_stop_timeout_exceeds_the_time_of_a_stop() -> None:
    for name, least_s in (("broker", 48), ("backup", 48), ("coordinator", 8)):
        unit = settings_of(DEPLOY / "systemd" / f"kera-{name}.service")
        assert int(unit["TimeoutStopSec"].removesuffix("s")) > least_s


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_package_contains_the_documentation_that_a_unit_names(unit: Path) -> None:
    server = ROOT / "distributions" / "server"
    project = tomllib.loads((server / "pyproject.toml").read_text())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    there = {f"file:/opt/kera/{place}" for source, place in shipped.items() if (server / source).is_file()}

    assert there.issuperset(settings_of(unit)["Documentation"].split())


# -- the script of hosts ----------------------------------------------------------------------------------------


class Host:
    """A directory and an address that stand for a host; its daemons run as their units say."""

    def __init__(self, root: Path, address: str) -> None:
        self.root = root
        self.address = address
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def install(self, arguments: list[str]) -> None:
        """Run the script, and start the installed daemons, as systemd would."""
        program = Path(sys.executable).with_name("kera")
        at = arguments.index("--wheel")
        arguments = [*arguments[:at], "--program", str(program), *arguments[at + 2 :]]
        run(DEPLOY / "hosts" / "install.sh", "--root", self.root, *arguments)
        if "--no-start" not in arguments:
            self.start(*(each for each in ("coordinator", "broker", "backup") if each in arguments))

    def start(self, *names: str) -> None:
        """Start daemons as their units say."""
        for name in names:
            unit = self.root / "etc/systemd/system" / f"kera-{name}.service"
            program = str(Path(sys.executable).with_name("kera"))
            command = settings_of(unit)["ExecStart"].replace("/opt/kera/bin/kera", program)
            command = command.replace("/etc/kera", str(self.root / "etc/kera"))
            own = {
                key: value.replace("/var/lib", f"{self.root}/var/lib") for key, value in environment_of(unit).items()
            }
            files = {"TLS_CA": "ca.pem", "TLS_CERT": "host.pem", "TLS_KEY": "host-key.pem"}
            if (self.root / "etc/kera/cluster-secret").exists():
                files["CLUSTER_SECRET_FILE"] = "cluster-secret"
            for setting, file in files.items():
                own[f"KERA_{name.upper()}_{setting}"] = str(self.root / "etc/kera" / file)
            log = (self.root / f"{name}.log").open("wb")
            with log:
                self.processes[name] = subprocess.Popen(
                    shlex.split(command),
                    env=os.environ | own | SMALL | {DIE_WITH_PARENT_VARIABLE: "1"},
                    stdout=log,
                    stderr=log,
                )
            until(lambda name=name: b'"ready"' in (self.root / f"{name}.log").read_bytes())  # type: ignore[misc]

    def dies(self) -> None:
        """Kill all daemons at once, and delete the disks."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()
        shutil.rmtree(self.root)

    def stop(self, *names: str) -> None:
        """Stop some of the daemons, or all, as in a shutdown."""
        for name in sorted(names or self.processes, key=lambda each: "coord" in each):
            process = self.processes.pop(name)
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def commands_of(section: str, page: Path = RUNBOOKS) -> Iterator[str]:
    """The commands of a section of the runbooks, line by line."""
    text = page.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        yield from block.strip().splitlines()


class Hosts:
    """Carries out the runbooks: addresses in 10.0.0 become addresses of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        programs = [f"{folder}/host-{number}/usr/local/bin" for number in range(1, HOSTS_MAX + 1)]
        self._environment = {"PATH": os.pathsep.join([*programs, str(Path(sys.executable).parent), os.environ["PATH"]])}
        self.by_number: dict[int, Host] = {}
        self._here: Host
        """The host on which the script has run last."""

    def carry_out(self, line: str) -> str:
        """Run one command; returns its output."""
        line = re.sub(r"10\.0\.0\.(\d)", lambda found: f"127.77.0.{found[1]}", line)
        line = re.sub(r"(?<=[ =])(certificates|cluster-secret|[a-z]+-password)\b", rf"{self._folder}/\1", line)
        if line.startswith("export "):
            for each in line.removeprefix("export ").split():
                name, _, value = each.partition("=")
                self._environment[name] = value
            return ""
        if line.startswith("sudo deploy/hosts/install.sh "):
            arguments = shlex.split(line)[2:]
            address = arguments[arguments.index("--address") + 1]
            number = int(address.rpartition(".")[2])
            self._here = self.by_number.setdefault(number, Host(self._folder / f"host-{number}", address))
            self._here.install(arguments)
            return ""
        if starts := re.match(r"sudo systemctl start kera-(\w+)$", line):
            self._here.start(starts[1])
            return ""
        if stops := re.match(r"ssh 127\.77\.0\.(\d) sudo systemctl disable --now (.+)$", line):
            self.by_number[int(stops[1])].stop(*(unit.removeprefix("kera-") for unit in stops[2].split()))
            return ""
        line = line.removeprefix("sudo -u kera ").replace("/backups", str(self._folder))
        if "/var/lib/kera" in line:
            line = line.replace("/var/lib/kera", f"{self._here.root}/var/lib/kera")
        return run("sh", "-c", line, environment=self._environment, folder=self._folder)

    def running(self) -> list[Host]:
        """Hosts with daemons."""
        return [host for host in self.by_number.values() if host.processes]

    def health(self) -> int:
        """The exit code of `kera cluster health`."""
        command = ["kera", "cluster", "health"]
        return subprocess.run(
            command, env=os.environ | self._environment, capture_output=True, timeout=TIMEOUT_S, check=False
        ).returncode


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """No hosts yet. Only one test at a time has their addresses, across all checkouts."""
    with (Path(tempfile.gettempdir()) / "kera-test-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        until(lambda: not any(_taken(7400 + offset) for offset in range(5)))  # a real cluster never gives them up
        hosts = Hosts(tmp_path)
        try:
            yield hosts
        finally:
            for host in sorted(hosts.by_number.values(), key=lambda each: "coordinator" in each.processes):
                host.stop()


@pytest.mark.slow
@pytest.mark.timeout(HOSTS_S)
def test_the_runbook_sets_up_three_hosts_and_replaces_a_lost_one(hosts: Hosts) -> None:
    said = {line: hosts.carry_out(line) for line in commands_of("From three machines to a cluster")}
    assert said["kera cluster health"].startswith("healthy")
    assert "hello" in said["kera consume orders --until-end"]

    hosts.carry_out("seq 10000 | kera produce orders")
    hosts.by_number.pop(3).dies()
    until(lambda: hosts.health() != 0)
    first, *rest = commands_of("A host is gone")
    assert first == "kera cluster health"  # it says that the cluster is not healthy
    until(lambda: _is_over(hosts.carry_out("kera cluster recoveries --json"), 3))
    for line in rest:
        hosts.carry_out(line)
    until(lambda: hosts.health() == 0)
    records = hosts.carry_out("kera consume orders --until-end").splitlines()
    assert len([line for line in records if line]) >= 10_001
    until(lambda: "127.77.0.4" in hosts.carry_out("kera cluster describe"))


@pytest.mark.slow
@pytest.mark.timeout(HOSTS_S)
def test_the_runbook_sets_up_a_secured_cluster_and_its_users(hosts: Hosts) -> None:
    needs("openssl")
    lines = list(commands_of("From nothing to a secured cluster", SECURITY))
    assert len(lines) == 10
    said = {line: hosts.carry_out(line) for line in lines}
    assert said["kera cluster health"].startswith("healthy")
    assert "everybody has to authenticate, and may do what rules allow" in said["kera cluster health"]
    for line in commands_of("Users and rights", SECURITY):
        said[line] = hosts.carry_out(line)
    assert any("may read, write stream:orders" in text for text in said.values())
    assert any("hello" in text for text in said.values())


@pytest.mark.slow
@pytest.mark.timeout(HOSTS_S)
def test_the_runbook_replaces_the_host_of_the_coordinator(hosts: Hosts) -> None:
    for line in commands_of("From three machines to a cluster"):
        hosts.carry_out(line)
    lines = iter(list(commands_of("The host of the coordinator is gone")))
    hosts.carry_out(next(lines))
    hosts.carry_out("seq 10000 | kera produce orders")
    hosts.by_number.pop(1).dies()

    for line in lines:
        if line == "kera cluster health":  # the cluster is not healthy yet
            hosts.health()
            continue
        hosts.carry_out(line)
        if line == "kera cluster recoveries":  # after the minute that the coordinator waits for the lost broker
            until(lambda: _is_over(hosts.carry_out("kera cluster recoveries --json"), 1), 2 * TIMEOUT_S)
    until(lambda: hosts.health() == 0)
    records = hosts.carry_out("kera consume orders --until-end").splitlines()
    assert len(set(records)) == 10_001


@pytest.mark.slow
@pytest.mark.timeout(HOSTS_S)
async def test_the_runbook_grows_a_cluster_to_five_hosts_and_shrinks_it_under_load(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting, file in (("CA", "ca.pem"), ("CERT", "admin.pem"), ("KEY", "admin-key.pem")):
        monkeypatch.setenv(f"KERA_CLIENT_TLS_{setting}", str(tmp_path / "certificates" / file))
    lines = iter(list(commands_of("Growing and shrinking")))

    async def upto(command: str) -> None:
        for line in lines:
            await asyncio.to_thread(hosts.carry_out, line)
            if line == command:
                return

    async def owners() -> Counter[int]:
        async with await Client.connect(BOOTSTRAP) as client:
            streams = await client.admin.list_streams()
            return Counter(one.broker_id for stream in streams for one in stream.assignments.values())

    await upto("seq 1000 | kera produce orders")
    options = Options(LOAD_S_MAX, replication=1, streamlets=8, rate=300.0, seed=1)
    async with under_check(BOOTSTRAP, options) as load:
        await load.goes_on()
        assert set(await owners()) == {1}
        for brokers in (3, 5):
            await upto("kera cluster rebalance")
            while set(await owners()) != set(range(1, brokers + 1)):  # a streamlet rests for a while after a move
                await load.goes_on()
                await asyncio.to_thread(hosts.carry_out, "kera cluster rebalance")
        await upto("kera cluster health")
        await load.goes_on()
        assert set(await owners()) == {1, 2, 3}
        assert len(hosts.running()) == 3
    assert load.outcome.verdict == "kept"
    records = await asyncio.to_thread(hosts.carry_out, "kera consume orders --until-end")
    assert len(records.splitlines()) >= 1000


def _is_over(recoveries: str, broker_id: int) -> bool:
    return f'"broker_id": {broker_id}' in recoveries and not re.search(r'"phase": "(?!done)', recoveries)


def _taken(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.77.0.1", port))
        except OSError:
            return True
        return False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "which daemons?"),
        ("broker", "--address is missing"),
        ("broker --address 10.0.0.1", "--coordinator is missing"),
        ("broker --address 10.0.0.1 --coordinator 10.0.0.1", "needs a port"),
        ("broker --address 0.0.0.0 --coordinator 10.0.0.1:7400 --wheel kera==0.1.0", "address of this host"),
        ("broker --address 10.0.0.1 --coordinator 10.0.0.1:7400", "--wheel is missing"),
        ("broker --address 10.0.0.1 --coordinator 10.0.0.1:7400 --program kera", "--program is for --root"),
        ("server --address 10.0.0.1", "unknown: server"),
        ("broker --address", "--address needs a value"),
        ("broker --address 'a|b'", "no quotes"),
        ("broker --address 'a b' --coordinator 10.0.0.1:7400", "one name or IP address: a b"),
        ("broker --address 10.0.0.1 --coordinator h:abc", "no port: 'abc' in h:abc"),
        ("broker --address 10.0.0.1 --coordinator 10.0.0.1:", "no port: '' in 10.0.0.1:"),
        ("broker --address 10.0.0.1 --coordinator h:07400", "no port: '07400'"),
        ("broker --address 10.0.0.1 --coordinator h:65536", "ports end at 65535: h:65536"),
        ("broker --address 10.0.0.1 --coordinator :7400", "needs a host before the port: :7400"),
        ("broker --address 10.0.0.1 --coordinator http://h:7400", "host:port, separated by commas"),
        ("broker --address 10.0.0.1 --coordinator h:7400,h", "needs a port: h:7400?"),
        ("broker --address 10.0.0.1 --coordinator ,", "has no address"),
        ("broker --address 10.0.0.1 --coordinator 10.0.0.1:7401", "port 7401 is one of those"),
        ("coordinator --address 10.0.0.1 --coordinator kera:9402", "in place of 10.0.0.1:9402"),
        ("broker --address 10.0.0.1 --coordinator 10.0.0.1:7400,10.0.0.1:7500", "this host twice"),
        ("coordinator --address 10.0.0.1 --coordinator a:7400,b:7500", "add 10.0.0.1:PORT, this host's"),
        ("broker --address 10.0.0.1 --coordinator h:7400 --wheel kera-*.whl", "there is no file kera-*.whl"),
        ("broker --address 10.0.0.1 --coordinator h:7400 --wheel {here}/kera.whl", "the name with which it was built"),
        ("broker --address 10.0.0.1 --coordinator h:7400 --wheel kera>=0.1", "an exact version such as kera==0.1.0"),
        ("broker --address 10.0.0.1 --coordinator h:7400 --wheel kera==1 --extras server,,x", "separated by commas"),
        ("broker --address 10.0.0.1 --coordinator h:7400 --wheel kera==1 --extras kafka", "--extras server,kafka"),
        ("broker --address 10.0.0.1 --coordinator h:7400 --wheel kera==0.1.0", "who may connect? --certificates DIR"),
        (
            "broker --address 10.0.0.1 --coordinator h:7400 --wheel kera==0.1.0 --certificates {here}",
            "/ca.pem (kera tls init",
        ),
        (
            "broker --address 10.0.0.1 --coordinator h:7400 --wheel kera==0.1.0 --certificates x --insecure",
            "one of the two",
        ),
        (
            "broker --address 10.0.0.1 --coordinator h:7400 --wheel kera==0.1.0 --cluster-secret x",
            "needs --certificates",
        ),
        (
            "broker --address 10.0.0.1 --coordinator h:7400 --wheel kera==0.1.0 --certificates x --cluster-secret x",
            "there is no file x (openssl rand -base64 32 >x)",
        ),
        (
            "broker --address h --coordinator h:7400 --wheel kera==1 --certificates x --cluster-secret {here}/short",
            "16 characters at least",
        ),
        (
            "broker --address h --coordinator h:7400 --wheel kera==1 --certificates x --cluster-secret {here}/empty",
            "16 characters at least",
        ),
    ],
)
def test_the_install_script_reports_wrong_arguments_and_changes_nothing(
    arguments: str, says: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = tmp_path_factory.mktemp("wheels")
    (here / "kera.whl").touch()
    (here / "short").write_text("short\n")
    (here / "empty").touch()
    command: list[str | Path] = [DEPLOY / "hosts" / "install.sh", *shlex.split(arguments.format(here=here))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("address", "coordinators", "port"),
    [
        ("10.0.0.2", "10.0.0.1:7400,10.0.0.2:7500", 7500),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("10.0.0.1", "10.0.0.1:7500", 7500),
                ("10.0.0.1", "10.0.0.1:7400,10.0.0.2:7500", 7400),
                ("10.0.0.1", "kera:7500", 7500),
                ("10.0.0.1", "kera-a:7500, kera-b:7500", 7500),
            )
        ),
    ],
)
def test_the_coordinators_port_is_that_of_this_hosts_address(
    address: str, coordinators: str, port: int, tmp_path: Path
) -> None:
    program = Path(sys.executable).with_name("kera")
    command: list[str | Path] = [DEPLOY / "hosts" / "install.sh", "--root", tmp_path, "--program", program]
    run(*command, "--insecure", "--address", address, "--coordinator", coordinators, "coordinator", "broker")

    made = tomllib.loads((tmp_path / "etc/kera/kera.toml").read_text())
    assert made["coordinator"]["port"] == port
    assert made["broker"]["coordinator"] == coordinators


def test_the_script_links_kera_into_the_path_unless_another_program_is_there(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("kera")
    command: list[str | Path] = [DEPLOY / "hosts" / "install.sh", "--root", tmp_path, "--program", program]
    command += ["--insecure", "--address", "10.0.0.7", "--coordinator", "10.0.0.7:7400", "broker"]
    link = tmp_path / "usr/local/bin/kera"

    for _ in range(2):
        assert "something else" not in run(*command)
        assert link.resolve() == program.resolve()
    link.unlink()
    link.write_text("mine")
    assert f"{link} is something else, and stays" in run(*command)
    assert link.read_text() == "mine"


def test_the_script_installs_certificates_and_replaces_them_with_new_ones(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path / "made")
    command: list[str | Path] = [DEPLOY / "hosts" / "install.sh", "--root", tmp_path / "root"]
    command += ["--program", Path(sys.executable).with_name("kera"), "--certificates", tmp_path / "made"]
    command += ["--address", "10.0.0.7", "--coordinator", "10.0.0.7:7400", "coordinator", "broker", "backup"]
    folder = tmp_path / "root/etc/kera"
    for _ in range(2):
        one = authority.issue("10.0.0.7")
        run(*command)

        assert (folder / "host.pem").read_bytes() == one.cert.read_bytes()
        assert (folder / "host-key.pem").read_bytes() == one.key.read_bytes()
        assert stat.S_IMODE((folder / "host-key.pem").stat().st_mode) == 0o640
        assert not (folder / "ca-key.pem").exists()
    for section in tomllib.loads((folder / "kera.toml").read_text()).values():
        named = {Path(section[name]) for name in ("tls_ca", "tls_cert", "tls_key")}
        assert named == {Path("/etc/kera") / name for name in ("ca.pem", "host.pem", "host-key.pem")}
        assert section["tls_client_auth"] == "required"
        assert "insecure" not in section


def test_the_script_installs_the_cluster_secret_with_restricted_permissions(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path / "made")
    authority.issue("10.0.0.7")
    secret = tmp_path / "secret"
    command: list[str | Path] = [DEPLOY / "hosts" / "install.sh", "--root", tmp_path / "root"]
    command += ["--program", Path(sys.executable).with_name("kera"), "--certificates", tmp_path / "made"]
    command += ["--cluster-secret", secret, "--address", "10.0.0.7", "--coordinator", "10.0.0.7:7400", "broker"]
    folder = tmp_path / "root/etc/kera"
    for text in ("a secret of sixteen and more\n", "another one that is long enough\na secret of sixteen and more\n"):
        secret.write_text(text)
        said = run(*command)

        assert "KERA_BROKER_CLUSTER_SECRET_FILE=" in said
        assert (folder / "cluster-secret").read_text() == text
        assert stat.S_IMODE((folder / "cluster-secret").stat().st_mode) == 0o640
    for section in tomllib.loads((folder / "kera.toml").read_text()).values():
        assert section["security"] is True
        assert section["cluster_secret_file"] == "/etc/kera/cluster-secret"
        assert section["tls_client_auth"] == "optional"


def test_the_script_keeps_settings_without_security_and_says_what_they_lack(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path / "made")
    authority.issue("10.0.0.7")
    (tmp_path / "secret").write_text("a secret of sixteen and more\n")
    command: list[str | Path] = [DEPLOY / "hosts" / "install.sh", "--root", tmp_path / "root"]
    command += ["--program", Path(sys.executable).with_name("kera"), "--certificates", tmp_path / "made"]
    command += ["--address", "10.0.0.7", "--coordinator", "10.0.0.7:7400", "broker"]
    run(*command)
    said = run(*command, "--cluster-secret", tmp_path / "secret")

    assert "settings stay as they are" in said
    assert 'set security = true and cluster_secret_file = "/etc/kera/cluster-secret"' in said


def test_an_insecure_installation_sets_no_certificates(tmp_path: Path) -> None:
    command: list[str | Path] = [DEPLOY / "hosts" / "install.sh", "--root", tmp_path, "--insecure"]
    command += ["--program", Path(sys.executable).with_name("kera")]
    run(*command, "--address", "10.0.0.7", "--coordinator", "10.0.0.7:7400", "broker")
    for section in tomllib.loads((tmp_path / "etc/kera/kera.toml").read_text()).values():
        assert section["insecure"] is True
        assert not [name for name in section if name.startswith("tls_")]


def test_the_script_keeps_existing_settings(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("kera")
    command: list[str | Path] = [DEPLOY / "hosts" / "install.sh", "--root", tmp_path, "--program", program]
    command += ["--insecure", "--address", "10.0.0.7"]
    command += ["--coordinator", "10.0.0.1:7500,10.0.0.2:7500", "broker"]
    run(*command, "--zookeeper", "10.0.0.9:2181")
    settings = tmp_path / "etc/kera/kera.toml"
    made = tomllib.loads(settings.read_text())
    settings.write_text(settings.read_text() + "# mine\n")

    assert "stay" in run(*command)
    assert settings.read_text().endswith("# mine\n")
    assert made["coordinator"]["zookeeper"] == "10.0.0.9:2181"
    assert made["coordinator"]["port"] == 7500
    assert made["broker"]["coordinator"] == made["backup"]["coordinator"] == "10.0.0.1:7500,10.0.0.2:7500"
    assert {each["host"] for each in made.values()} == {"10.0.0.7"}


def test_the_wheel_names_in_the_runbooks_match_the_built_wheels() -> None:
    """pip looks at the name of a wheel, and accepts no other."""
    named = re.findall(r"--wheel (\S+)", RUNBOOKS.read_text())
    built = ("kera-0.1.0-py3-none-any.whl", "kera-0.1.0-cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl")

    assert len(named) > 5
    assert all(fnmatch.fnmatch(wheel, pattern) for pattern in named for wheel in built)


# -- settings ---------------------------------------------------------------------------------------------------


def test_all_settings_in_deploy_exist() -> None:
    daemons: dict[str, type[BaseModel]] = {
        "COORDINATOR": CoordinatorSettings,
        "BROKER": BrokerSettings,
        "BACKUP": BackupSettings,
    }
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix not in {".md", ".json", ".pyc"}]
    given = {
        found
        for path in files
        for found in re.findall(r"\bKERA_(COORDINATOR|BROKER|BACKUP)_([A-Z_]+)\b", path.read_text())
    }

    assert len(given) > 10
    for daemon, name in given - {("COORDINATOR", "DATA_DIR")}:
        assert name.lower() in daemons[daemon].model_fields, name
    for daemon, settings in tomllib.loads((DEPLOY / "systemd" / "kera.toml").read_text()).items():
        assert settings.keys() <= daemons[daemon.upper()].model_fields.keys()


def test_the_default_replication_on_hosts_and_in_the_chart_is_two() -> None:
    hosts = tomllib.loads((DEPLOY / "systemd" / "kera.toml").read_text())
    assert hosts["coordinator"]["default_replication"] == 2
    assert "settings: {default_replication: 2}" in (CHART / "values.yaml").read_text()


# -- the chart --------------------------------------------------------------------------------------------------

CHART = DEPLOY / "helm" / "kera"
KUBERNETES = ("--kube-version", "1.33.0")
"""A helm that was built from its sources assumes an older Kubernetes."""


def rendered(*arguments: str) -> str:
    """The output of the chart."""
    return run(needs("helm"), "template", "test", CHART, "--namespace", "n", *KUBERNETES, *arguments)


def test_helm_lint_accepts_the_chart() -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in run(needs("helm"), "lint", "--strict", CHART)


def test_the_chart_sets_memory_replicas_and_settings_of_daemons() -> None:
    made = rendered(
        "--set", "broker.arena=512Mi,broker.headroom=1Gi,backup.settings.flush_delay_ms=5,broker.replicas=5"
    )

    assert re.findall(r"^kind: (\w+)$", made, re.MULTILINE).count("StatefulSet") == 3
    assert "replicas: 5" in made
    assert 'memory: "1610612736"' in made  # the arena and the rest
    assert "sizeLimit: 512Mi" in made
    for name, value in (
        ("KERA_BROKER_ARENA_BYTES", "536870912"),
        ("KERA_BACKUP_MEMORY_BYTES", "1073741824"),
        ("KERA_BACKUP_FLUSH_DELAY_MS", "5"),
        ("KERA_BROKER_COORDINATOR", "test-coordinator-0.test-coordinator.n.svc.cluster.local:7400"),
        ("KERA_BROKER_ADVERTISED_ADDRESS", "$(POD).test-broker.n.svc.cluster.local"),
    ):
        assert re.search(rf'name: {name}\n +value: "{re.escape(value)}"', made), name


def test_the_chart_can_share_memory_and_run_several_coordinators() -> None:
    made = rendered(
        "--set", "broker.shareMemory.enabled=true,coordinator.replicas=2,zookeeper=zk:2181,antiAffinity=required"
    )

    assert "hostPath: {path: /dev/shm/kera, type: Directory}" in made
    assert "test-coordinator-1.test-coordinator.n.svc.cluster.local:7400" in made
    assert "requiredDuringSchedulingIgnoredDuringExecution" in made
    assert re.search(r'name: KERA_COORDINATOR_ZOOKEEPER\n +value: "zk:2181"', made)


def test_the_chart_can_turn_security_on() -> None:
    """The secret comes from a Secret, which others in the pod cannot read."""
    given = "security.enabled=true,security.secretName=of-the-cluster,security.superUsers={user:admin,role:boss}"
    for tls in ("", ",tls.secretName=certificates"):
        made = rendered("--set", given + tls)

        for kind in ("COORDINATOR", "BROKER", "BACKUP"):
            for name, value in (
                ("SECURITY", '"true"'),
                ("CLUSTER_SECRET_FILE", "/etc/kera/secret/cluster-secret"),
                ("SUPER_USERS", r'"[\"user:admin\",\"role:boss\"]"'),
            ):
                assert f"name: KERA_{kind}_{name}\n              value: {value}\n" in made, name
            assert f"name: KERA_{kind}_{'TLS_CLIENT_AUTH' if tls else 'INSECURE'}" in made
        assert made.count("secret: {secretName: of-the-cluster, defaultMode: 0440}") == 3
        assert made.count("- {name: secret, mountPath: /etc/kera/secret, readOnly: true}") == 3
        assert "value: required" not in made  # clients have passwords, and need no certificate
    assert "SECURITY" not in rendered()


def objects_of(made: str) -> dict[tuple[str, str], Any]:
    """The objects that the chart makes, by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(made) if each}


def test_the_chart_runs_following_copies_with_their_settings_and_secrets() -> None:
    copy: dict[str, Any] = {"name": "clicks", "source": "kafka://k:9092/clicks", "target": "kera:clicks"}
    copy |= {"args": ["--create"], "secret": "login", "filesSecret": "files", "nodeSelector": {"disk": "ssd"}}
    made = objects_of(rendered("--set-json", f"connect={json.dumps([copy])}", "--set", "tls.secretName=certificates"))

    pod = made["Deployment", "test-connect-clicks"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == [
        *("connect", "copy", "kafka://k:9092/clicks", "kera:clicks"),
        *("--follow", "--name", "clicks", "--create"),
    ]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["KERA_BOOTSTRAP"] == "test-coordinator-0.test-coordinator.n.svc.cluster.local:7400"
    assert environment["KERA_CLIENT_TLS_CERT"] == "/etc/kera/tls/tls.crt"
    assert container["envFrom"] == [{"secretRef": {"name": "login"}}]
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/tmp", "/etc/kera/tls", "/etc/kera/copy"}
    assert pod["nodeSelector"] == {"disk": "ssd"}


def test_the_chart_places_pods_and_limits_network_access() -> None:
    affinity: dict[str, Any] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    made = objects_of(
        rendered(
            "--set-json",
            f"broker={json.dumps({'tolerations': [{'operator': 'Exists'}], 'nodeSelector': {'disk': 'ssd'}})}",
            "--set-json",
            f"backup={json.dumps({'affinity': affinity, 'priorityClassName': 'high'})}",
            "--set-json",
            'networkPolicy={"enabled":true,"metrics":[{"ipBlock":{"cidr":"10.0.0.9/32"}}]}',
            "--set",
            "serviceAccount.annotations.role=reader,metrics.podMonitor.enabled=true",
        )
    )
    broker, backup = (made["StatefulSet", f"test-{kind}"]["spec"]["template"]["spec"] for kind in ("broker", "backup"))

    assert (broker["tolerations"], broker["nodeSelector"]) == ([{"operator": "Exists"}], {"disk": "ssd"})
    assert list(broker["affinity"]) == ["podAntiAffinity"]
    assert (backup["affinity"], backup["priorityClassName"]) == (affinity, "high")
    assert made["ServiceAccount", "test"]["metadata"]["annotations"] == {"role": "reader"}
    assert broker["serviceAccountName"] == "test"
    _, clients, metrics = made["NetworkPolicy", "test-ingress"]["spec"]["ingress"]
    assert {each["port"] for each in clients["ports"]} == {7400, 7401, 7402}
    assert metrics["from"] == [{"ipBlock": {"cidr": "10.0.0.9/32"}}]
    assert [each["port"] for each in metrics["ports"]] == [9400]
    monitors = [each["spec"]["podMetricsEndpoints"] for (kind, _), each in made.items() if kind == "PodMonitor"]
    assert sorted(len(each) for each in monitors) == [1, 2, 2]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("broker.replicaz=3", "additional properties 'replicaz' not allowed"),
        ("connect[0].name=a,connect[0].source=kera:a", "missing property 'target'"),
        ("coordinator.replicas=2", "several coordinators need a zookeeper"),
        ("security.enabled=true", "security.enabled needs security.secretName"),
        ("broker.arena=2GB", "give memory in Mi or Gi"),
    ],
)
def test_the_chart_rejects_wrong_values_with_the_reason(values: str, says: str) -> None:
    command = [needs("helm"), "template", "test", str(CHART), *KUBERNETES, "--set", values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode != 0
    assert says in done.stderr


# -- docker compose ---------------------------------------------------------------------------------------------


def test_compose_can_run_a_copy() -> None:
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    copy = services["connect"]

    assert copy["profiles"] == ["connect"]
    assert copy["command"][:2] == ["connect", "copy"]
    assert "--follow" in copy["command"]
    assert copy["restart"] == "always"
    assert copy["healthcheck"] == {"disable": True}  # the image's check asks for a port that copies do not have


def test_compose_secures_each_daemon() -> None:
    plain, secured = ((DEPLOY / "docker" / name).read_text() for name in ("compose.yaml", "compose.security.yaml"))
    services = plain.split("\nservices:\n")[1].split("\nnetworks:\n")[0]
    daemons = re.findall(r"^  ((?:coordinator|broker|backup)-\d):", services, re.MULTILINE)

    assert len(daemons) > 5
    assert re.findall(r"^  (\w+-\d): \*\w+$", secured, re.MULTILINE) == daemons
    for name in daemons:
        kind = name.partition("-")[0]
        assert f"\n  {name}: *{kind}\n" in secured
        block = secured.split(f"x-{kind}: &{kind}\n")[1].split("\n\n")[0]
        assert block == (
            f'  <<: *secret\n  environment:\n    KERA_{kind.upper()}_SECURITY: "true"\n'
            f"    KERA_{kind.upper()}_CLUSTER_SECRET_FILE: /run/secrets/cluster-secret"
        )


# -- alerts and dashboards --------------------------------------------------------------------------------------


def test_promtool_accepts_the_configuration_and_the_tests_of_rules_pass() -> None:
    promtool = needs("promtool")

    run(promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    run(promtool, "check", "config", "--syntax-only", DEPLOY / "docker" / "prometheus.yml")
    run(promtool, "test", "rules", DEPLOY / "prometheus" / "kera.rules.test.yml")


def test_each_alert_names_a_section_of_the_runbooks() -> None:
    rules, runbooks = RULES.read_text(), RUNBOOKS.read_text()
    titles = re.findall(r"^## (.*)$", runbooks, re.MULTILINE)
    sections = {re.sub(r"[^a-z ]", "", title.lower()).replace(" ", "-") for title in titles}
    named = re.findall(r"runbook: docs/runbooks\.md#(\S+)", rules)

    assert len(named) == len(re.findall(r"- alert:", rules)) > 0
    assert set(named) <= sections
    assert all(name in runbooks for name in re.findall(r"- alert: (\w+)", rules))


def dashboards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", DEPLOY / "grafana" / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_matches_its_description() -> None:
    assert (DEPLOY / "grafana" / "kera.json").read_text() == dashboards().text()


async def test_alerts_and_dashboards_use_only_existing_metrics(tmp_path: Path) -> None:
    asked = set(re.findall(r"\bkera_\w+", RULES.read_text() + dashboards().text()))
    served = {"metrics_port": 0}
    cluster = LocalCluster(
        backups=1,
        replication=1,
        data_dir=tmp_path / "data",
        arena_bytes=32 * MIB,
        backup_memory_bytes=32 * MIB,
        segment_bytes=MIB,
        coordinator_settings=served,
        broker_settings=served,
        backup_settings=served,
    )
    async with cluster, await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("s")
        async with client.producer() as producer:
            await producer.prepare("s")
            await producer.send("s", b"a")
        async with client.consumer("s", start="earliest", end="latest", consumer_group="g") as consumer:
            assert [record.value async for record in consumer] == [b"a"]
            await consumer.commit()
        addresses = [each["metrics_address"] for each in cluster.ready.values()]
        often, seldom = [
            set().union(*[await asyncio.to_thread(_names_at, address, path) for address in addresses])
            for path in ("metrics", "metrics/all")
        ]

    assert asked
    assert asked <= often | seldom
    # The configurations keep some of the metrics that are scraped seldom.
    for configuration in ("prometheus", "docker"):
        text = (DEPLOY / configuration / "prometheus.yml").read_text()
        kept = re.findall(r"regex: (\S+)\n\s+action: keep", text)
        assert len(kept) == 2
        assert {name for name in asked - often if not any(re.fullmatch(each, name) for each in kept)} == set()


def _names_at(address: str, path: str) -> set[str]:
    """The names of metrics that have samples, or might have some."""
    with urllib.request.urlopen(f"http://{address}/{path}", timeout=TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return set(re.findall(r"^(?:# HELP )?(\w+)", text, re.MULTILINE))
