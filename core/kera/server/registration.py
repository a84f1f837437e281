"""The registration of a daemon with the coordinator, and its heartbeats: the common part of brokers and backups.

Each daemon derives a class from `Registration` with its own messages. ``kera.core.data_dir`` stores the registration on
disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kera.core.base.repeated import Repeated
from kera.core.base.settings import InvalidSettings
from kera.core.base.telemetry import get_logger
from kera.core.coordinators import Coordinators
from kera.core.data_dir import DataDirectory
from kera.core.errors import (
    DiskFull,
    InvalidArgument,
    KeraError,
    NotLeader,
    StaleEpoch,
    StartError,
    Unavailable,
    Uncertain,
    UnknownLaunch,
)
from kera.core.rpc import api
from kera.core.rpc.method import Method, RequestT, ResponseT
from kera.core.runtime import MACHINE, Runtime
from kera.v1 import coordinator_pb2

log = get_logger("kera.registration")

CALL_TIMEOUT_S = 5.0
HURRY_PAUSE_S = 0.02
"""Minimum time between two heartbeats, so that requests for immediate ones cannot flood the coordinator."""
ANNOUNCE_TIMEOUT_S = 2.0
"""Time to reach a coordinator to announce a restart: an unreachable one must not delay a stop for long."""


class RegistrationTiming(NamedTuple):
    """The time-outs of a registration."""

    beat_timeout_s: float = 2.0
    """Time-out of a heartbeat: if another coordinator leads by now, it needs our heartbeat before we count as dead."""
    retry_interval_s: float = 0.2


TIMING = RegistrationTiming()


class CoordinatorUnreachable(StartError):
    """The coordinator did not answer within the time allowed for the start."""

    code = "coordinator_unreachable"


class WrongCluster(StartError):
    """The data directory belongs to a daemon of another cluster."""

    code = "wrong_cluster"


class Registration:
    """The registration of one launch of a daemon."""

    def __init__(
        self,
        coordinator: str,
        directory: DataDirectory,
        chosen_id: int = 0,
        *,
        hurry: asyncio.Event | None = None,
        timing: RegistrationTiming = TIMING,
        runtime: Runtime = MACHINE,
    ) -> None:
        """`coordinator`: ``host:port``, several with commas. `chosen_id`: the id that a new daemon asks for (0: any).

        `hurry`: set to request an immediate heartbeat.

        Raises `InvalidSettings`.
        """
        self._address = coordinator
        self._directory = directory
        self._hurry = hurry or asyncio.Event()
        self._timing = timing
        self._clock = runtime.clock
        self._boottime_s = runtime.clock.boottime_s
        try:
            self._coordinators = Coordinators(coordinator, channel=runtime.channel)
        except InvalidArgument as error:
            raise InvalidSettings(f"coordinator: {error.message}", **error.attributes) from error
        self.launch_id = runtime.new_id()
        self._chosen_id = chosen_id
        self.id_is_chosen = False
        """Whether this daemon is new and asks for a certain id, as `identify` has found."""
        self.heartbeat_interval_s = 1.0
        self.last_sent_s = 0.0
        """When the last answered request was sent, on the boot-time clock: until then at least, the coordinator counts
        us as alive."""
        self.stopping = False
        """Whether heartbeats only show that this launch still lives: it accepts no more data or instructions."""

    async def identify(self, timeout_s: float) -> int:
        """Return the id in the data directory, or the id that a new daemon asks for; 0: any.

        Raises `InvalidSettings` if the directory has another id than the chosen one; `WrongCluster`, before anything is
        registered, as in another cluster that would fence the daemon with our id; and `CoordinatorUnreachable`.
        """
        member_id, cluster_id = self._directory.load()
        if member_id and self._chosen_id not in {0, member_id}:
            role = self._directory.identity.role
            raise InvalidSettings(
                f"data directory {self._directory.path} belongs to {role} {member_id}, not {self._chosen_id};"
                f" leave --{role}-id out, or choose another --data-dir",
                path=str(self._directory.path),
            )
        self.id_is_chosen = bool(self._chosen_id and not member_id)
        if cluster_id:
            answer = await self.ask(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest(), timeout_s)
            if answer.cluster_id != cluster_id:
                raise WrongCluster(
                    f"data directory {self._directory.path} belongs to cluster {cluster_id},"
                    f" the coordinator at {self._address} to {answer.cluster_id};"
                    " name the right one with --coordinator, or choose another --data-dir",
                    path=str(self._directory.path),
                )
        return member_id or self._chosen_id

    @property
    def directory_id(self) -> str:
        """See `kera.core.data_dir.MemberIdentity`; valid once `identify` has read it."""
        return self._directory.directory_id

    @property
    def known_coordinator_epoch(self) -> int:
        """See `kera.core.data_dir.MemberIdentity.coordinator_epoch`; valid once `identify` has read it."""
        return self._directory.coordinator_epoch

    def remember(
        self, member_id: int, cluster_id: str, heartbeat_interval_ms: int, *, coordinator_epoch: int = 0
    ) -> None:
        """Store the coordinator's answer; the identity is durable when this returns. Raises `PathNotWritable`."""
        self._directory.store(member_id, cluster_id, coordinator_epoch)
        self.heartbeat_interval_s = heartbeat_interval_ms / 1000

    async def ask(self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float) -> ResponseT:
        """Send a request until there is an answer. Raises `CoordinatorUnreachable` after `timeout_s`.

        The time does not count while a coordinator makes us wait because its metadata are older than the cluster or
        its disk is full.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        waiting = Repeated(log, self._clock)
        while True:
            try:
                answer = await self._call(method, request, CALL_TIMEOUT_S)
            except (DiskFull, NotLeader, Unavailable, Uncertain) as error:
                if isinstance(error, DiskFull) or error.attributes.get("catching_up"):
                    waiting.goes_on("the coordinator has this daemon wait", level="info", reason=error.message)
                    deadline = loop.time() + timeout_s
                elif loop.time() >= deadline:
                    raise CoordinatorUnreachable(self._none_within(timeout_s, error), address=self._address) from error
                else:
                    refused = {"reason": error.message} if "refused" in error.attributes else {}
                    waiting.goes_on("waiting for the coordinator", level="info", address=self._address, **refused)
                await asyncio.sleep(self._timing.retry_interval_s)
            else:
                waiting.over("coordinator is there", address=self._address)
                return answer

    def _none_within(self, timeout_s: float, error: KeraError) -> str:
        text = f"no coordinator{' that leads' if isinstance(error, NotLeader) else ''} at {self._address}"
        if "refused" in error.attributes:
            return f"{text} has let this daemon in within {timeout_s:g} s: {error.message}"
        return f"{text} within {timeout_s:g} s; start one (kera coordinator), or name another with --coordinator"

    async def beat(
        self,
        method: Method[RequestT, ResponseT],
        request: Callable[[], RequestT],
        on_answer: Callable[[ResponseT], None] = lambda _: None,
    ) -> None:
        """Send heartbeats for ever. Raises `StaleEpoch` if this launch is not the current one, so that it must end."""
        failing = Repeated(log, self._clock)
        while True:
            await self._until_due()
            try:
                try:
                    answer = await self._call(method, request(), self._timing.beat_timeout_s)
                except UnknownLaunch as error:
                    log.warning(
                        "the coordinator does not know this launch, which registers again", reason=error.message
                    )
                    await self.register_again(error)
                    continue
            except StaleEpoch as error:
                log.error("this launch ends: it is not the current one", reason=error.message)
                raise
            except KeraError as error:
                # Whatever is wrong with the coordinator, go on: data in our memory exist only as long as we do.
                failing.goes_on("heartbeat failed; serving on", address=self._address, error=str(error))
            else:
                failing.over("coordinator is back", address=self._address)
                on_answer(answer)

    async def register_again(self, reason: UnknownLaunch) -> None:
        """Register this launch with a coordinator that does not know it. Raises `StaleEpoch` if that is impossible."""
        raise StaleEpoch(reason.message, **reason.attributes)

    async def _until_due(self) -> None:
        """Wait until the next heartbeat is due, or is requested at once; never less than `HURRY_PAUSE_S`."""
        await asyncio.sleep(HURRY_PAUSE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self.heartbeat_interval_s - HURRY_PAUSE_S)):
                await self._hurry.wait()
        self._hurry.clear()

    async def announce(
        self, request: coordinator_pb2.PrepareRestartRequest
    ) -> coordinator_pb2.PrepareRestartResponse | None:
        """Announce to the coordinator that this launch stops in order to start again; return the answer.

        None: the coordinator could not be reached, or this launch is not the current one. Its absence then counts as a
        crash.
        """
        timeout_s = request.wait_ms / 1000 + ANNOUNCE_TIMEOUT_S
        deadline_s = self._boottime_s() + ANNOUNCE_TIMEOUT_S
        while True:
            try:
                return await self._call(api.PREPARE_RESTART, request, timeout_s)
            except KeraError as error:
                again = isinstance(error, NotLeader | Unavailable | Uncertain) and self._boottime_s() < deadline_s
                if not again:
                    log.warning("the coordinator does not know of this restart", error=error.message)
                    return None
            await asyncio.sleep(self._timing.retry_interval_s)

    async def _call(self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float) -> ResponseT:
        sent_s = self._boottime_s()
        answer = await self._coordinators.ask(method, request, timeout_s=timeout_s)
        self.last_sent_s = max(self.last_sent_s, sent_s)
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._coordinators.close()
