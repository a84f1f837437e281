"""Latency constraints for clients: how late records may be on a path, and how late they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

from kera.client import arguments
from kera.client.cluster.cluster import Cluster
from kera.client.consuming.latency.batch_reports import BatchReports
from kera.core.errors import InvalidArgument, Uncertain, UnknownLatencyConstraint
from kera.core.latency.hop import Hop
from kera.core.latency.limits import LIMIT_US_MAX, LIMIT_US_MIN, WINDOW_MS_MAX, WINDOW_MS_MIN
from kera.core.rpc import api
from kera.v1 import latency_pb2 as messages

Statistic = Literal["mean", "p99"]
State = Literal["unknown", "held", "violated", "infeasible", "broken"]
WINDOW_MS = 15_000
"""Default window of a constraint."""
_STATISTICS: dict[str, messages.LatencyStatistic.ValueType] = {
    name: messages.LatencyStatistic.Value(f"LATENCY_STATISTIC_{name.upper()}") for name in get_args(Statistic)
}
_STATES: dict[int, State] = {
    messages.LatencyState.Value(f"LATENCY_STATE_{name.upper()}"): name for name in get_args(State)
}
_HOPS: dict[int, str] = {hop: hop.word for hop in Hop}


@dataclass(frozen=True, slots=True)
class LatencyConstraint:
    """How late records may be on a path: over any window the mean, or the 99th percentile, is at most the limit."""

    name: str
    path: tuple[str, ...]
    """Streams, alternating with ``group:`` and the consumer group that reads the stream before and writes to the one
    after."""
    limit_ms: float
    window_ms: int
    statistic: Statistic

    @classmethod
    def from_message(cls, message: messages.LatencyConstraint) -> Self:
        """Convert from the wire form."""
        is_p99 = message.statistic == messages.LATENCY_STATISTIC_P99
        return cls(
            message.name,
            tuple(message.path),
            message.limit_us / 1000,
            message.window_ms,
            "p99" if is_p99 else "mean",
        )


@dataclass(frozen=True, slots=True)
class LatencyHop:
    """A hop of records on their way through a stream, in the last window. Times are microseconds."""

    stream: str
    hop: str
    """``gather``, ``send``, ``replicate``, ``hand-over``, ``prefetch`` or ``work``."""
    consumer_group: str
    """The reading consumer group; empty for the first three hops."""
    chunks: int
    """Number of measured chunks; 0: nothing is known."""
    mean_us: int
    p99_us: int
    worst_mean_us: int
    """Mean of the worst streamlet."""
    worst_streamlet_id: int
    allowed_us: int
    """Its part of the limit."""
    advised_us: int
    """The part of `allowed_us` that its buffer is advised to wait."""
    violates: bool
    """Whether it takes more than its part, and the path more than the limit."""
    clock_error_us: int = 0
    """For hand-over: the possible error of the mean, from the error of the clocks; 0: unknown."""
    own_linger_us: int = 0
    """For gather: the longest ``linger_ms`` that a producer has set itself, which overrides advice."""

    @classmethod
    def from_message(cls, message: messages.HopDescription) -> Self:
        """Convert from the wire form."""
        return cls(
            stream=message.stream,
            hop=_HOPS.get(message.hop, f"hop {message.hop}"),
            consumer_group=message.consumer_group,
            chunks=message.count,
            mean_us=message.mean_us,
            p99_us=message.p99_us,
            worst_mean_us=message.worst_mean_us,
            worst_streamlet_id=message.worst_streamlet_id,
            allowed_us=message.allowed_us,
            advised_us=message.advised_us,
            violates=message.violates,
            clock_error_us=message.clock_error_us,
            own_linger_us=message.own_linger_us,
        )


@dataclass(frozen=True, slots=True)
class LatencyDescription:
    """A constraint, and how late records are on its path. Times are microseconds."""

    constraint: LatencyConstraint
    state: State
    """``unknown``: nothing was measured in the last window; ``held``; ``violated``; ``infeasible``: it cannot be held
    even if no buffer waits; ``broken``: a stream of the path does not exist."""
    reason: str
    """The reason for the state, for people; may be empty."""
    mean_us: int
    """Sum of the means of all measured hops."""
    p99_us: int
    """Sum of the 99th percentiles of all measured hops: no less than that of the path."""
    least_limit_us: int
    """For an infeasible constraint: the smallest limit that could be held; else 0."""
    violations: int
    """Number of violated windows since the coordinator leads, or since the constraint was made."""
    hops: tuple[LatencyHop, ...]
    """Hops in the order of the path; empty in a list of constraints."""
    created_us: int = 0
    created_by: str = ""
    """Its creator, in the form of rules, ``user:alice``; empty without security."""
    changed_us: int = 0
    changed_by: str = ""
    worst_hop: LatencyHop | None = None
    """The measured hop that is furthest beyond its part, or, while the limit is held, the one that takes longest."""

    @classmethod
    def from_message(cls, message: messages.LatencyDescription) -> Self:
        """Convert from the wire form."""
        return cls(
            constraint=LatencyConstraint.from_message(message.constraint),
            state=_STATES.get(message.state, "unknown"),
            reason=message.reason,
            mean_us=message.mean_us,
            p99_us=message.p99_us,
            least_limit_us=message.least_limit_us,
            violations=message.violations,
            hops=tuple(map(LatencyHop.from_message, message.hops)),
            created_us=message.created_us,
            created_by=message.created_by,
            changed_us=message.changed_us,
            changed_by=message.changed_by,
            worst_hop=LatencyHop.from_message(message.worst_hop) if message.HasField("worst_hop") else None,
        )


class Latency:
    """Latency constraints. Get it as `Client.latency`.

    With security on, a user who may alter all streams of a path, and describe the consumer groups on it, may set
    constraints on it. A user who may describe all of them sees the constraint; for other users it does not exist.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def batch_reports(self, consumer_group: str) -> BatchReports:
        """Return an object that reports the batches of a query to brokers, under the name `consumer_group`."""
        return BatchReports(self._cluster, consumer_group)

    async def create(
        self,
        name: str,
        path: Sequence[str],
        limit_ms: float,
        *,
        window_ms: int = WINDOW_MS,
        statistic: Statistic = "mean",
    ) -> LatencyConstraint:
        """Limit how late records may be on a path: ``["clicks", "group:enrich", "visits", "group:dashboard"]``.

        Its streams must exist, and its consumer groups must read them already. If the same constraint exists, returns
        it. Raises `InvalidArgument`, `UnknownStream`, `LatencyConstraintExists` and `NotAllowed`.
        """
        constraint = messages.LatencyConstraint(
            name=_name(name),
            path=arguments.names("path", path),
            limit_us=_limit_us(limit_ms),
            window_ms=_window(window_ms),
            statistic=_statistic(statistic),
        )
        request = messages.CreateLatencyConstraintRequest(constraint=constraint)
        answer = await self._cluster.ask(api.CREATE_LATENCY_CONSTRAINT, request)
        return LatencyConstraint.from_message(answer.constraint)

    async def alter(
        self,
        name: str,
        *,
        path: Sequence[str] | None = None,
        limit_ms: float | None = None,
        window_ms: int | None = None,
        statistic: Statistic | None = None,
    ) -> LatencyConstraint:
        """Change a constraint; None changes nothing. It takes effect at once.

        Raises `UnknownLatencyConstraint`, and the errors of `create`.
        """
        request = messages.AlterLatencyConstraintRequest(name=_name(name))
        if path is not None:
            request.path.extend(arguments.names("path", path))
            if not request.path:
                raise InvalidArgument("a path needs a stream at least; None leaves the one that there is")
        if limit_ms is not None:
            request.limit_us = _limit_us(limit_ms)
        if window_ms is not None:
            request.window_ms = _window(window_ms)
        if statistic is not None:
            request.statistic = _statistic(statistic)
        answer = await self._cluster.ask(api.ALTER_LATENCY_CONSTRAINT, request)
        return LatencyConstraint.from_message(answer.constraint)

    async def delete(self, name: str) -> None:
        """Delete a constraint: buffers follow the other constraints of their streams, or their own settings again.

        Raises `UnknownLatencyConstraint`.
        """
        try:
            await self._cluster.ask(
                api.DELETE_LATENCY_CONSTRAINT, messages.DeleteLatencyConstraintRequest(name=_name(name))
            )
        except UnknownLatencyConstraint as error:
            if not isinstance(error.__cause__, Uncertain):
                raise  # otherwise an earlier attempt without an answer has most likely deleted it

    async def constraints(self) -> list[LatencyDescription]:
        """Return all constraints that the caller may describe, by name, each with only its worst hop."""
        answer = await self._cluster.ask(api.LIST_LATENCY_CONSTRAINTS, messages.ListLatencyConstraintsRequest())
        return [LatencyDescription.from_message(each) for each in answer.constraints]

    async def describe(self, name: str) -> LatencyDescription:
        """Return one constraint, with the times of all hops of its path. Raises `UnknownLatencyConstraint`."""
        request = messages.DescribeLatencyConstraintRequest(name=_name(name))
        answer = await self._cluster.ask(api.DESCRIBE_LATENCY_CONSTRAINT, request)
        return LatencyDescription.from_message(answer.description)


def _name(name: str) -> str:
    return arguments.text("name", name, "the name of a latency constraint")


def _limit_us(limit_ms: float) -> int:
    number: object = limit_ms
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not (is_number and LIMIT_US_MIN <= limit_ms * 1000 <= LIMIT_US_MAX):
        range_ms = f"{LIMIT_US_MIN // 1000} to {LIMIT_US_MAX // 1000} (1 h)"
        raise arguments.wrong("limit_ms", limit_ms, f"a number of milliseconds from {range_ms}")
    return round(limit_ms * 1000)


def _window(window_ms: int) -> int:
    return arguments.whole("window_ms", window_ms, WINDOW_MS_MIN, WINDOW_MS_MAX, what=" (1 s to 1 h)")


def _statistic(statistic: str) -> messages.LatencyStatistic.ValueType:
    if statistic not in _STATISTICS:
        raise InvalidArgument(f"statistic {statistic!r} is not one of {', '.join(_STATISTICS)}")
    return _STATISTICS[statistic]
