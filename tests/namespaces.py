"""Hosts on one machine, for tests: each has its own network, address and host name.

A host is a waiting process in its own namespaces. They have no names, are invisible in the machine's own network, and
vanish with the last process in them. The waiting process ends when the process of the test does, in whatever way.

The kernel, the files, ``/dev/shm`` and the process ids are the machine's. So these hosts are separate for programs that
compare names and addresses, and together for programs that try what they can reach.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

NAMESPACES = ("--net", "--uts", "--mount")
PROGRAMS = ("unshare", "nsenter", "ip", "hostname", "mount")
TRIAL = (
    "ip link add name one type veth peer name two && ip link add name three type bridge"
    " && hostname trial && mount --bind /etc/hosts /etc/hosts"
)
NETWORK = "10.77.0."
"""Only these hosts see this network, so that it cannot collide with others, nor with that of another run."""
END_S = 10.0
"""Time for the processes of a host to end."""
SWITCH = "switch"
"""The bridge between all hosts. It is in the network of the first one, where the machine's firewall has no effect."""


class Host(NamedTuple):
    """A host, which exists as long as the block of `hosts`."""

    name: str
    address: str
    keeper: int
    """Id of the process that keeps the namespaces alive."""
    network: str
    """The network's identity, as the links in ``/proc`` have it."""

    @property
    def enter(self) -> list[str]:
        """The beginning of a command that runs on the host. The started process keeps its id."""
        return ["nsenter", f"--target={self.keeper}", *NAMESPACES, "--"]

    def run(self, *command: str) -> None:
        """Run a command on the host, to its end."""
        subprocess.run([*self.enter, *command], check=True, timeout=30)


def why_not() -> str | None:
    """The reason why this machine cannot have such hosts; None: it can."""
    if os.geteuid() != 0:
        return "only root can make hosts of their own"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"hosts of their own need programs that are not there: {', '.join(missing)}"
    trial = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", TRIAL], capture_output=True, text=True, timeout=30, check=False
    )
    return None if trial.returncode == 0 else f"no permission to make hosts of their own: {trial.stderr.strip()}"


@contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Hosts that reach only each other, by address and by name; at the end, all their processes are killed.

    Stop the processes before: a killed one cannot clean up.
    """
    with ExitStack() as stack, NamedTemporaryFile("w", prefix="kera-hosts-") as table:
        made: list[Host] = []
        for number, name in enumerate(names, start=1):
            made.append(stack.enter_context(host_alone(name, number)))
        table.writelines(f"{host.address} {host.name}\n" for host in made)
        table.write("127.0.0.1 localhost\n")
        table.flush()
        first = made[0]
        first.run("ip", "link", "add", "name", SWITCH, "type", "bridge")
        first.run("ip", "link", "set", SWITCH, "up")
        for number, host in enumerate(made, start=1):
            port = f"port-{number}"
            peer = ["peer", "name", "eth0", "netns", str(host.keeper)]
            first.run("ip", "link", "add", "name", port, "type", "veth", *peer)
            first.run("ip", "link", "set", port, "master", SWITCH, "up")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            host.run("ip", "link", "set", "lo", "up")
            host.run("mount", "--bind", table.name, "/etc/hosts")
        yield made


@contextmanager
def host_alone(name: str, number: int) -> Iterator[Host]:
    """A host without a network card; the caller that makes one gives it its address."""
    # The keeper of the namespaces ends with its standard input, and so with this process.
    keeper = subprocess.Popen(
        ["unshare", *NAMESPACES, "sh", "-c", 'hostname "$0" && echo ready && exec cat', name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"ready\n", f"host {name} could not be made"
        link = Path(f"/proc/{keeper.pid}/ns/net")
        with link.open():  # while it is open, no other network gets its identity
            address, network = f"{NETWORK}{number}", str(link.readlink())
            host = Host(name, address, keeper.pid, network)
            assert host.network != str(Path("/proc/self/ns/net").readlink())
            try:
                yield host
            finally:
                deadline = time.monotonic() + END_S
                while _kill_all(host):
                    assert time.monotonic() < deadline, f"processes on host {name} do not end"
                    time.sleep(0.02)
    finally:
        keeper.communicate()


def _kill_all(host: Host) -> bool:
    """Kill the processes of a host but its keeper; return whether there were any."""
    found = False
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or process.name == str(host.keeper):
            continue
        with suppress(OSError):  # the process has just ended
            if str((process / "ns" / "net").readlink()) == host.network:
                os.kill(int(process.name), signal.SIGKILL)
                found = True
    return found
