"""Shared by all parts of the coordinator: the metadata, the members, the connections to them, and the way to make
changes.

Changes are made one at a time: whoever makes one holds `State.changing` from the decision to the end of the write.
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
        """Turns of long work, which is done in slices."""
        self.lost: asyncio.Future[KeraError] = asyncio.get_running_loop().create_future()
        """Done once memory may not be what is in the store, for the reason it has: another coordinator has written, or
        nobody knows whether a write was carried out. This one must not act any more."""
        self._numbers_from_us = clock.now_us() + 1_000_000
        self.catching_up = ""
        """The members that it waits for, as the metadata may be older than the cluster (``restored``); empty: they are
        not. Meanwhile nothing is decided by the metadata about streams that may have gone on without them."""
        self._operations: set[asyncio.Task[Any]] = set()
        self._untold: dict[int, set[int]] = {}
        """Brokers that have yet to hear of a stream as it is now, by its id."""
        self._gates: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @property
    def cluster_id(self) -> str:
        """Made once, with the cluster."""
        value = self.ledger.get(CLUSTER_ID)
        invariant(value is not None, "a cluster has an id")
        return (value or b"").decode()

    @property
    def feature_level(self) -> int:
        """The level that all members and coordinators had once; a member with a lower one cannot join: see
        ``feature_levels``.
        """
        return self.ledger.last_number(FEATURE_LEVEL_KEY)

    def pace(self) -> TimeSlices:
        """For work that may be long: call `step` often. What was looked up before a step may not hold after it."""
        return self.turns.pace(REQUESTER.get())

    async def in_slices(self, steps: Generator[None, None, T]) -> T:
        """Drive steps to their end, and return what they return; likewise."""
        return await self.pace().run(steps)

    def check_caught_up(self) -> None:
        """Raise `Unavailable` while the metadata may be older than the cluster."""
        if self.catching_up:
            raise Unavailable(self.catching_up)

    def next_id(self, counter: str) -> int:
        """An id that was never given, see ``kera.coordinator.store.numbers``; it is taken by writing it."""
        return next_id(self.ledger.last_number(counter), self._numbers_us())

    def next_epoch(self, noun: str) -> int:
        """The epoch of a launch of this kind, likewise."""
        return next_epoch(self.ledger.last_number(last_epoch(noun)), self._numbers_us())

    def number_after(self, last: int) -> int:
        """The number of a version after the one that was given last, likewise."""
        return next_epoch(last, self._numbers_us())

    def instances_by_now(self) -> int:
        """See `instances_by`."""
        return instances_by(self.clock.now_us())

    def _numbers_us(self) -> int:
        """The clock that numbers go by: not in the second in which this coordinator has begun.

        In that one the last numbers may have been given that are not in metadata which were put back since.
        """
        return max(self.clock.now_us(), self._numbers_from_us)

    def load(self) -> None:
        """Take up what the ledger has of members and streams."""
        for members in (self.brokers, self.backups):
            noun = members.kind.noun
            members.load(self.ledger.values(members_prefix(noun)), self.ledger.values(forgotten_prefix(noun)))
        for value in self.ledger.values(STREAMS):
            stream = common_pb2.StreamInfo.FromString(value)
            stream.config.CopyFrom(config_of_store(stream.config))
            self.catalog.add(stream)

    async def write(self, changes: Mapping[str, bytes | None], streams: Iterable[common_pb2.StreamInfo] = ()) -> None:
        """Write `changes` and new versions of `streams`, all or none; then the streams are what is seen here.

        `changing` is held. Raises what the store raises; then `lost` may be done.
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
        """See `Ledger.restore`; likewise."""
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
        """Do `operation` while nothing else changes anything, to its end.

        `for_caller`: only if whoever has asked for it still may, when it is its turn. Raises `AuthenticationFailed`.
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
        """Wait for `operation`, which goes on if the wait is cancelled. gRPC cancels when a caller gives up."""
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_ended_unseen)
            raise

    async def close(self) -> None:
        """Let changes that have begun end, which takes bounded time."""
        if self._operations:
            await asyncio.wait(self._operations)

    # --- telling brokers ---------------------------------------------------------------------------------------

    def gate(self, stream_id: int) -> asyncio.Lock:
        """To be held while brokers are told of a stream: a move holds it from the seal to its end.

        A broker that is told that it owns a streamlet takes chunks for it, also one that it has just sealed.
        """
        return self._gates.setdefault(stream_id, asyncio.Lock())

    def brokers_of(self, stream: common_pb2.StreamInfo) -> list[common_pb2.BrokerInfo]:
        """The brokers that have streamlets of `stream`, or older groups of some."""
        return [self.brokers.describe(broker_id) for broker_id in self.catalog.holders(stream)]

    async def open(
        self, broker_id: int, stream: common_pb2.StreamInfo, handed_over: Sequence[common_pb2.StreamletState] = ()
    ) -> list[int]:
        """Have a broker serve its streamlets of a stream; `gate` is held. Raises what the broker answers.

        See `BrokerCalls.open_streamlets`.
        """
        broker, leads = self.brokers.describe(broker_id), self.coordinator_epoch
        told = as_told_to(self.ledger, broker_id, stream)
        lacking = await self.broker_calls.open_streamlets(
            broker, told, coordinator_epoch=leads, handed_over=handed_over
        )
        if stream.stream_id not in self.catalog:
            # It was deleted meanwhile: a broker that was told to drop it before has opened it anew.
            await self.broker_calls.drop_stream(broker, stream.stream_id, coordinator_epoch=leads)
        return lacking

    async def tell(self, stream: common_pb2.StreamInfo, *, otherwise: str, also: Iterable[int] = ()) -> None:
        """Tell its brokers, and those in `also`, of a stream as it is now, if it still is there.

        A broker that cannot be told is told when it can be, see `tell_again`, or learns it when it registers anew.
        """
        failed = await self._tell(stream.stream_id, lambda now: {*self.catalog.holders(now), *also})
        for broker_id, error in failed.items():
            log.warning(otherwise, stream_id=stream.stream_id, broker_id=broker_id, error=str(error))

    def tell_later(self, stream_id: int, broker_id: int) -> None:
        """A broker has yet to be told of a stream as it is now: see `tell_again`."""
        self._untold.setdefault(stream_id, set()).add(broker_id)

    def untold(self) -> list[int]:
        """The streams of which somebody can be told now who could not be before."""
        for stream_id in [stream_id for stream_id in self._untold if stream_id not in self.catalog]:
            del self._untold[stream_id]
        return [stream_id for stream_id, late in self._untold.items() if any(map(self.brokers.is_alive, late))]

    async def tell_again(self, stream_id: int) -> None:
        """Tell those of a stream who could not be told before. Raises `Unavailable` if one still cannot be."""
        failed = await self._tell(
            stream_id, lambda _: set(filter(self.brokers.is_alive, self._untold.get(stream_id, ())))
        )
        for broker_id, error in failed.items():
            raise Unavailable(f"broker {broker_id} has yet to hear of a change of stream {stream_id}: {error}")

    async def _tell(
        self, stream_id: int, whom: Callable[[common_pb2.StreamInfo], set[int]]
    ) -> dict[int, BaseException]:
        """Tell of a stream as it is now, if it still is there; the error of each broker that could not be told."""
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
    """Wait for all calls; the error of each, or None."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [one if isinstance(one, BaseException) else None for one in results]


def _ended_unseen(task: asyncio.Task[Any]) -> None:
    """Nobody waits for an operation any more: what has become of it is told here."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, KeraError):
        log.warning("an operation whose caller is gone has failed", error=error.message)
    elif error is not None:
        log.error("an operation whose caller is gone has failed", exc_info=error)
