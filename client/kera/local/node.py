"""The brokers of one host, as child processes: one for each core or NUMA node, pinned to its CPUs.

A broker is one event loop, so a host with many cores needs several brokers. They share the host's node id, so that
readers on the host map the memory of each.

Promises:

* when `start` returns, all brokers serve; when it raises, none is left running;
* a broker that ends unexpectedly is started again after `RESTART_S`; attempts repeat until one succeeds;
* `stop` ends all brokers at the same time, within the time that their settings allow;
* brokers keep their data directories: which data a broker has does not depend on the number of CPUs.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kera.core.base.cpus import format_cpus
from kera.core.errors import InvalidArgument, KeraError, PathNotWritable
from kera.local.child import Child
from kera.local.daemon_command import daemon_command
from kera.local.directory import ClusterDirectory

RESTART_S = 2.0
READY_TIMEOUT_S = 600.0
"""Long, as a broker first reads the data on its disk and maps its memory."""
BROKERS_MAX = 1024
PORTS_EACH = 2
"""Ports of a broker: the open interface and frames."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NodeBroker:
    """The name, CPUs and flags of one broker."""

    name: str
    cpus: frozenset[int]
    flags: dict[str, object]


def planned(
    groups: Sequence[frozenset[int]], count: int, data_dir: Path, *, port: int = 0, metrics_port: int | None = None
) -> list[NodeBroker]:
    """Plan `count` brokers (0: one for each group): they take the groups of CPUs in turn, and have consecutive ports.

    Raises `InvalidArgument` when the directory has data of more brokers, whose records would be out of reach, or when
    `count` is too large for a host or its ports; and `PathNotWritable` when the directory cannot be listed.
    """
    count = count or len(groups)
    try:
        names = [each.name for each in data_dir.glob("broker-*")]
    except OSError as error:
        raise PathNotWritable(
            f"cannot use {data_dir}: {error.strerror}; choose another directory", path=str(data_dir)
        ) from error
    there = [int(found[1]) for name in names if (found := re.fullmatch(r"broker-(\d+)", name))]
    if max(there, default=0) > count:
        raise InvalidArgument(
            f"{data_dir} has data of {max(there)} brokers, and {count} would be started: give --brokers {max(there)}"
            " (several then share CPUs), or drain those that are too many, forget them and remove their directories",
            brokers=max(there),
        )
    last_port = max(port + PORTS_EACH * count - 1 if port else 0, metrics_port + count - 1 if metrics_port else 0)
    if count > BROKERS_MAX or last_port >= 1 << 16:
        raise InvalidArgument(f"{count} brokers are too many for one host, or for the ports behind {port}")
    brokers = []
    for number in range(count):
        cpus = groups[number % len(groups)]
        flags: dict[str, object] = {
            "data_dir": data_dir / f"broker-{number + 1}",
            "cpus": format_cpus(cpus),
            "port": port + PORTS_EACH * number if port else 0,
            "frames_port": port + PORTS_EACH * number + 1 if port else 0,
        }
        if metrics_port is not None:
            flags["metrics_port"] = metrics_port + number if metrics_port else 0
        brokers.append(NodeBroker(f"broker-{number + 1}", cpus, flags))
    return brokers


class LocalNode:
    """The brokers of one host, each on its CPUs; a broker that ends is started again."""

    def __init__(
        self,
        brokers: Sequence[NodeBroker],
        data_dir: Path,
        *,
        env: Mapping[str, str],
        say: Say,
        stop_grace_s: float,
        log_dir: Path | None = None,
    ) -> None:
        """`say` reports brokers that end and come back; `stop_grace_s`: time between SIGTERM and SIGKILL for each."""
        self._data_dir = data_dir
        self._say = say
        self._stop_grace_s = stop_grace_s
        self._directory: ClusterDirectory | None = None
        self._restarting: dict[asyncio.Task[None], Child] = {}
        """The tasks that start brokers again, each with its broker."""
        self._stopping = False
        """Whether `stop` has been called, so that no broker is started again."""
        self.log_dir = log_dir or data_dir / "logs"
        self._children = {
            one.name: Child(
                one.name,
                daemon_command("broker", one.flags),
                env=env,
                log_path=self.log_dir / f"{one.name}.log",
                on_death=self._died,
            )
            for one in brokers
        }

    @property
    def ready(self) -> dict[str, dict[str, Any]]:
        """The ready lines (addresses, id) of all brokers that were started, by name."""
        return {name: dict(child.ready) for name, child in self._children.items()}

    async def start(self) -> None:
        """Start all brokers. Raises `ChildStartError`, `DirectoryInUse` or `PathNotWritable`."""
        self._directory = ClusterDirectory.open(self._data_dir)
        try:
            for child in self._children.values():  # one after the other, so that ids follow the order of names
                await child.start(ready_timeout_s=READY_TIMEOUT_S, stop_grace_s=self._stop_grace_s)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> list[str]:
        """Stop all brokers; return the names of those that had to be killed. May be called again."""
        self._stopping = True
        children = list(self._children.values())
        obeyed = await asyncio.gather(*map(self._stop, children))
        if self._directory is not None:
            self._directory.release()
        return [child.name for child, ok in zip(children, obeyed, strict=True) if not ok]

    async def _stop(self, child: Child) -> bool:
        restarts = [task for task, restarted in self._restarting.items() if restarted is child]
        for task in restarts:
            task.cancel()
        if restarts:
            await asyncio.wait(restarts)
        return await child.stop(grace_s=self._stop_grace_s)

    def _died(self, child: Child) -> None:
        if self._stopping:
            return
        self._say(f"{child.name} {child.describe_exit()}, and is started again; its log is {child.log_path}")
        task = asyncio.create_task(self._restart(child))
        self._restarting[task] = child
        task.add_done_callback(self._restarting.pop)

    async def _restart(self, child: Child) -> None:
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                await child.start(ready_timeout_s=READY_TIMEOUT_S, stop_grace_s=self._stop_grace_s)
            except (KeraError, OSError) as error:
                self._say(f"{child.name} cannot start, and is tried again: {error}")
            else:
                self._say(f"{child.name} is back")
                return
