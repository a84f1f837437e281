"""`LocalCluster` for code without an event loop: one thread runs a loop that owns the children.

The thread has to live until the cluster has stopped: for the kernel, the death of the thread that started a child is
the death of its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class _Cluster(Protocol):
    """The part of `LocalCluster` that `RunningCluster` uses."""

    @property
    def bootstrap(self) -> str: ...
    @property
    def processes(self) -> dict[str, int]: ...
    @property
    def ready(self) -> dict[str, dict[str, Any]]: ...
    @property
    def log_dir(self) -> Path: ...
    async def start(self) -> None: ...
    async def stop(self) -> list[str]: ...
    async def kill(self, name: str) -> None: ...
    async def pause(self, name: str) -> None: ...
    async def resume(self, name: str) -> None: ...
    async def restart(self, name: str, **settings: object) -> None: ...


class RunningCluster:
    """A started `LocalCluster` whose methods block."""

    def __init__(self, cluster: _Cluster, loop: asyncio.AbstractEventLoop) -> None:
        self._cluster = cluster
        self._loop = loop

    @property
    def bootstrap(self) -> str:
        """The coordinators' addresses."""
        return self._cluster.bootstrap

    @property
    def processes(self) -> dict[str, int]:
        """The process ids of the running children, by name."""
        return self._cluster.processes

    @property
    def ready(self) -> dict[str, dict[str, Any]]:
        """The ready lines (addresses, id of the broker or backup) of all children that were started, by name."""
        return self._cluster.ready

    @property
    def log_dir(self) -> Path:
        """The directory with the logs, ``<name>.log`` for each daemon."""
        return self._cluster.log_dir

    def kill(self, name: str) -> None:
        """See `LocalCluster.kill`."""
        self.run(self._cluster.kill(name))

    def pause(self, name: str) -> None:
        """See `LocalCluster.pause`."""
        self.run(self._cluster.pause(name))

    def resume(self, name: str) -> None:
        """See `LocalCluster.resume`."""
        self.run(self._cluster.resume(name))

    def restart(self, name: str, **settings: object) -> None:
        """See `LocalCluster.restart`."""
        self.run(self._cluster.restart(name, **settings))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the cluster's loop, and return its result.

        If this thread is interrupted, as by Ctrl-C, cancel the coroutine, and wait until it has cleaned up.
        """
        tasks: list[asyncio.Task[T]] = []
        ended = threading.Event()

        def begin() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: ended.set())

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # the interrupt came before `begin` was scheduled
                coroutine.close()
                ended.set()

        try:
            self._loop.call_soon_threadsafe(begin)
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            ended.wait()
            raise
        return tasks[0].result()


@contextlib.contextmanager
def run_in_thread(cluster: _Cluster) -> Iterator[RunningCluster]:
    """Start `cluster` on its own loop, in a thread, and stop it at the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kera-local-cluster", daemon=True)
    thread.start()
    running = RunningCluster(cluster, loop)
    try:
        try:
            running.run(cluster.start())
            yield running
        finally:
            running.run(cluster.stop())  # also if the thread is interrupted when the start is just done
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
