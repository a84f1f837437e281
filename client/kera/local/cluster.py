"""A whole cluster on this machine: real daemons as child processes, for development, tests and benchmarks.

    async with LocalCluster(brokers=2) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            ...

Promises:

* when `start` returns, every daemon serves and every broker and backup is registered; when it raises, no daemon
  is left running;
* `stop` ends brokers first, then backups, then the coordinators; it takes a bounded time, may be called again,
  and removes temporary data; the metadata of a cluster in a ZooKeeper stay there;
* no child outlives this process, however that ends; a cluster without `data_dir` leaves nothing behind, and
  the next start of a temporary cluster removes the directories of killed ones.

Synchronous code uses `LocalCluster.running`. `kera.local.child` handles each child process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from kera.core.base.home import expanded
from kera.core.base.settings import MIB
from kera.core.base.telemetry import get_logger
from kera.core.errors import InternalError, InvalidArgument, invariant
from kera.local.child import Child, ChildStartError
from kera.local.daemon_command import daemon_command
from kera.local.directory import ClusterDirectory, DirectoryInUse
from kera.local.running import RunningCluster, run_in_thread
from kera.server.daemon import HANDOVER_MS, STOP_FLUSH_MS, STOP_TIMEOUT_S

__all__ = ["ChildDeath", "ChildStartError", "DirectoryInUse", "LocalCluster", "RunningCluster"]

COORDINATOR = "coordinator"
BACKUP = "backup"
BROKER = "broker"
STARTED = (COORDINATOR, BACKUP, BROKER)
"""Kinds of children, in the order in which they start. They stop in the reverse order, so that a broker always has its
backups while it runs."""
READY_TIMEOUT_S = 60.0
"""Limit for the start of one daemon. A start takes about a second, longer with a large arena on a busy machine."""
STOP_GRACE_S = STOP_TIMEOUT_S + 2.0
"""Time between SIGTERM and SIGKILL; a daemon limits its own stop to less. A daemon with persistent data also gets the
time that its settings allow for the handover and for writing its memory."""

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ChildDeath:
    """A child that ended without being asked to."""

    name: str
    what: str
    """How it ended, in words."""
    log_path: Path
    log_tail: str


class LocalCluster:
    """A cluster of child processes: one or more coordinators, brokers and, for replication, backups."""

    def __init__(  # noqa: PLR0913 - a setting each
        self,
        *,
        brokers: int = 1,
        backups: int = 0,
        coordinators: int = 1,
        zookeeper: str | None = None,
        replication: int | None = None,
        data_dir: Path | str | None = None,
        arena_bytes: int = 256 * MIB,
        backup_memory_bytes: int = 256 * MIB,
        segment_bytes: int = 8 * MIB,
        host: str = "127.0.0.1",
        port: int = 0,
        coordinator_settings: Mapping[str, object] | None = None,
        broker_settings: Mapping[str, object] | None = None,
        backup_settings: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        log_dir: Path | str | None = None,
    ) -> None:
        """Check and keep the settings; `start` starts the daemons.

        Without `data_dir`, the cluster is temporary and its brokers and backups are ephemeral. With it, they keep their
        data, and a killed daemon finds them when it is restarted. `arena_bytes` is the memory of each broker,
        `backup_memory_bytes` that of each backup. `segment_bytes` applies to both: a full segment of a broker has to
        fit into a segment of a backup. `replication` is the default of streams that are created without a replication
        factor (None: 0). `port` is the coordinator's; 0 takes any free port, and further coordinators get the ports
        after it. Several `coordinators` need a `zookeeper`, ``host:port,…/root``, that keeps their metadata; a single
        one may use it, too. `coordinator_settings`, `broker_settings` and `backup_settings` are further settings of all
        daemons of a kind, by name (``idle_close_ms``, …). `env` is added to the environment of all children. Logs go to
        `log_dir`, or to ``logs`` in the cluster's directory.

        Raises `InvalidArgument`.
        """
        if brokers < 1:
            raise InvalidArgument(f"a cluster needs at least one broker, not {brokers}", brokers=brokers)
        if backups < 0:
            raise InvalidArgument(f"a cluster cannot have {backups} backups", backups=backups)
        if replication is not None and not 0 <= replication <= backups:
            raise InvalidArgument(
                f"replication {replication} needs as many backups, and there are {backups}",
                replication=replication,
                backups=backups,
            )
        if coordinators < 1:
            raise InvalidArgument(f"a cluster needs a coordinator, not {coordinators}", coordinators=coordinators)
        if coordinators > 1 and not zookeeper:
            raise InvalidArgument(
                f"{coordinators} coordinators need a ZooKeeper to share their metadata", coordinators=coordinators
            )
        self.broker_count = brokers
        self.coordinator_count = coordinators
        self.backup_count = backups
        self.replication = replication or 0
        self.host = host
        self.port = port
        self.arena_bytes = arena_bytes
        self.backup_memory_bytes = backup_memory_bytes
        self.segment_bytes = segment_bytes
        self._settings: dict[str, dict[str, object]] = {
            COORDINATOR: dict(coordinator_settings or {}),
            BACKUP: dict(backup_settings or {}),
            BROKER: dict(broker_settings or {}),
        }
        """Further settings of all children of a kind; `restart` adds to them."""
        if replication is not None:
            self._settings[COORDINATOR].setdefault("default_replication", replication)
        if zookeeper:
            self._settings[COORDINATOR]["zookeeper"] = zookeeper
        self._data_dir = _path("data_dir", data_dir)
        self._log_dir = _path("log_dir", log_dir)
        self._env = {**os.environ, **(env or {})}
        self._directory: ClusterDirectory | None = None
        self._children: dict[str, Child] = {}
        self._deaths: asyncio.Queue[ChildDeath] = asyncio.Queue()

    # -- what there is ---------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """The coordinators' addresses, separated by commas, for `Client.connect`."""
        coordinators = [child for name, child in self._children.items() if _kind_of(name) == COORDINATOR]
        return ",".join(str(child.ready["grpc_address"]) for child in coordinators if child.ready)

    @property
    def processes(self) -> dict[str, int]:
        """The process ids of the running children, by name."""
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    @property
    def ready(self) -> dict[str, dict[str, Any]]:
        """The ready lines (addresses, id of the broker or backup) of all children that were started, by name."""
        return {name: dict(child.ready) for name, child in self._children.items()}

    @property
    def ephemeral(self) -> bool:
        """Whether stopping the cluster removes its data."""
        return self._data_dir is None

    @property
    def directory(self) -> Path:
        """The directory with the data and sockets of the running cluster."""
        if self._directory is None:
            raise InternalError("the cluster has not been started")
        return self._directory.path

    @property
    def log_dir(self) -> Path:
        """The directory with the logs, ``<name>.log`` for each daemon."""
        return self._log_dir or self.directory / "logs"

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything. Raises `ChildStartError`, `DirectoryInUse` or `PathNotWritable`."""
        invariant(self._directory is None, "a LocalCluster is started once")
        if self._data_dir is None:
            self._directory = ClusterDirectory.make_temporary()
        else:
            self._directory = ClusterDirectory.open(self._data_dir)
        try:
            for name in self._coordinator_names():
                await self._start_child(name)
            # Started one after the other, so that broker-1 of a new cluster gets the id 1.
            for kind, count in ((BACKUP, self.backup_count), (BROKER, self.broker_count)):
                for number in range(1, count + 1):
                    await self._start_child(f"{kind}-{number}")
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> list[str]:
        """Stop everything, brokers first and coordinators last; return the names of the children that had to be killed.

        May be called again.
        """
        disobedient = []
        try:
            for kind in reversed(STARTED):
                generation = [child for name, child in self._children.items() if _kind_of(name) == kind]
                grace_s = self._stop_grace_s(kind)
                obeyed = await asyncio.gather(*(child.stop(grace_s=grace_s) for child in generation))
                disobedient += [child.name for child, ok in zip(generation, obeyed, strict=True) if not ok]
        except BaseException:  # cancelled: the caller does not wait for the grace periods
            await asyncio.gather(*(child.kill() for child in self._children.values()))
            raise
        finally:
            self._remove_temporary()
        for name in disobedient:
            log.warning("child did not stop and was killed", child=name, grace_s=self._stop_grace_s(_kind_of(name)))
        return disobedient

    def _remove_temporary(self) -> None:
        if self._directory is None:
            return
        if self._directory.temporary:
            for ready in self.ready.values():  # a killed broker leaves its shared memory behind
                if "arena_path" in ready:
                    Path(ready["arena_path"]).unlink(missing_ok=True)
        self._directory.release()

    async def kill(self, name: str) -> None:
        """End a child with SIGKILL, as a crash would. `wait` does not report it."""
        await self._child(name).kill()

    async def pause(self, name: str) -> None:
        """Suspend a child with SIGSTOP, as if its host hung. `resume` continues it."""
        self._child(name).pause()

    async def resume(self, name: str) -> None:
        """Continue a paused child."""
        self._child(name).resume()

    async def restart(self, name: str, **settings: object) -> None:
        """Start a child again, with its data; stop it first if it runs. A coordinator keeps its port.

        `settings` are added to the settings of its kind: for this child, and for all that are restarted later.
        """
        child = self._child(name)
        self._settings[_kind_of(name)] |= settings
        grace_s = self._stop_grace_s(_kind_of(name))
        await child.stop(grace_s=grace_s)
        child.argv = self._argv_of(name)
        await child.start(ready_timeout_s=READY_TIMEOUT_S, stop_grace_s=grace_s)

    async def wait(self) -> ChildDeath:
        """Wait until a child ends unexpectedly."""
        return await self._deaths.get()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @classmethod
    @contextlib.contextmanager
    def running(cls, **arguments: Any) -> Iterator[RunningCluster]:
        """Context manager that starts a cluster for synchronous code; takes the arguments of the class.

        with LocalCluster.running(brokers=2) as cluster:
            use(cluster.bootstrap)
        """
        with run_in_thread(cls(**arguments)) as cluster:
            yield cluster

    def _stop_grace_s(self, kind: str) -> float:
        if kind == COORDINATOR or self.ephemeral:
            return STOP_GRACE_S
        settings = {"handover_ms": HANDOVER_MS, "stop_flush_ms": STOP_FLUSH_MS, **self._settings[kind]}
        return STOP_GRACE_S + (int(str(settings["handover_ms"])) + int(str(settings["stop_flush_ms"]))) / 1000

    # -- children --------------------------------------------------------------------------------------------

    def _child(self, name: str) -> Child:
        try:
            return self._children[name]
        except KeyError:
            names = ", ".join(self._children)
            raise InvalidArgument(f"no child is called {name}; there are: {names}", name=name) from None

    def _coordinator_names(self) -> list[str]:
        if self.coordinator_count == 1:
            return [COORDINATOR]
        return [f"{COORDINATOR}-{number}" for number in range(1, self.coordinator_count + 1)]

    async def _start_child(self, name: str) -> None:
        path = self.log_dir / f"{name}.log"
        child = Child(name, self._argv_of(name), env=self._env, log_path=path, on_death=self._note_death)
        self._children[name] = child
        await child.start(ready_timeout_s=READY_TIMEOUT_S, stop_grace_s=self._stop_grace_s(_kind_of(name)))

    def _note_death(self, child: Child) -> None:
        death = ChildDeath(child.name, child.describe_exit(), child.log_path, child.log_tail())
        self._deaths.put_nowait(death)

    def _argv_of(self, name: str) -> list[str]:
        kind = _kind_of(name)
        flags: dict[str, object] = {"host": self.host, "data_dir": self.directory / name}
        if kind == COORDINATOR:
            known = self._children[name].ready.get("grpc_address") if name in self._children else None
            port = self.port + self._coordinator_names().index(name) if self.port else 0
            flags["port"] = port if known is None else int(known.rpartition(":")[2])
            return daemon_command(kind, flags | self._settings[kind])
        flags |= {
            "port": 0,
            "frames_port": 0,
            "coordinator": self.bootstrap,
            "segment_bytes": self.segment_bytes,
        }
        if kind == BROKER:
            flags["arena_bytes"] = self.arena_bytes
        else:
            flags["memory_bytes"] = self.backup_memory_bytes
        argv = daemon_command(kind, flags | self._settings[kind])
        return [*argv, "--ephemeral"] if self.ephemeral else argv


def _path(name: str, path: Path | str | None) -> Path | None:
    if path is None:
        return None
    if path == "":  # Python takes it for the current directory
        raise InvalidArgument(f"{name} is empty; name a path, or leave it out; the current directory is .")
    try:
        return expanded(Path(path)).absolute()
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error.message}", **error.attributes) from error


def _kind_of(name: str) -> str:
    return name.partition("-")[0]
