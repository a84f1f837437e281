"""Carries out what replication decides: keeps connections to backups, sends requests, and reports their answers.

The replicator keeps a connection to each backup that the coordinator knows, and reconnects after a loss. Before a
backup counts as up, it has to refuse older launches of this broker (docs/design-notes.md, "Fencing"). Then the
replicator asks which replicas of this broker it has.

A request that is not answered in time, or a broken connection, fails the backup as a whole: the replicator aborts the
connection, so that nothing of the broker's memory is sent any more, and everything in flight goes elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from kera.broker.backup_ways import BackupWays
from kera.broker.replication.manager import Replication
from kera.broker.replication.virtual_log import Close, Send
from kera.broker.replication.virtual_segment import Free
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import BackupFull, DiskFull, KeraError, NotReplicated, StaleEpoch, Unavailable, Uncertain
from kera.core.rpc import Reply, api
from kera.core.rpc.frame_client import FrameChannel
from kera.v1 import backup_pb2, common_pb2

log = get_logger("kera.replicator")

CONNECT_TIMEOUT_S = 2.0
RECONNECT_S = 0.2
ASK_TIMEOUT_S = 5.0
"""Time-out of requests that writes do not wait for."""
FREED_MAX = 1_000
"""Maximum number of replicas that one request deletes."""
ANSWERS_S = 5.0
"""Answer times of a backup count for at least this long, and at most twice as long."""


class Replicator:
    """Keeps a connection to each backup, sends the requests of replication, and reports answers and failures.

    Belongs to one event loop.
    """

    def __init__(self, replication: Replication, ways: BackupWays, *, timeout_ms: int) -> None:
        """`timeout_ms`: a backup that does not answer within this time has failed."""
        self._replication = replication
        self._logs = replication.logs
        self.ways = ways
        self._timeout_s = timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._links: dict[int, _Link] = {}
        self._pumping = self._pumping_soon = self._closed = False
        self._broker_id = self._broker_epoch = 0
        self._known: list[common_pb2.BackupInfo] = []
        self._fenced: asyncio.Future[None] = self._loop.create_future()
        self._refusing, self._keeping = Repeated(log), Repeated(log)

    def begin(self, broker_id: int, broker_epoch: int) -> None:
        """Begin to connect, now that the broker is registered."""
        self._broker_id, self._broker_epoch = broker_id, broker_epoch
        self.update_backups(self._known)

    async def until_fenced(self) -> None:
        """Wait until a backup reports a newer launch of this broker, then raise `StaleEpoch`; never returns."""
        await asyncio.shield(self._fenced)

    def update_backups(self, infos: Iterable[common_pb2.BackupInfo]) -> None:
        """Take the coordinator's list of backups: connect to new ones."""
        infos = self._known = list(infos)
        if not self._broker_epoch:
            return
        self._replication.backups.update(infos)
        for backup_id in self._links.keys() - {info.backup_id for info in infos}:
            if not self._replication.backups.is_up(backup_id):
                self._links.pop(backup_id).give_up()
        for info in infos:
            link = self._links.get(info.backup_id)
            if link is None:
                self._links[info.backup_id] = _Link(self, info)
            else:
                link.update_address(info)

    @property
    def known_backups(self) -> list[common_pb2.BackupInfo]:
        """The coordinator's last list of backups."""
        return self._known

    def answer_ms(self) -> dict[int, int]:
        """Return how long each usable backup takes to answer, by id; see `AnswerTimes`."""
        now_s = self._loop.time()
        used = {backup_id: link for backup_id, link in self._links.items() if link.channel is not None}
        return {backup_id: round(link.answers.seconds(now_s) * 1000) for backup_id, link in sorted(used.items())}

    @property
    def broker_id(self) -> int:
        """The id of this broker; 0 before it is registered."""
        return self._broker_id

    async def close(self) -> None:
        """Close all connections; what is in flight stays undecided."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()
        if self._fenced.done():
            self._fenced.exception()

    # -- effects ---------------------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Call `pump` in the loop's next round."""
        if not (self._pumping_soon or self._closed):
            self._pumping_soon = True
            self._loop.call_soon(self._pump_later)

    def _pump_later(self) -> None:
        self._pumping_soon = False
        self.pump()

    def pump(self) -> None:
        """Send the requests to backups that are due."""
        if self._closed:
            return
        if self._pumping:
            self.pump_soon()
            return
        self._pumping = True
        try:
            while effects := self._logs.pump():
                freed: dict[int, list[int]] = {}
                for effect in effects:
                    if isinstance(effect, Free):
                        freed.setdefault(effect.backup_id, []).extend(effect.virtual_segment_ids)
                    else:
                        self._perform(effect)
                for backup_id, ids in freed.items():
                    self._free(backup_id, ids)
        finally:
            self._pumping = False

    def _perform(self, effect: Send | Close) -> None:
        link = self._links.get(effect.backup_id)
        channel = link.channel if link is not None else None
        place = effect.place
        request = backup_pb2.ReplicateRequest(
            broker_id=self._broker_id,
            broker_epoch=self._broker_epoch,
            stream_id=place.stream_id,
            virtual_log_id=place.log_id,
            virtual_segment_id=place.virtual_segment_id,
        )
        bulk: list[memoryview] = []
        if isinstance(effect, Send):
            batch = effect.batch
            request.offset, request.persist = batch.offset, batch.persist
            request.checksum = batch.checksum_after
            bulk = batch.views()
        else:
            request.offset, request.checksum, request.close = place.head, place.checksum, True
        if channel is None:
            self._loop.call_soon(self._refused, effect, Unavailable("the backup is not connected"))
            return
        future = channel.submit(api.REPLICATE, request, bulk, timeout_s=self._timeout_s)
        number = link.answers.sent(self._loop.time()) if link is not None else 0
        future.when_done(partial(self._answered, link, number, effect))

    def _answered(
        self,
        link: _Link | None,
        number: int,
        effect: Send | Close,
        future: asyncio.Future[Reply[backup_pb2.ReplicateResponse]],
    ) -> None:
        if link is not None:
            link.answers.answered(number, self._loop.time())
        error = future.exception()
        if error is None:
            if isinstance(effect, Send):
                self._logs.acknowledged(effect)
            else:
                self._replication.closed_replica(effect)
        elif link is not None and isinstance(error, Unavailable | Uncertain):
            link.fail(str(error))
        else:
            self._refused(effect, error)
            return
        self.pump()

    def _refused(self, effect: Send | Close, error: BaseException) -> None:
        if isinstance(error, StaleEpoch):
            self._fence(error)
            return
        full = isinstance(error, BackupFull | DiskFull)
        if not full:
            self._refusing.goes_on(
                "a backup refuses a replica",
                level="error",
                backup_id=effect.backup_id,
                virtual_segment_id=effect.place.virtual_segment_id,
                error=str(error),
            )
        self._logs.refused(effect, full=full)
        self.pump()

    def _fence(self, error: StaleEpoch) -> None:
        """Fail all waiting writes, because a newer launch has taken over; acknowledge nothing more."""
        self._logs.fail(NotReplicated("a newer launch of this broker has taken over; ask the coordinator"))
        if not self._fenced.done():
            log.error("a backup knows a newer launch of this broker", error=str(error))
            self._fenced.set_exception(error)

    def _free(self, backup_id: int, virtual_segment_ids: list[int]) -> None:
        link = self._links.get(backup_id)
        if link is None or link.channel is None:
            return  # when a backup is back, it lists its replicas, and gets the request then
        for first in range(0, len(virtual_segment_ids), FREED_MAX):
            request = backup_pb2.FreeReplicasRequest(
                broker_id=self._broker_id,
                broker_epoch=self._broker_epoch,
                virtual_segment_ids=virtual_segment_ids[first : first + FREED_MAX],
            )
            future = link.channel.submit(api.FREE_REPLICAS, request, timeout_s=ASK_TIMEOUT_S)
            future.add_done_callback(partial(self._freed, backup_id))

    def _freed(self, backup_id: int, future: asyncio.Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, StaleEpoch):
            self._fence(error)
        elif error is not None and not self._closed:
            self._keeping.goes_on(
                "a backup keeps a replica until it connects again", backup_id=backup_id, error=str(error)
            )

    # -- for links -------------------------------------------------------------------------------------------------

    async def introduce(self, channel: FrameChannel, backup_id: int) -> None:
        """Fence older launches of this broker on a backup, and let replication use it."""
        fence = backup_pb2.FenceBrokerRequest(broker_id=self._broker_id, broker_epoch=self._broker_epoch)
        try:
            await channel.submit(api.FENCE_BROKER, fence, timeout_s=ASK_TIMEOUT_S)
        except StaleEpoch as error:
            self._fence(error)
            raise
        self._replication.backup_up(backup_id)
        self.pump()

    async def ask_what_it_has(self, channel: FrameChannel, backup_id: int) -> None:
        """Ask a backup for this broker's replicas, and pass the list to replication."""
        replicas: list[backup_pb2.ReplicaInfo] = []
        request = backup_pb2.ListReplicasRequest(broker_id=self._broker_id)
        while True:
            reply = await channel.submit(api.LIST_REPLICAS, request, timeout_s=ASK_TIMEOUT_S)
            replicas += reply.message.replicas
            if reply.message.complete or not reply.message.replicas:
                break
            request.after_virtual_segment_id = reply.message.replicas[-1].virtual_segment_id
        self._replication.listed(backup_id, replicas)
        self.pump()

    def lost(self, backup_id: int) -> None:
        """Report the failure of a backup to replication."""
        self._replication.backup_down(backup_id)
        self.pump()


class AnswerTimes:
    """How long a backup takes to answer: the mean of the last seconds, or the age of a pending request if longer.

    All times are on the same monotonic clock.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, float] = {}
        """The times at which pending requests were sent, by number, the oldest first."""
        self._number = 0
        self._began_s = 0.0
        """When the present window began."""
        self._sum_s = self._before_s = 0.0
        self._count = self._count_before = 0

    def sent(self, now_s: float) -> int:
        """Note that a request was sent; return its number for `answered`."""
        self._number += 1
        self._waiting[self._number] = now_s
        return self._number

    def answered(self, number: int, now_s: float) -> None:
        """Note that a request was answered."""
        sent_s = self._waiting.pop(number, None)
        if sent_s is not None:
            self._turn(now_s)
            self._sum_s += now_s - sent_s
            self._count += 1

    def clear(self) -> None:
        """Forget all requests and times, because the connection is gone."""
        self._waiting.clear()
        self._sum_s = self._before_s = 0.0
        self._count = self._count_before = 0

    def _turn(self, now_s: float) -> None:
        """Begin a new window if the present one is over, and forget all windows but the last one before it."""
        if now_s < self._began_s + ANSWERS_S:
            return
        recent = now_s < self._began_s + 2 * ANSWERS_S
        self._before_s, self._count_before = (self._sum_s, self._count) if recent else (0.0, 0)
        self._began_s, self._sum_s, self._count = now_s, 0.0, 0

    def seconds(self, now_s: float) -> float:
        """The mean answer time of the last seconds, or the age of a pending request if longer; 0: no requests."""
        self._turn(now_s)
        count = self._count + self._count_before
        mean_s = (self._sum_s + self._before_s) / count if count else 0.0
        return max(mean_s, now_s - next(iter(self._waiting.values()), now_s))


class _Link:
    """The connection to one backup."""

    def __init__(self, replicator: Replicator, info: common_pb2.BackupInfo) -> None:
        self.channel: FrameChannel | None = None
        """Set while the backup can be used."""
        self.answers = AnswerTimes()
        self._replicator = replicator
        self._info = info
        self._away, self._failing = Repeated(log), Repeated(log)
        self._connected = False
        """Whether the backup was ever connected."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def update_address(self, info: common_pb2.BackupInfo) -> None:
        """Take the coordinator's information, for the next connection."""
        self._info = info

    def fail(self, reason: str) -> None:
        """Abort the connection after a failure, and report it; `_run` connects again."""
        channel, self.channel = self.channel, None
        self.answers.clear()
        if channel is not None:
            channel.abort()
            self._away.goes_on("backup lost", backup_id=self._info.backup_id, reason=reason)
            self._replicator.lost(self._info.backup_id)

    def give_up(self) -> None:
        """Stop connecting to a backup that the coordinator has forgotten."""
        self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            channel: FrameChannel | None = None
            try:
                channel = await self._replicator.ways.connect(self._info, timeout_s=CONNECT_TIMEOUT_S)
                await self._use(channel)
            except KeraError as error:
                if isinstance(error, StaleEpoch):
                    return
                self.fail(error.message)
            except Exception as error:  # noqa: BLE001 - a defect must not cost a backup for good
                self._failing.goes_on(
                    "the connection to a backup failed", level="error", backup_id=self._info.backup_id, exc_info=error
                )
                self.fail("of a defect")
            finally:
                self.channel = None
                if channel is not None:
                    await channel.close()
            await asyncio.sleep(RECONNECT_S)

    async def _use(self, channel: FrameChannel) -> None:
        backup_id = self._info.backup_id
        self.channel = channel
        await self._replicator.introduce(channel, backup_id)
        connected = {"backup_id": backup_id, "transport": channel.transport}
        if not self._away.over("backup connected", **connected) and not self._connected:
            log.info("backup connected", **connected)
        self._connected = True
        await self._replicator.ask_what_it_has(channel, backup_id)
        await channel.wait_closed()
        self.fail("the connection was closed")
