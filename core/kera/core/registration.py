"""The tie of a daemon to the coordinator: what brokers and backups have in common in registering and keeping alive.

The messages are those of the daemon, which derives its own class from `Registration`. What is kept on disk of the
registration is in ``kera.core.data_dir``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from kera.core.clock import boottime_s
from kera.core.coordinators import Coordinators
from kera.core.data_dir import DataDirectory
from kera.core.errors import InvalidArgument, KeraError, NotLeader, StaleEpoch, StartError, Unavailable, Uncertain
from kera.core.repeated import Repeated
from kera.core.rpc import api
from kera.core.rpc.method import Method, RequestT, ResponseT
from kera.core.settings import InvalidSettings
from kera.core.telemetry import get_logger
from kera.v1 import coordinator_pb2

log = get_logger("kera.registration")

CALL_TIMEOUT_S = 5.0
BEAT_TIMEOUT_S = 2.0
"""For the answer to a heartbeat: another coordinator may lead by now, and has to hear of us before we count as dead."""
RETRY_INTERVAL_S = 0.2


class CoordinatorUnreachable(StartError):
    """The coordinator did not answer within the time that was given for the start."""

    code = "coordinator_unreachable"


class WrongCluster(StartError):
    """The data directory belongs to a daemon of another cluster."""

    code = "wrong_cluster"


class Registration:
    """One launch of a daemon, as the coordinator knows it."""

    def __init__(self, coordinator: str, directory: DataDirectory) -> None:
        """`coordinator` is ``host:port``, several with commas. Raises `InvalidSettings`."""
        self._address = coordinator
        self._directory = directory
        try:
            self._coordinators = Coordinators(coordinator)
        except InvalidArgument as error:
            raise InvalidSettings(f"coordinator: {error.message}", **error.attributes) from error
        self.launch_id = uuid.uuid4().hex
        self.heartbeat_interval_s = 1.0
        self.last_sent_s = 0.0
        """When the last request that was answered had been sent, by `boottime_s`: so long the coordinator knows of
        us, at least."""

    async def identify(self, timeout_s: float) -> int:
        """The id that the data directory has; 0: none yet.

        Raises `WrongCluster`, before anything is registered: elsewhere that would fence the daemon with our id; and
        `CoordinatorUnreachable`.
        """
        member_id, cluster_id = self._directory.load()
        if cluster_id:
            answer = await self.ask(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest(), timeout_s)
            if answer.cluster_id != cluster_id:
                raise WrongCluster(
                    f"data directory {self._directory.path} belongs to cluster {cluster_id},"
                    f" the coordinator at {self._address} to {answer.cluster_id};"
                    " name the right one with --coordinator, or choose another --data-dir",
                    path=str(self._directory.path),
                )
        return member_id

    def remember(self, member_id: int, cluster_id: str, heartbeat_interval_ms: int) -> None:
        """What the coordinator has answered; the identity is durable when this returns. Raises `PathNotWritable`."""
        self._directory.store(member_id, cluster_id)
        self.heartbeat_interval_s = heartbeat_interval_ms / 1000

    async def ask(self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float) -> ResponseT:
        """Ask until there is an answer, up to `timeout_s`; then raises `CoordinatorUnreachable`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        waiting = Repeated(log)
        while True:
            try:
                answer = await self._call(method, request, CALL_TIMEOUT_S)
            except (NotLeader, Unavailable, Uncertain) as error:
                if loop.time() >= deadline:
                    raise CoordinatorUnreachable(
                        f"no coordinator{' that leads' if isinstance(error, NotLeader) else ''} at {self._address}"
                        f" within {timeout_s:g} s;"
                        " start one (kera coordinator), or name another with --coordinator",
                        address=self._address,
                    ) from error
                waiting.goes_on("waiting for the coordinator", level="info", address=self._address)
                await asyncio.sleep(RETRY_INTERVAL_S)
            else:
                waiting.over("coordinator is there", address=self._address)
                return answer

    async def beat(
        self,
        method: Method[RequestT, ResponseT],
        request: Callable[[], RequestT],
        on_answer: Callable[[ResponseT], None] = lambda _: None,
    ) -> None:
        """Send heartbeats for ever. Raises `StaleEpoch` when a newer launch has taken over: this one must end."""
        reachable = True
        while True:
            await asyncio.sleep(self.heartbeat_interval_s)
            try:
                answer = await self._call(method, request(), BEAT_TIMEOUT_S)
            except StaleEpoch:
                log.error("a newer launch of this daemon has taken over", path=str(self._directory.path))
                raise
            except KeraError as error:
                # Whatever ails the coordinator: what is in our memory is there only as long as we are.
                if reachable:
                    log.warning("heartbeat failed; serving on", address=self._address, error=str(error))
                reachable = False
            else:
                if not reachable:
                    log.info("coordinator is back", address=self._address)
                reachable = True
                on_answer(answer)

    async def _call(self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float) -> ResponseT:
        sent_s = boottime_s()
        answer = await self._coordinators.ask(method, request, timeout_s=timeout_s)
        self.last_sent_s = max(self.last_sent_s, sent_s)
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._coordinators.close()
