"""Requests about latency constraints. An answered change is in the store; ``planning`` carries it out.

A caller's rights to an existing constraint depend on its path: for a caller that may not describe all of the path, the
constraint does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kera.coordinator.cluster.audited import audited
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.shares import LATENCY_CONSTRAINTS, LATENCY_STREAMS, Shares
from kera.coordinator.cluster.state import State
from kera.coordinator.latency.budgets import Verdict, not_heard, worst_of
from kera.coordinator.latency.paths import (
    CONSTRAINTS_MAX,
    GROUP,
    STREAMS_MAX,
    check_beside,
    check_new,
    check_there,
    checked,
    checked_name,
    streams_of,
)
from kera.coordinator.latency.planning import Planning, View
from kera.coordinator.latency.records import CONSTRAINTS, constraint_key
from kera.coordinator.latency.splitting import Hop
from kera.core.access.rights import Operation
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, UnknownLatencyConstraint, UnknownStream
from kera.core.rpc import api
from kera.server.access.guard import CALLER, Guard
from kera.server.access.requirements import Need, group, stream
from kera.v1 import latency_pb2 as messages

log = get_logger("kera.latency")


class Groups(Protocol):
    """The consumer groups of the cluster."""

    def exists(self, name: str) -> bool:
        """Whether there is a consumer group of this name."""
        ...

    def reads(self, name: str, stream_id: int) -> bool:
        """Whether a consumer group reads a stream."""
        ...


class LatencyService:
    """Serves requests about latency constraints, within the caller's rights to the streams of their paths."""

    def __init__(self, state: State, guard: Guard | None, groups: Groups, shares: Shares) -> None:
        """`guard`: the coordinator's own; None: security is off."""
        self._state = state
        self._guard = guard
        self._groups = groups
        self._shares = shares
        self._records: dict[str, messages.LatencyConstraintRecord] = {}
        self.planning = Planning(state)

    def load(self) -> None:
        """Load the constraints from the ledger."""
        ledger = self._state.ledger
        for key in ledger.children(CONSTRAINTS.rstrip("/")):
            record = messages.LatencyConstraintRecord.FromString(ledger.get(key) or b"")
            try:
                checked(record.constraint)
            except InvalidArgument as error:  # of a later version
                log.error("latency constraint ignored", constraint=record.constraint.name, error=error.message)
                continue
            self._records[record.constraint.name] = record
        self.planning.load(record.constraint for record in self._records.values())

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        handlers: Mapping[Any, Callable[[Any], Any]] = {
            api.CREATE_LATENCY_CONSTRAINT: self.create,
            api.ALTER_LATENCY_CONSTRAINT: self.alter,
            api.LIST_LATENCY_CONSTRAINTS: self.list_all,
            api.DELETE_LATENCY_CONSTRAINT: self.delete,
            api.DESCRIBE_LATENCY_CONSTRAINT: self.describe,
        }
        return handlers

    # -- changes ---------------------------------------------------------------------------------------------------

    async def create(
        self, request: messages.CreateLatencyConstraintRequest
    ) -> messages.CreateLatencyConstraintResponse:
        """Create a constraint, or find the same one. Raises `InvalidArgument`, `UnknownStream` and
        `LatencyConstraintExists`.
        """
        constraint = checked(request.constraint)

        async def add() -> None:
            known = self._records.get(constraint.name)
            if not check_new(constraint, None if known is None else known.constraint):
                return
            check_there(constraint.path, _Known(self._state, self._groups))
            check_beside(constraint, (each.constraint for each in self._records.values()))
            now_us, by = self._state.clock.now_us(), _caller_principal()
            record = messages.LatencyConstraintRecord(
                constraint=constraint, created_us=now_us, created_by=by, changed_us=now_us, changed_by=by
            )
            self._check_share(record)
            with self._audited("latency constraint created", **_fields(constraint)):
                await self._put(record)

        await self._state.change(add(), for_caller=True)
        return messages.CreateLatencyConstraintResponse(constraint=constraint)

    async def alter(self, request: messages.AlterLatencyConstraintRequest) -> messages.AlterLatencyConstraintResponse:
        """Change the fields that a request sets. Raises `UnknownLatencyConstraint`, `InvalidArgument` and
        `UnknownStream`.
        """
        answer = messages.AlterLatencyConstraintResponse()

        async def change() -> None:
            known = self._record(request.name, Operation.ALTER)
            constraint = checked(altered(known.constraint, request))
            if list(constraint.path) != list(known.constraint.path):
                check_there(constraint.path, _Known(self._state, self._groups))
            check_beside(constraint, (each.constraint for each in self._records.values()))
            answer.constraint.CopyFrom(constraint)
            if constraint == known.constraint:
                return
            record = messages.LatencyConstraintRecord()
            record.CopyFrom(known)
            record.constraint.CopyFrom(constraint)
            record.changed_us, record.changed_by = self._state.clock.now_us(), _caller_principal()
            if list(constraint.path) != list(known.constraint.path):
                self._check_share(record)
            with self._audited("latency constraint altered", **_fields(constraint)):
                await self._put(record)

        await self._state.change(change(), for_caller=True)
        return answer

    async def delete(
        self, request: messages.DeleteLatencyConstraintRequest
    ) -> messages.DeleteLatencyConstraintResponse:
        """Delete a constraint: buffers of its streams use their own settings again. Raises
        `UnknownLatencyConstraint`.
        """

        async def take() -> None:
            name = self._record(request.name, Operation.ALTER).constraint.name
            with self._audited("latency constraint deleted", constraint=name):
                await self._state.write({constraint_key(name): None})
            del self._records[name]
            self.planning.put(name, None)

        await self._state.change(take(), for_caller=True)
        return messages.DeleteLatencyConstraintResponse()

    def _check_share(self, record: messages.LatencyConstraintRecord) -> None:
        by, name = record.created_by, record.constraint.name
        paths = [
            each.constraint.path
            for each in self._records.values()
            if each.created_by == by and each.constraint.name != name
        ]
        paths.append(record.constraint.path)
        streams = {stream for path in paths for stream in streams_of(path)}
        self._shares.check(LATENCY_CONSTRAINTS, CONSTRAINTS_MAX, by, lambda: len(paths))
        self._shares.check(LATENCY_STREAMS, STREAMS_MAX, by, lambda: len(streams))

    async def _put(self, record: messages.LatencyConstraintRecord) -> None:
        name = record.constraint.name
        await self._state.write({constraint_key(name): record.SerializeToString()})
        self._records[name] = record
        self.planning.put(name, record.constraint)

    # -- queries ---------------------------------------------------------------------------------------------------

    async def list_all(self, _: messages.ListLatencyConstraintsRequest) -> messages.ListLatencyConstraintsResponse:
        """List all constraints by name; the guard leaves out those that the caller may not see."""
        answer, pace = messages.ListLatencyConstraintsResponse(), self._state.pace()
        for name in sorted(self._records):
            await pace.step()
            if name in self._records:
                answer.constraints.append(self._described(name, hops=False))
        return answer

    def describe(
        self, request: messages.DescribeLatencyConstraintRequest
    ) -> messages.DescribeLatencyConstraintResponse:
        """Describe a constraint with its hops. Raises `UnknownLatencyConstraint`."""
        name = self._record(request.name, Operation.DESCRIBE).constraint.name
        return messages.DescribeLatencyConstraintResponse(description=self._described(name, hops=True))

    def _described(self, name: str, *, hops: bool) -> messages.LatencyDescription:
        record, view = self._records[name], self.planning.view(name)
        verdict: Verdict = view.verdict
        worst = worst_of(view.wanted, verdict, view.current)
        return messages.LatencyDescription(
            constraint=record.constraint,
            state=verdict.state,
            reason="; ".join(filter(None, (verdict.reason, self._who_is_not_measured(view)))),
            mean_us=verdict.mean_us,
            p99_us=verdict.p99_us,
            least_limit_us=verdict.least_limit_us,
            violations=view.violations,
            hops=[self._hop(hop, view) for hop in view.wanted.hops] if hops else (),
            created_us=record.created_us,
            created_by=record.created_by,
            changed_us=record.changed_us,
            changed_by=record.changed_by,
            worst_hop=None if worst is None else self._hop(worst, view),
        )

    def _who_is_not_measured(self, view: View) -> str:
        """Say in words which consumer group of a path does not read any more, or has no measurements."""
        known = _Known(self._state, self._groups)
        if view.verdict.state == messages.LATENCY_STATE_BROKEN:
            return ""
        for hop in view.wanted.hops:
            if hop.group and not known.reads(hop.group, hop.stream):
                return f"consumer group {hop.group!r} does not read {hop.stream!r} any more"
        silent = not_heard(view.wanted.hops, view.current)
        return "; ".join(f"nothing was measured of {GROUP}{group}, which reads {name}" for name, group in silent)

    def _hop(self, hop: Hop, view: View) -> messages.HopDescription:
        found = messages.HopDescription(
            stream=hop.stream,
            hop=hop.hop,
            consumer_group=hop.group,
            violates=hop in view.verdict.violators,
        )
        if view.split is not None:
            found.allowed_us, found.advised_us = view.split.parts[hop].allowed_us, self.planning.advised_us(hop)
        figures = view.current.get(hop)
        if figures is not None:
            found.count, found.mean_us, found.p99_us = figures.chunks, figures.mean_us, figures.p99_us
            found.worst_mean_us, found.worst_streamlet_id = figures.worst_mean_us, figures.worst_streamlet_id
            found.clock_error_us, found.own_linger_us = figures.clock_error_us, figures.own_linger_us
        return found

    # -- rights of the caller --------------------------------------------------------------------------------------

    def _record(self, name: str, operation: Operation) -> messages.LatencyConstraintRecord:
        """Return a constraint if the caller has the right. Raises `UnknownLatencyConstraint` and `NotAllowed`."""
        record, peer = self._records.get(checked_name(name)), CALLER.get()
        unknown = UnknownLatencyConstraint(
            f"there is no latency constraint {name!r}: kera latency list shows all", name=name
        )
        if record is None:
            raise unknown
        guard = self._guard
        if guard is None or peer is None or (peer.identity is not None and peer.identity.is_daemon):
            return record
        path = record.constraint.path
        for element in path:
            resource = group(element.removeprefix(GROUP)) if element.startswith(GROUP) else stream(element)
            if not guard.allows(peer, Operation.DESCRIBE, resource):
                raise unknown  # as if it did not exist
        if operation is not Operation.DESCRIBE:
            for each in streams_of(path):
                guard.check(peer, Need(operation, stream(each)))
        return record

    def _audited(self, what: str, **fields: object) -> AbstractContextManager[None]:
        return audited(self._guard, log, what, **fields)


class _Known:
    """The streams and consumer groups of the cluster, in the form for paths."""

    def __init__(self, state: State, groups: Groups) -> None:
        self._state = state
        self._groups = groups

    def has_stream(self, name: str) -> bool:
        return self._stream_id(name) is not None

    def has_group(self, name: str) -> bool:
        return self._groups.exists(name)

    def reads(self, group: str, stream: str) -> bool:
        stream_id = self._stream_id(stream)
        return stream_id is not None and self._groups.reads(group, stream_id)

    def _stream_id(self, name: str) -> int | None:
        try:
            return self._state.catalog.named(name).stream_id
        except UnknownStream:
            return None


def altered(
    known: messages.LatencyConstraint, request: messages.AlterLatencyConstraintRequest
) -> messages.LatencyConstraint:
    """Return a constraint with the fields that a request sets."""
    found = messages.LatencyConstraint()
    found.CopyFrom(known)
    if request.path:
        found.path[:] = request.path
    if request.HasField("limit_us"):
        found.limit_us = request.limit_us
    if request.HasField("window_ms"):
        found.window_ms = request.window_ms
    if request.HasField("statistic"):
        found.statistic = request.statistic
    return found


def _fields(constraint: messages.LatencyConstraint) -> dict[str, object]:
    return {
        "constraint": constraint.name,
        "path": list(constraint.path),
        "limit_us": constraint.limit_us,
        "window_ms": constraint.window_ms,
        "statistic": messages.LatencyStatistic.Name(constraint.statistic).removeprefix("LATENCY_STATISTIC_").lower(),
    }


def _caller_principal() -> str:
    peer = CALLER.get()
    return "" if peer is None or peer.identity is None else peer.identity.principal
