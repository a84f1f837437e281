"""The SDK's descriptions of the control plane: moves of streamlets, load, drains and recoveries. Immutable values."""

from __future__ import annotations

from dataclasses import dataclass

from kera.client.types import StreamDescription
from kera.core.rpc.wire import error_from_message
from kera.v1 import coordinator_pb2

_PHASES = {value: name.removeprefix("RECOVERY_PHASE_").lower() for name, value in coordinator_pb2.RecoveryPhase.items()}
"""A newer coordinator may have others."""


@dataclass(frozen=True, slots=True)
class MoveResult:
    """A streamlet that has another owner."""

    stream: StreamDescription
    """As it is now."""
    stall_us: int
    """For how long no broker took chunks for the streamlet."""


@dataclass(frozen=True, slots=True)
class StreamletMove:
    """A move that rebalancing has made, or would make."""

    stream: str
    streamlet_id: int
    from_broker_id: int
    to_broker_id: int
    reason: str
    """Why, in words."""
    error: str | None = None
    """Why it was not carried out; None: it was, or nobody tried."""

    @classmethod
    def from_message(cls, message: coordinator_pb2.Move) -> StreamletMove:
        """From its wire form."""
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
    """Appended and read, as of its last heartbeat."""
    streamlets: int
    bytes_per_s_after: int
    streamlets_after: int
    busy: float = 0.0
    """Share of the time for which its event loop works for these streamlets; 0 unless all brokers report it."""
    busy_after: float = 0.0

    @classmethod
    def from_message(cls, message: coordinator_pb2.BrokerLoad) -> BrokerLoad:
        """From its wire form."""
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
    """How far the emptying of a broker or a backup is."""

    done: bool
    """It can be stopped: nothing that is in use is there any more."""
    streamlets_owned: int
    """Streamlets that a broker still takes chunks for."""
    streamlets_held: int
    """Streamlets of which a broker has older groups."""
    replicas: int
    """For a backup: its replicas."""
    reasons: list[str]
    """The remaining parts, and the reasons why they remain, in words."""
    draining: bool = True
    """It is being emptied, or is empty; false: it is in service."""

    @classmethod
    def from_message(cls, message: coordinator_pb2.DrainResponse) -> DrainStatus:
        """From its wire form."""
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
    """A recovery: what launches of a broker before an epoch had goes to other brokers.

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
    """All streamlets have an owner that takes chunks."""
    readable_us: int
    """All data can be read again."""
    restored_us: int
    """All data has its replicas again."""
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
    """Records that no replica has, though they may have been acknowledged."""

    @classmethod
    def from_message(cls, message: coordinator_pb2.RecoveryInfo) -> RecoveryDescription:
        """From its wire form."""
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
