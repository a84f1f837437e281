"""The cluster of a simulation: machines with the real daemons, and their supervision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from kera.core.base.blocks import FILE_CALLS, FileCalls
from kera.core.runtime import Runtime
from tests.simulation.engine.clocks import MachineClock
from tests.simulation.engine.databases import Environment
from tests.simulation.engine.disk import MachineDisk
from tests.simulation.engine.network import Network
from tests.simulation.engine.process import Machine, Process
from tests.simulation.engine.scheduler import Scheduler
from tests.simulation.engine.trace import Trace
from tests.simulation.wiring import programs, zookeeper
from tests.simulation.wiring.directories import Directories

if TYPE_CHECKING:
    from tests.simulation.world.plan import Plan

AGAIN_S = 0.5
"""The time after which a daemon that has ended is restarted."""
SETTINGS: dict[str, dict[str, Any]] = {
    "coordinator": {},
    "broker": {"idle_close_ms": 3000, "repair_delay_ms": 3000, "reader_grace_ms": 2000},
    "backup": {},
}


class Daemon:
    """A machine with a daemon, over all its launches."""

    def __init__(self, cluster: Cluster, machine: Machine, kind: str) -> None:
        self.machine = machine
        self.name = machine.name
        self.kind = kind
        self.process: Process | None = None
        self.ready: Mapping[str, Any] | None = None
        """The ready message of the present launch; None: it is not ready."""
        self.wanted = True
        """Whether to restart it when it is gone."""
        self.launches = 0
        self.disk = cluster.disk(self)
        self._cluster = cluster
        self._stop: asyncio.Event | None = None
        self._metadata = b""
        """Older metadata of a coordinator, to be restored when it starts."""

    def start(self) -> None:
        """Launch it, unless it runs."""
        if self.process is not None and self.process.alive:
            return
        cluster = self._cluster
        if self.launches:
            cluster.directories.renew(self.name)
        self.launches += 1
        process = self.process = cluster.process(self.machine, f"{self.name}")
        runtime = cluster.runtime(self.machine, self.launches, self.disk.calls())
        self.ready = None

        async def zookeeper_main() -> None:
            self._is_ready(process, {})
            await programs.zookeeper_on(self.machine, cluster.tree)

        async def main() -> None:
            stop = self._stop = asyncio.Event()
            if self._metadata:
                data, self._metadata = self._metadata, b""
                await programs.put_back_on(cluster.directories.of(self.name), self._environment_of(), data)
                cluster.trace.note(self.name, f"gets older metadata back, {len(data)} bytes")
            await programs.until_stopped(
                lambda: self._serving(runtime), lambda there: self._is_ready(process, there), stop
            )

        process.start(zookeeper_main if self.kind == "zookeeper" else main)
        cluster.scheduler.after(AGAIN_S, self._look, process)

    def _serving(self, runtime: Runtime) -> programs.Serving:
        directory = self._cluster.directories.of(self.name)
        settings = SETTINGS[self.kind]
        if self.kind == "coordinator" and self._cluster.plan.zookeeper_names:
            address = self._cluster.machines["zookeeper-1"].address
            return programs.coordinator_of(self.machine, directory, address, runtime, **settings)
        environment_of = self._environment_of()
        if self.kind == "coordinator":
            return programs.coordinator_on(self.machine, directory, runtime, environment_of, **settings)
        coordinators = self._cluster.coordinators
        if self.kind == "broker":
            return programs.broker_on(self.machine, directory, coordinators, runtime, environment_of, **settings)
        return programs.backup_on(self.machine, directory, coordinators, runtime, **settings)

    def _environment_of(self) -> Callable[..., Any]:
        random = Random(f"{self._cluster.plan.seed} {self.name} {self.launches}")

        def environment_of(path: str, **options: Any) -> Any:
            return Environment(self.disk, random, path, options)

        return environment_of

    def _is_ready(self, process: Process, there: Mapping[str, Any]) -> None:
        if process is self.process:
            self.ready = there
            process.trace.note(self.name, "is ready")

    def _look(self, process: Process) -> None:
        """Restart it if it has ended."""
        if process is not self.process or not self.wanted:
            return
        if process.alive:
            self._cluster.scheduler.after(AGAIN_S, self._look, process)
        else:
            self.start()

    def stop(self) -> None:
        """Let it end orderly, as for a restart."""
        self.wanted = False
        if self.kind == "zookeeper":
            self.kill()
        elif self._stop is not None and self.process is not None and self.process.alive:
            self.process.trace.note(self.name, "is told to stop")
            self.process.loop.call_soon(self._stop.set)

    def kill(self) -> None:
        """End it at once."""
        self.wanted = False
        self.ready = None
        if self.process is not None:
            self.process.kill()

    def put_back(self, metadata: bytes) -> None:
        """Kill a coordinator, and let its next launch begin with older metadata."""
        self.kill()
        self._metadata = metadata

    def power_lost(self) -> None:
        """It loses its process, its memory, and unsynced data."""
        self.kill()
        self._cluster.directories.forget_memory(self.name)
        names, blocks = self.disk.power_lost()
        self._cluster.trace.note(self.name, f"has lost power, {names} names and {blocks} blocks")

    def flip_bits(self, count: int) -> None:
        """Flip bits in the files of its log."""
        flipped = self._cluster.directories.flip_bits(self.name, count, self._cluster.scheduler.random)
        self._cluster.trace.note(self.name, f"has flipped bits: {flipped}")

    def back(self) -> None:
        """Bring it back: start it if it was killed or stopped, and resume it if it was paused."""
        self.wanted = True
        if self.process is not None and self.process.loop.paused:
            self.process.resume()
        if self.process is None or not self.process.alive:
            self.start()
        else:
            self._cluster.scheduler.after(AGAIN_S, self._look, self.process)

    @property
    def serves(self) -> bool:
        """Whether it runs and is ready."""
        return self.ready is not None and self.process is not None and self.process.alive


class Cluster:
    """All machines of daemons and clients."""

    def __init__(self, plan: Plan, scheduler: Scheduler, trace: Trace, root: Path) -> None:
        self.plan = plan
        self.scheduler = scheduler
        self.trace = trace
        self.network = Network(scheduler)
        self.network.weather.delay_s = plan.delay_s
        self.network.weather.pieces = plan.pieces
        self.directories = Directories(root)
        self.tree = zookeeper.Tree()
        """The data on ZooKeeper's disk."""
        self.defects: list[str] = []
        self.processes: list[Process] = []
        """All processes ever, because the rest of a killed one must not be finalized during a run."""
        self.machines: dict[str, Machine] = {}
        self.clients: dict[str, Process] = {}
        """Client processes, by machine name; so are their programs."""
        self.programs: dict[str, Callable[[Runtime], Coroutine[Any, Any, Any]]] = {}
        self._random = Random(f"cluster {plan.seed}")
        self._daemon_random = Random(f"daemons {plan.seed}")
        for kind, names in enumerate(
            (
                plan.coordinator_names,
                plan.broker_names,
                plan.backup_names,
                [*plan.client_names, "operator"],
                plan.zookeeper_names,
            )
        ):
            for number, name in enumerate(names, 1):
                rate = 1 + plan.drift * self._random.uniform(-1, 1)
                clock = MachineClock(scheduler, rate, self._random.uniform(-1, 1))
                machine = Machine(self.network, name, f"10.0.{kind}.{number}", clock)
                self.machines[name] = self.network.machines[machine.address] = machine
        self.daemons = {
            name: Daemon(self, self.machines[name], name.rpartition("-")[0])
            for name in (
                *plan.zookeeper_names,
                *plan.coordinator_names,
                *plan.broker_names,
                *plan.backup_names,
            )
        }
        self.coordinators = ",".join(
            f"{self.machines[name].address}:{programs.COORDINATOR_PORT}" for name in plan.coordinator_names
        )

    def process(self, machine: Machine, name: str) -> Process:
        """Make a process, without starting it."""
        process = Process(self.scheduler, machine, name, self.trace, self.defects.append)
        self.processes.append(process)
        return process

    def runtime(self, machine: Machine, launch: int, files: FileCalls = FILE_CALLS) -> Runtime:
        """The runtime of a process."""
        return programs.runtime_of(machine, Random(f"{self.plan.seed} {machine.name} {launch}"), files)

    def disk(self, daemon: Daemon) -> MachineDisk:
        """The disk of a daemon's machine."""
        kept, random = self.directories.of(f"{daemon.name}.kept"), Random(f"disk {self.plan.seed} {daemon.name}")
        return MachineDisk(kept, random, daemon.power_lost)

    def run_client(self, name: str, main: Callable[[Runtime], Coroutine[Any, Any, Any]]) -> Process:
        """Run a program on a client's machine."""
        machine = self.machines[name]
        process = self.process(machine, name)
        runtime = self.runtime(machine, len(self.processes))
        process.start(lambda: main(runtime))
        self.clients[name], self.programs[name] = process, main
        return process

    def kill(self, name: str) -> None:
        """Kill a daemon or a client."""
        if name in self.daemons:
            self.daemons[name].kill()
        else:
            self.clients[name].kill()

    def back(self, name: str) -> None:
        """Bring a daemon or a client back; a client starts without its memory."""
        if name in self.daemons:
            self.daemons[name].back()
        elif not (self.clients[name].alive or self.clients[name].ended):
            self.again(name)

    def again(self, name: str) -> Process:
        """Run the last program of a client's machine again."""
        return self.run_client(name, self.programs[name])

    def start(self) -> None:
        """Start all daemons."""
        for daemon in self.daemons.values():
            daemon.start()

    @property
    def serves(self) -> bool:
        """Whether all daemons run and are ready."""
        return all(daemon.serves for daemon in self.daemons.values())
