"""The SDK's descriptions of the control plane: moves of streamlets, load, drains and recoveries. Immutable values."""

from __future__ import annotations

from dataclasses import dataclass

from kera.client.types import StreamDescription
from kera.core.rpc.wire import error_from_message
from kera.v1 import coordinator_pb2

_PHASES = {value: name.removeprefix("RECOVERY_PHASE_").lower() for name, value in coordinator_pb2.RecoveryPhase.items()}
"""Names of the phases of a recovery. A newer coordinator may have others."""


@dataclass(frozen=True, slots=True)
class MoveResult:
    """A streamlet that has another owner."""

    stream: StreamDescription
    """The stream after the move."""
    stall_us: int
    """Time during which no broker took chunks for the streamlet."""


@dataclass(frozen=True, slots=True)
class StreamletMove:
    """A move that rebalancing has made, or would make."""

    stream: str
    streamlet_id: int
    from_broker_id: int
    to_broker_id: int
    reason: str
    """The reason for the move, in words."""
    error: str | None = None
    """Why it was not carried out; None: it was, or it was not tried."""

    @classmethod
    def from_message(cls, message: coordinator_pb2.Move) -> StreamletMove:
        """Convert from the wire form."""
        return cls(
            stream=message.stream,
            streamlet_id=message.streamlet_id,
            from_broker_id=message.from_broker_id,
            to_broker_id=message.to_broker_id,
            reason=message.reason,
            error=error_from_message(message.error).message if message.HasField("error") else None,
        )


@dataclass(frozen=True, slots=True)
class BrokerLoad:
    """The load of a broker, before and after the moves."""

    broker_id: int
    bytes_per_s: int
    """Bytes appended and read per second, as of its last heartbeat."""
    streamlets: int
    bytes_per_s_after: int
    streamlets_after: int
    busy: float = 0.0
    """Share of time that its event loop works for these streamlets; 0 unless all brokers report it."""
    busy_after: float = 0.0

    @classmethod
    def from_message(cls, message: coordinator_pb2.BrokerLoad) -> BrokerLoad:
        """Convert from the wire form."""
        return cls(
            broker_id=message.broker_id,
            bytes_per_s=message.bytes_per_s,
            streamlets=message.streamlets,
            bytes_per_s_after=message.bytes_per_s_after,
            streamlets_after=message.streamlets_after,
            busy=message.busy_permille / 1000,
            busy_after=message.busy_permille_after / 1000,
        )


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """The moves of a rebalancing, done or planned."""

    moves: list[StreamletMove]
    loads: list[BrokerLoad]


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """The progress of emptying a broker or a backup."""

    done: bool
    """Whether it can be stopped, because no part of it is in use any more."""
    streamlets_owned: int
    """Number of streamlets that a broker still takes chunks for."""
    streamlets_held: int
    """Number of streamlets whose older groups a broker has."""
    replicas: int
    """For a backup: the number of its replicas."""
    reasons: list[str]
    """The remaining parts, and the reasons why they remain, in words."""
    draining: bool = True
    """Whether it is being emptied, or is empty; false: it is in service."""

    @classmethod
    def from_message(cls, message: coordinator_pb2.DrainResponse) -> DrainStatus:
        """Convert from the wire form."""
        return cls(
            done=message.done,
            streamlets_owned=message.streamlets_owned,
            streamlets_held=message.streamlets_held,
            replicas=message.replicas,
            reasons=list(message.reasons),
            draining=message.draining,
        )


@dataclass(frozen=True, slots=True)
class RecoveryDescription:
    """A recovery: other brokers take over the data of a broker's launches before an epoch.

    Times are microseconds since the Unix epoch, 0: not yet.
    """

    broker_id: int
    before_epoch: int
    cause: str
    """``dead``, ``reported``, ``lost memory`` or ``drained``."""
    phase: str
    """``fencing``, ``taking_over``, ``recovering``, ``restoring``, ``done`` or ``cancelled``."""
    detected_us: int
    fenced_us: int
    opened_us: int
    """Time when all streamlets had an owner that takes chunks."""
    readable_us: int
    """Time when all data could be read again."""
    restored_us: int
    """Time when all data had its replicas again."""
    bytes_total: int
    bytes_recovered: int
    bytes_restored: int
    streamlets_total: int
    streamlets_opened: int
    streamlets_readable: int
    streamlets_restored: int
    waits_for: list[str]
    owner_ids: list[int]
    records_lost: int
    """Number of records that no replica has, although they may have been acknowledged."""

    @classmethod
    def from_message(cls, message: coordinator_pb2.RecoveryInfo) -> RecoveryDescription:
        """Convert from the wire form."""
        return cls(
            broker_id=message.broker_id,
            before_epoch=message.before_epoch,
            cause=message.cause,
            phase=_PHASES.get(message.phase, f"phase {message.phase}"),
            detected_us=message.detected_us,
            fenced_us=message.fenced_us,
            opened_us=message.opened_us,
            readable_us=message.readable_us,
            restored_us=message.restored_us,
            bytes_total=message.bytes_total,
            bytes_recovered=message.bytes_recovered,
            bytes_restored=message.bytes_restored,
            streamlets_total=message.streamlets_total,
            streamlets_opened=message.streamlets_opened,
            streamlets_readable=message.streamlets_readable,
            streamlets_restored=message.streamlets_restored,
            waits_for=list(message.waits_for),
            owner_ids=list(message.owner_ids),
            records_lost=message.records_lost,
        )
