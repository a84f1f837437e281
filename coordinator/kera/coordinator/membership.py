"""Who belongs to the cluster, which launch of each broker is the current one, and who is alive. No I/O, no waiting.

Invariants:

1. A broker id is given once. A broker that starts again and says who it is keeps its id.
2. Every launch of every broker has an epoch of its own, greater than all before it.
3. Of each broker one launch is current. Heartbeats of others are refused, which makes them end (fencing).

A broker is alive while its last heartbeat is younger than `heartbeats_missed_max` intervals. One that is not alive
stays a member with all its streamlets: taking them away from it is recovery, which this version does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from kera.core.clock import Clock
from kera.core.errors import InvalidArgument, StaleEpoch
from kera.v1 import common_pb2, coordinator_pb2


@dataclass(frozen=True, slots=True)
class Registration:
    """What a registration amounts to, decided but not done."""

    record: coordinator_pb2.RegisterBrokerRequest
    """The request with id and epoch filled in: this is what is stored for each broker."""
    new_broker: bool
    """It takes a new broker id."""
    new_launch: bool
    """It takes a new epoch. What of its data the broker still has, it finds out itself."""
    changed: bool
    """The record differs from the stored one; if not, this is a repeated request."""


@dataclass(slots=True)
class _Member:
    record: coordinator_pb2.RegisterBrokerRequest
    heard_s: float
    """When the broker was last heard of, on the monotonic clock."""


class Membership:
    """The brokers of the cluster."""

    def __init__(self, clock: Clock, *, heartbeat_interval_ms: int, heartbeats_missed_max: int) -> None:
        self._clock = clock
        self._silence_max_s = heartbeat_interval_ms * heartbeats_missed_max / 1000
        self._members: dict[int, _Member] = {}

    def restore(self, record: coordinator_pb2.RegisterBrokerRequest) -> None:
        """Take up a stored broker. It counts as just heard of: that we were away says nothing about it."""
        self._members[record.broker.broker_id] = _Member(record, self._clock.monotonic_s())

    def decide(
        self, request: coordinator_pb2.RegisterBrokerRequest, *, next_broker_id: int, next_epoch: int
    ) -> Registration:
        """What `request` amounts to; nothing changes. Raises `InvalidArgument`."""
        if not request.launch_id:
            raise InvalidArgument("a registration needs a launch_id, unique for each launch of the broker")
        if not request.broker.grpc_address:
            raise InvalidArgument("a registration needs the broker's grpc_address")
        known = self._known(request)
        new_launch = known is None or known.launch_id != request.launch_id
        record = coordinator_pb2.RegisterBrokerRequest()
        record.CopyFrom(request)
        record.broker.broker_id = known.broker.broker_id if known else next_broker_id
        record.broker.broker_epoch = next_epoch if known is None or new_launch else known.broker.broker_epoch
        record.broker.alive = False  # never stored; see `describe`
        return Registration(record, new_broker=known is None, new_launch=new_launch, changed=record != known)

    def _known(self, request: coordinator_pb2.RegisterBrokerRequest) -> coordinator_pb2.RegisterBrokerRequest | None:
        broker_id = request.broker.broker_id
        if broker_id in self._members:
            return self._members[broker_id].record
        if broker_id:
            raise InvalidArgument(
                f"no broker of this cluster has id {broker_id}: the broker's data directory belongs to another cluster;"
                " name that cluster's coordinator, or start the broker with an empty data directory",
                broker_id=broker_id,
            )
        # A new broker repeats its registration when the answer is lost; it must not become two.
        repeated = (member.record for member in self._members.values() if member.record.launch_id == request.launch_id)
        return next(repeated, None)

    def admit(self, registration: Registration) -> common_pb2.BrokerInfo:
        """Do what was decided, once it is stored."""
        self.restore(registration.record)
        return self.describe(registration.record.broker.broker_id)

    def heartbeat(self, broker_id: int, broker_epoch: int) -> None:
        """A broker says that it lives. Raises `StaleEpoch` unless it is the current launch of a broker we know."""
        member = self._members.get(broker_id)
        current = member.record.broker.broker_epoch if member else None
        if member is None or current != broker_epoch:
            raise StaleEpoch(
                f"launch {broker_epoch} of broker {broker_id} is not the current one ({current}); it must end",
                broker_id=broker_id,
                broker_epoch=broker_epoch,
                current_epoch=current,
            )
        member.heard_s = self._clock.monotonic_s()

    def epoch(self, broker_id: int) -> int:
        """The epoch of the broker's current launch."""
        return self._members[broker_id].record.broker.broker_epoch

    def is_alive(self, broker_id: int) -> bool:
        """Whether the broker was heard of recently."""
        return self._clock.monotonic_s() - self._members[broker_id].heard_s <= self._silence_max_s

    def describe(self, broker_id: int) -> common_pb2.BrokerInfo:
        """A copy of what is known of the broker, with its state of now."""
        info = common_pb2.BrokerInfo()
        info.CopyFrom(self._members[broker_id].record.broker)
        info.alive = self.is_alive(broker_id)
        return info

    def broker_ids(self) -> list[int]:
        """All brokers that ever were."""
        return sorted(self._members)

    def live_ids(self) -> list[int]:
        """All brokers that are alive."""
        return [broker_id for broker_id in self.broker_ids() if self.is_alive(broker_id)]
