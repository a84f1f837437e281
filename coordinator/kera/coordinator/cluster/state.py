"""The state that all parts of the coordinator share: metadata, members, connections, and the way to make changes.

Changes are made one at a time: the maker of a change holds `State.changing` from the decision to the end of the write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from kera.coordinator.cluster.backup_calls import BackupCalls
from kera.coordinator.cluster.broker_calls import BrokerCalls
from kera.coordinator.cluster.catalog import Catalog
from kera.coordinator.cluster.changing import REQUESTER, Changing
from kera.coordinator.cluster.feature_level import FEATURE_LEVEL_KEY
from kera.coordinator.cluster.keys import STREAMS, forgotten_prefix, last_epoch, members_prefix, stream_key
from kera.coordinator.cluster.member_kinds import BACKUP, BROKER
from kera.coordinator.cluster.membership import BackupMembers, BrokerMembers, Membership
from kera.coordinator.cluster.recovering import as_told_to
from kera.coordinator.cluster.validation import config_of_store
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.ledger import Ledger
from kera.coordinator.store.metadata import MetadataStoreFailed, VersionConflict
from kera.coordinator.store.metadata_copy import CLUSTER_ID
from kera.coordinator.store.numbers import instances_by, next_epoch, next_id
from kera.core.base.clock import Clock
from kera.core.base.telemetry import get_logger
from kera.core.base.turns import TimeSlices, Turns
from kera.core.errors import KeraError, Unavailable, UnknownStream, invariant
from kera.server.access.guard import check_caller
from kera.v1 import common_pb2

log = get_logger("kera.coordinator")

T = TypeVar("T")


class State:
    """The coordinator's metadata, members and connections. It writes one change at a time."""

    def __init__(
        self,
        ledger: Ledger,
        broker_calls: BrokerCalls,
        backup_calls: BackupCalls,
        clock: Clock,
        settings: CoordinatorSettings,
        coordinator_epoch: int,
    ) -> None:
        self.ledger = ledger
        self.broker_calls = broker_calls
        self.backup_calls = backup_calls
        self.clock = clock
        self.settings = settings
        self.coordinator_epoch = coordinator_epoch
        self.catalog = Catalog()
        times = {
            "heartbeat_interval_ms": settings.heartbeat_interval_ms,
            "heartbeats_missed_max": settings.heartbeats_missed_max,
            "restart_grace_ms": settings.restart_grace_ms,
        }
        self.brokers: BrokerMembers = Membership(BROKER, clock, **times)
        self.backups: BackupMembers = Membership(BACKUP, clock, **times)
        self.changing = Changing()
        self.turns = Turns()
        """The turns of long work, which runs in slices."""
        self.lost: asyncio.Future[KeraError] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once memory may differ from the store: another coordinator has written, or the outcome
        of a write is unknown. This coordinator must not act any more.
        """
        self._numbers_from_us = clock.now_us() + 1_000_000
        self.catching_up = ""
        """The reason to wait for members, while the metadata may be older than the cluster (``restored``); empty: they
        are not.

        Meanwhile the coordinator decides nothing by the metadata about streams that may have changed without them.
        """
        self._operations: set[asyncio.Task[Any]] = set()
        self._untold: dict[int, set[int]] = {}
        """Brokers that have yet to learn of a stream's current version, by the stream's id."""
        self._gates: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @property
    def cluster_id(self) -> str:
        """The cluster's id, made once when the cluster is created."""
        value = self.ledger.get(CLUSTER_ID)
        invariant(value is not None, "a cluster has an id")
        return (value or b"").decode()

    @property
    def feature_level(self) -> int:
        """The highest level that all members and coordinators have had at one time.

        A member with a lower level cannot join: see ``feature_levels``.
        """
        return self.ledger.last_number(FEATURE_LEVEL_KEY)

    def pace(self) -> TimeSlices:
        """Return the pace for work that may be long: call `step` often.

        State may change during a step, so read it again afterwards.
        """
        return self.turns.pace(REQUESTER.get())

    async def in_slices(self, steps: Generator[None, None, T]) -> T:
        """Run `steps` to their end at that pace, and return their result."""
        return await self.pace().run(steps)

    def check_caught_up(self) -> None:
        """Raise `Unavailable` while the metadata may be older than the cluster."""
        if self.catching_up:
            raise Unavailable(self.catching_up)

    def next_id(self, counter: str) -> int:
        """Return an id that was never given, see ``kera.coordinator.store.numbers``; writing it takes it."""
        return next_id(self.ledger.last_number(counter), self._numbers_us())

    def next_epoch(self, noun: str) -> int:
        """Return the epoch of a launch of this kind, never given before; writing it takes it."""
        return next_epoch(self.ledger.last_number(last_epoch(noun)), self._numbers_us())

    def number_after(self, last: int) -> int:
        """Return the number of the version after `last`, never given before; writing it takes it."""
        return next_epoch(last, self._numbers_us())

    def instances_by_now(self) -> int:
        """See `instances_by`."""
        return instances_by(self.clock.now_us())

    def _numbers_us(self) -> int:
        """Return the time for numbers: later than the second in which this coordinator started.

        In that second, numbers may have been given that are missing in metadata which were restored since.
        """
        return max(self.clock.now_us(), self._numbers_from_us)

    def load(self) -> None:
        """Load members and streams from the ledger."""
        for members in (self.brokers, self.backups):
            noun = members.kind.noun
            members.load(self.ledger.values(members_prefix(noun)), self.ledger.values(forgotten_prefix(noun)))
        for value in self.ledger.values(STREAMS):
            stream = common_pb2.StreamInfo.FromString(value)
            stream.config.CopyFrom(config_of_store(stream.config))
            self.catalog.add(stream)

    async def write(self, changes: Mapping[str, bytes | None], streams: Iterable[common_pb2.StreamInfo] = ()) -> None:
        """Write `changes` and new versions of `streams`, all or none; then update the catalog.

        `changing` is held. Raises the store's errors; then `lost` may be done.
        """
        streams, values, pace = list(streams), dict[str, bytes](), self.pace()
        for stream in streams:
            await pace.step()
            values[stream_key(stream.stream_id)] = stream.SerializeToString()
        if not changes and not values:
            return
        await self._stored(self.ledger.write({**changes, **values}))
        for stream in streams:
            self.catalog.add(stream)
            await pace.step()

    async def restore(self, versions: Mapping[str, int]) -> None:
        """See `Ledger.restore`. `changing` is held. Raises the store's errors; then `lost` may be done."""
        await self._stored(self.ledger.restore(versions))

    async def _stored(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            await writing
        except (VersionConflict, MetadataStoreFailed) as error:
            if not self.lost.done():
                log.error("this coordinator stops: its memory may differ from the store", error=error.message)
                self.lost.set_result(error)
            raise

    async def change(self, operation: Coroutine[Any, Any, T], *, for_caller: bool = False) -> T:
        """Run `operation` to its end while nothing else changes anything.

        `for_caller`: only if the caller is still authenticated when its turn comes. Raises `AuthenticationFailed`.
        """

        async def alone() -> T:
            async with self.changing:
                if for_caller:
                    try:
                        check_caller()
                    except KeraError:
                        operation.close()
                        raise
                return await operation

        return await self.to_the_end(alone())

    async def to_the_end(self, operation: Coroutine[Any, Any, T]) -> T:
        """Wait for `operation`, which continues if the wait is cancelled, as gRPC does when a caller gives up."""
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_ended_unseen)
            raise

    async def close(self) -> None:
        """Wait until the changes that have begun end, which takes bounded time."""
        if self._operations:
            await asyncio.wait(self._operations)

    # --- telling brokers ---------------------------------------------------------------------------------------

    def gate(self, stream_id: int) -> asyncio.Lock:
        """Return the lock to hold while sending a stream to brokers; a move holds it from the seal to its end.

        A broker that receives a stream in which it owns a streamlet accepts chunks for it, even if it has just sealed
        it.
        """
        return self._gates.setdefault(stream_id, asyncio.Lock())

    def brokers_of(self, stream: common_pb2.StreamInfo) -> list[common_pb2.BrokerInfo]:
        """Return the brokers that have streamlets of `stream`, or older groups of some."""
        return [self.brokers.describe(broker_id) for broker_id in self.catalog.holders(stream)]

    async def open(
        self, broker_id: int, stream: common_pb2.StreamInfo, handed_over: Sequence[common_pb2.StreamletState] = ()
    ) -> list[int]:
        """Have a broker serve its streamlets of a stream; `gate` is held. Raises the broker's error.

        See `BrokerCalls.open_streamlets`.
        """
        broker, leads = self.brokers.describe(broker_id), self.coordinator_epoch
        told = as_told_to(self.ledger, broker_id, stream)
        lacking = await self.broker_calls.open_streamlets(
            broker, told, coordinator_epoch=leads, handed_over=handed_over
        )
        if stream.stream_id not in self.catalog:
            # The stream was deleted meanwhile: a broker that had dropped it before has opened it anew.
            await self.broker_calls.drop_stream(broker, stream.stream_id, coordinator_epoch=leads)
        return lacking

    async def tell(self, stream: common_pb2.StreamInfo, *, otherwise: str, also: Iterable[int] = ()) -> None:
        """Send its brokers, and the brokers in `also`, the stream's current version, if the stream still exists.

        A failed call is repeated once the broker can be reached, see `tell_again`, or the broker learns the version
        when it registers anew.
        """
        failed = await self._tell(stream.stream_id, lambda now: {*self.catalog.holders(now), *also})
        for broker_id, error in failed.items():
            log.warning(otherwise, stream_id=stream.stream_id, broker_id=broker_id, error=str(error))

    def tell_later(self, stream_id: int, broker_id: int) -> None:
        """Note that a broker has yet to learn of a stream's current version: see `tell_again`."""
        self._untold.setdefault(stream_id, set()).add(broker_id)

    def untold(self) -> list[int]:
        """Return the streams of which a living broker has yet to learn the current version."""
        for stream_id in [stream_id for stream_id in self._untold if stream_id not in self.catalog]:
            del self._untold[stream_id]
        return [stream_id for stream_id, late in self._untold.items() if any(map(self.brokers.is_alive, late))]

    async def tell_again(self, stream_id: int) -> None:
        """Send a stream again to the brokers that missed it. Raises `Unavailable` if one still cannot be reached."""
        failed = await self._tell(
            stream_id, lambda _: set(filter(self.brokers.is_alive, self._untold.get(stream_id, ())))
        )
        for broker_id, error in failed.items():
            raise Unavailable(f"broker {broker_id} has yet to hear of a change of stream {stream_id}: {error}")

    async def _tell(
        self, stream_id: int, whom: Callable[[common_pb2.StreamInfo], set[int]]
    ) -> dict[int, BaseException]:
        """Send a stream's current version, if it still exists; return the error of each broker that failed."""
        async with self.gate(stream_id):
            try:
                now = self.catalog.with_id(stream_id)
            except UnknownStream:
                return {}
            told = [broker_id for broker_id in sorted(whom(now)) if not self.brokers.is_fenced(broker_id)]
            results = await all_of(
                self.broker_calls.open_streamlets(
                    self.brokers.describe(broker_id),
                    as_told_to(self.ledger, broker_id, now),
                    coordinator_epoch=self.coordinator_epoch,
                )
                for broker_id in told
            )
            failed = {broker_id: error for broker_id, error in zip(told, results, strict=True) if error is not None}
            late = self._untold.pop(stream_id, set()).difference(told).union(failed)
            if late:
                self._untold[stream_id] = late
        return failed


async def all_of(calls: Iterable[Coroutine[Any, Any, object]]) -> list[BaseException | None]:
    """Wait for all calls; return the error of each, or None."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [one if isinstance(one, BaseException) else None for one in results]


def _ended_unseen(task: asyncio.Task[Any]) -> None:
    """Log the failure of an operation for which no caller waits any more."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, KeraError):
        log.warning("an operation whose caller is gone has failed", error=error.message)
    elif error is not None:
        log.error("an operation whose caller is gone has failed", exc_info=error)
