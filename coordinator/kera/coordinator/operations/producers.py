"""Named producers: the id of a name, the first epochs of its instances, and the fencing of earlier ones.

A name keeps its id forever, so that its chunks go to the same entries, and brokers find what they know of it. Each
instance gets a share of `PRODUCER_EPOCHS` epochs, above all that were given before. Whatever epoch a lane of an earlier
instance has reached, the epochs of a later one are above it, and brokers refuse the earlier one.

A streamlet learns of an instance from its first chunk, and may forget it. So brokers also learn from which epoch on
they may accept chunks of a name (its *fence*): all fences when they register, new ones with the answers to their
heartbeats. Their heartbeats report up to which *version* they have noted them. A version counts the fences of one
coordinator, above its epoch; a broker with the version of another coordinator gets all fences. A new instance is
answered once all living brokers have noted its fence. A broker that is away learns it before it serves again, or with
its first heartbeat.

Records: ``producers/<name>`` → ProducerRecord: the id, the first epoch of the latest instance, and who asked first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple
from urllib.parse import quote, unquote

from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.shares import NO_SHARES, PRODUCER_NAMES, Shares
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.validation import checked_producer_name
from kera.coordinator.ids import Launch
from kera.coordinator.operations.producer_owners import LAST_PRODUCER_ID, ProducerOwners, caller_principal
from kera.coordinator.store.ledger import number
from kera.core.base.ids import PRODUCER_EPOCHS
from kera.core.errors import InvalidArgument, Unavailable
from kera.core.rpc import api
from kera.v1 import coordinator_pb2

PRODUCERS = "producers/"
NAMES_MAX = 100_000
"""Maximum of names. They are never removed, as any may come back, and each takes memory of the coordinator."""
FIRST_EPOCH = 1
_EPOCH_MAX = (1 << 32) - 1
"""The maximum that fits into a chunk's header."""
_COORDINATOR_SHIFT = 32
"""Shift of the coordinator's epoch in a version."""


class Instance(NamedTuple):
    """A producer's id, and the first epoch of one of its instances."""

    producer_id: int
    first_epoch: int

    @property
    def message(self) -> coordinator_pb2.InitProducerResponse:
        """The response for the client."""
        return coordinator_pb2.InitProducerResponse(producer_id=self.producer_id, producer_epoch=self.first_epoch)

    def record(self, created_by: str) -> bytes:
        """Return the record to store."""
        return coordinator_pb2.ProducerRecord(
            producer_id=self.producer_id, producer_epoch=self.first_epoch, created_by=created_by
        ).SerializeToString()


def record_key(name: str) -> str:
    """Return the key of a name's record."""
    return PRODUCERS + quote(name, safe="")


def successor(name: str, last: Instance, instances: int = 0) -> Instance:
    """Return the instance after `last`, whose epochs are also above those of `instances` earlier ones.

    Raises `InvalidArgument` if the epochs of the name are used up.
    """
    first_epoch = max(last.first_epoch + PRODUCER_EPOCHS, FIRST_EPOCH + instances * PRODUCER_EPOCHS)
    if first_epoch + PRODUCER_EPOCHS - 1 > _EPOCH_MAX:
        raise InvalidArgument(
            f"there have been {last.first_epoch // PRODUCER_EPOCHS + 1} producers with the name {name!r}, and their"
            " epochs are used up; take another name",
            name=name,
        )
    return Instance(last.producer_id, first_epoch)


def check_room(name: str, names: int) -> None:
    """Raise `InvalidArgument` if there is no room for another name."""
    if names >= NAMES_MAX:
        raise InvalidArgument(
            f"no room for a producer with the new name {name!r}: there are {names} names already; only a"
            " producer that restarts needs a name",
            name=name,
            limit=NAMES_MAX,
        )


class ProducerFence(NamedTuple):
    """The epoch from which on brokers accept chunks of a producer."""

    version: int
    first_epoch: int


class Producers:
    """Gives out producers. Belongs to one coordinator."""

    def __init__(self, state: State, shares: Shares = NO_SHARES) -> None:
        self._state = state
        self._shares = shares
        self._names: dict[int, str] = {}
        """Names of producers, by id."""
        self._named_by: Counter[str] = Counter()
        """The number of names that each principal was the first to ask for."""
        self.owners = ProducerOwners(state, self.name_of)
        self._version = state.coordinator_epoch << _COORDINATOR_SHIFT
        self._fences: dict[int, ProducerFence] = {}
        """The fences of producers with several instances; the newest is the last one."""
        self._noted: dict[int, tuple[int, int]] = {}
        """For each broker, the epoch of its last launch that sent a heartbeat, and its version."""
        self._heard = asyncio.Event()
        self._closed = False

    def load(self) -> None:
        """Load names and fences from the ledger."""
        self.owners.load()
        for key in self._state.ledger.children(PRODUCERS.rstrip("/")):
            record = coordinator_pb2.ProducerRecord.FromString(self._state.ledger.get(key) or b"")
            self._names[record.producer_id] = unquote(key.removeprefix(PRODUCERS))
            self._named_by[record.created_by] += 1
            if record.producer_epoch > FIRST_EPOCH:
                self._fence(record.producer_id, record.producer_epoch)

    def close(self) -> None:
        """End all waits for brokers."""
        self._closed = True
        self._heard.set()

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.INIT_PRODUCER: self._answer_init, **self.owners.handlers()}

    def name_of(self, producer_id: int) -> str | None:
        """Return the name of a producer; None: it has none."""
        return self._names.get(producer_id)

    async def _answer_init(self, request: coordinator_pb2.InitProducerRequest) -> coordinator_pb2.InitProducerResponse:
        return (await self.init(request.name)).message

    async def init(self, name: str = "") -> Instance:
        """Return a new producer; with a name, once all living brokers refuse its earlier instances.

        Raises `InvalidArgument`; `Unavailable` if a broker does not confirm its fence in time.
        """
        giving_out = self._give_out(checked_producer_name(name) if name else "", caller_principal())
        instance = await self._state.change(giving_out, for_caller=True)
        if instance.first_epoch > FIRST_EPOCH:
            await self._noted_by_all(name, self._fences[instance.producer_id].version)
        return instance

    async def _give_out(self, name: str, principal: str) -> Instance:
        ledger = self._state.ledger
        key = record_key(name)
        known = ledger.get(key) if name else None
        if known is not None:
            last = coordinator_pb2.ProducerRecord.FromString(known)
            instance = successor(name, Instance(last.producer_id, last.producer_epoch), self._state.instances_by_now())
            await self._state.write({key: instance.record(last.created_by)})
            self._fence(*instance)
            return instance
        if not name:
            return Instance(await self.owners.give(principal), FIRST_EPOCH)
        check_room(name, len(self._names))
        self._shares.check(PRODUCER_NAMES, NAMES_MAX, principal, lambda: self._named_by[principal] + 1)
        instance = Instance(self._state.next_id(LAST_PRODUCER_ID), FIRST_EPOCH)
        record = instance.record(principal)
        await self._state.write({LAST_PRODUCER_ID: number(instance.producer_id), key: record})
        self._names[instance.producer_id] = name
        self._named_by[principal] += 1
        return instance

    # --- fences ------------------------------------------------------------------------------------------------

    def _fence(self, producer_id: int, first_epoch: int) -> None:
        self._version += 1
        self._fences.pop(producer_id, None)
        self._fences[producer_id] = ProducerFence(self._version, first_epoch)

    def fences(self, version: int = 0) -> coordinator_pb2.ProducerFences | None:
        """Return the fences that are newer than a broker's `version`; None: there are none."""
        if version == self._version:
            return None
        if version >> _COORDINATOR_SHIFT != self._state.coordinator_epoch:
            version = 0
        message = coordinator_pb2.ProducerFences(version=self._version)
        for producer_id, fence in reversed(self._fences.items()):
            if fence.version <= version:
                break
            message.producer_ids.append(producer_id)
            message.first_epochs.append(fence.first_epoch)
        return message

    def noted(self, broker: Launch, version: int) -> None:
        """Note that a broker has all fences up to a version."""
        self._noted[broker.member_id] = (broker.epoch, version)
        self._heard.set()

    async def _noted_by_all(self, name: str, version: int) -> None:
        settings = self._state.settings
        try:
            # By then a broker without heartbeats is dead.
            async with asyncio.timeout((settings.lease_ms + settings.heartbeat_interval_ms) / 1000):
                while self._lacking(version) and not self._closed:
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            pass
        if lacking := self._lacking(version):
            raise Unavailable(
                f"broker {lacking[0]} has not said yet that it refuses earlier producers with the name {name!r}; ask"
                " again",
                broker_ids=lacking,
                name=name,
            )

    def _lacking(self, version: int) -> list[int]:
        brokers = self._state.brokers
        return [
            broker_id
            for broker_id in brokers.live_ids()
            if self._noted.get(broker_id, (0, 0)) < (brokers.epoch(broker_id), version)
        ]
