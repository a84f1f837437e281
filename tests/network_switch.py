"""A switch in user space between hosts of `tests.namespaces`, with faults that a kernel's own bridge does not have.

Each host's network card is a TAP device whose other end this process has: every frame that a host sends goes through a
`Link`, one for each pair of hosts and direction, that can be cut, lose a part of the frames at random, or delay them.
The hosts get no errors: connections look as if the other end were silent. The switch needs neither netem nor nft,
which kernels of small machines lack.

    with hosts_on_a_switch("store", "work", seed=1) as (switch, [store, work]):
        switch.set(Link(loss=0.1), store, work)                   # one way
        switch.set(Link(is_cut=True), store, work, both=True)
        switch.heal()

`Switch` controls this process by lines of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from tempfile import NamedTemporaryFile

from tests.namespaces import Host, host_alone

MTU_BYTES = 9000
"""Frames are large, because each one is a turn of a loop in Python."""
FRAMES_MAX = 20_000
"""Maximal number of delayed frames between all hosts; further ones are dropped, as by a switch without memory."""
FRAMES_AT_ONCE_MAX = 64
"""Maximal number of frames of one host before the next one has its turn."""
ANSWER_TIMEOUT_S = 10.0

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_CARD = "eth0"
_BROADCAST = b"\xff\xff\xff\xff\xff\xff"


@dataclass(frozen=True, slots=True)
class Link:
    """The treatment of frames from one host to another."""

    is_cut: bool = False
    loss: float = 0.0
    """The share of lost frames."""
    delay_s: float = 0.0
    """Delay in one direction."""


WHOLE = Link()


class Wires:
    """Decides about frames, without I/O; hosts have numbers, from 0 on."""

    def __init__(self, count: int, seed: int) -> None:
        self._links = dict.fromkeys(permutations(range(count), 2), WHOLE)
        self._random = random.Random(seed)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        """Time of arrival, number in the order of sending, receiving host, and frame."""
        self._sent = 0
        self.dropped = 0
        """Frames that were dropped because there were too many."""

    def set(self, from_: int, to: int, link: Link) -> None:
        """Set a link for later frames; delayed frames arrive as before."""
        self._links[from_, to] = link

    def heal(self) -> None:
        """Make all links whole."""
        self._links = dict.fromkeys(self._links, WHOLE)

    def send(self, from_: int, to: int, frame: bytes, now_s: float) -> bool:
        """Return whether a frame arrives at once; if not, it is lost, or `arrived` returns it later."""
        link = self._links[from_, to]
        if link.is_cut or (link.loss and self._random.random() < link.loss):
            return False
        if not link.delay_s:
            return True
        if len(self._under_way) >= FRAMES_MAX:
            self.dropped += 1
            return False
        self._sent += 1
        heapq.heappush(self._under_way, (now_s + link.delay_s, self._sent, to, frame))
        return False

    def arrived(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Frames whose delay has passed, with their receiving hosts."""
        while self._under_way and self._under_way[0][0] <= now_s:
            _, _, to, frame = heapq.heappop(self._under_way)
            yield to, frame

    def wait_s(self, now_s: float) -> float | None:
        """Time until the next delayed frame arrives; None: no frame is delayed."""
        return max(0.0, self._under_way[0][0] - now_s) if self._under_way else None


class Switch:
    """The test's handle of the switch, which is a separate process."""

    def __init__(self, process: subprocess.Popen[str], hosts: list[Host]) -> None:
        self._process = process
        self._number = {host.name: number for number, host in enumerate(hosts)}

    def set(self, link: Link, from_: Host, to: Host, *, both: bool = False) -> None:
        """Set the link from one host to another; `both`: and back."""
        pairs = [(from_, to), (to, from_)] if both else [(from_, to)]
        for one, other in pairs:
            self._ask({"from": self._number[one.name], "to": self._number[other.name], **asdict(link)})

    def heal(self) -> None:
        """Make all links of the switch whole."""
        self._ask({"heal": True})

    def _ask(self, command: dict[str, object]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)
        answer = self._process.stdout.readline() if ready else ""
        if answer.strip() != "ok":
            raise RuntimeError(f"the switch answered {answer!r} to {command}")


@contextlib.contextmanager
def hosts_on_a_switch(*names: str, seed: int) -> Iterator[tuple[Switch, list[Host]]]:
    """Hosts that reach only each other, through the switch, by address and by name.

    At the end, all their processes are killed. `seed`: for the choice of lost frames.
    """
    with contextlib.ExitStack() as stack, NamedTemporaryFile("w", prefix="kera-hosts-") as table:
        hosts = [stack.enter_context(host_alone(name, number)) for number, name in enumerate(names, start=1)]
        table.writelines(f"{host.address} {host.name}\n" for host in hosts)
        table.write("127.0.0.1 localhost\n")
        table.flush()
        keepers = [str(host.keeper) for host in hosts]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.network_switch", str(seed), *keepers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        stack.callback(process.communicate)
        switch = Switch(process, hosts)
        switch.heal()  # the answer comes when all cards exist
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", _CARD)
            host.run("ip", "link", "set", _CARD, "mtu", str(MTU_BYTES), "up")
            host.run("ip", "link", "set", "lo", "up")
            host.run("mount", "--bind", table.name, "/etc/hosts")
        yield switch, hosts


class _Switching:
    """The running switch; it ends with its standard input."""

    def __init__(self, seed: int, keepers: list[int]) -> None:
        self._cards = [_card_of(keeper, number) for number, keeper in enumerate(keepers)]
        self._wires = Wires(len(keepers), seed)

    def run(self) -> None:
        poll = select.epoll()
        for card in self._cards:
            poll.register(card, select.EPOLLIN)
        commands = os.fdopen(os.dup(0), "rb", buffering=0)
        poll.register(commands, select.EPOLLIN)
        number_of = {card: number for number, card in enumerate(self._cards)}
        while True:
            for ready, _ in poll.poll(self._wires.wait_s(time.monotonic())):
                if ready == commands.fileno():
                    if not (line := commands.readline()):
                        return
                    self._obey(json.loads(line))
                else:
                    self._forward(number_of[ready])
            for to, frame in self._wires.arrived(time.monotonic()):
                self._deliver(to, frame)

    def _obey(self, command: dict[str, object]) -> None:
        if command.pop("heal", False):
            self._wires.heal()
        else:
            from_, to = int(str(command.pop("from"))), int(str(command.pop("to")))
            self._wires.set(from_, to, Link(**command))  # type: ignore[arg-type]
        sys.stdout.write("ok\n")
        sys.stdout.flush()

    def _forward(self, from_: int) -> None:
        for _ in range(FRAMES_AT_ONCE_MAX):
            try:
                frame = os.read(self._cards[from_], MTU_BYTES + 64)
            except BlockingIOError:
                return
            now_s = time.monotonic()
            if frame[:6] == _BROADCAST:  # a question for the owner of an address
                receivers = [to for to in range(len(self._cards)) if to != from_]
            else:
                receivers = [frame[5]] if frame[:5] == _mac(0)[:5] and frame[5] < len(self._cards) else []
            for to in receivers:
                if to != from_ and self._wires.send(from_, to, frame, now_s):
                    self._deliver(to, frame)

    def _deliver(self, to: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # the card is not up yet, or its queue is full
            os.write(self._cards[to], frame)


def _mac(number: int) -> bytes:
    return bytes((0x02, 0, 0, 0, 0, number))


def _card_of(keeper: int, number: int) -> int:
    """Make a host's network card; return this process's end."""
    with Path(f"/proc/{keeper}/ns/net").open() as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to the network of process {keeper}")
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH22x", _CARD.encode(), _IFF_TAP | _IFF_NO_PI))
    address = ":".join(f"{byte:02x}" for byte in _mac(number))
    subprocess.run(["ip", "link", "set", _CARD, "address", address], check=True, timeout=ANSWER_TIMEOUT_S)
    return card


if __name__ == "__main__":
    _Switching(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]).run()
