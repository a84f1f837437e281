"""Log lines about constraints that are no longer held, or are held again: each once, and many in one line.

A lost broker may break all of them at once. Up to a handful are logged one by one; more are logged as their number,
with the names and reasons of the first few. Changes soon after a log line are collected, and logged together later. The
caller passes the time of a clock that never goes back.
"""

from __future__ import annotations

from kera.coordinator.latency.budgets import Verdict
from kera.core.base.telemetry import get_logger
from kera.v1 import latency_pb2 as messages

log = get_logger("kera.latency")

HANDFUL = 5
EVERY_S = 5.0
"""Minimum time between two reports in the log, in seconds."""
_NOT_HELD = (messages.LATENCY_STATE_VIOLATED, messages.LATENCY_STATE_INFEASIBLE, messages.LATENCY_STATE_BROKEN)


class News:
    """Logs each change between held and violated constraints once, and joins many changes in one line."""

    def __init__(self) -> None:
        self._states: dict[str, messages.LatencyState.ValueType] = {}
        """States of the constraints that are not held."""
        self._quiet: set[str] = set()
        """Constraints among them without chunks since: no record is late there now."""
        self._told: dict[str, messages.LatencyState.ValueType] = {}
        """The states that were logged last."""
        self._reasons: dict[str, str] = {}
        """Reasons for constraints whose state has not been logged."""
        self._told_s = float("-inf")

    @property
    def not_held(self) -> int:
        """The number of constraints that were not held when they were evaluated last."""
        return len(self._states.keys() - self._quiet)

    def saw(self, name: str, verdict: Verdict) -> None:
        """Take note of the evaluation of a constraint."""
        self._quiet.discard(name)
        if verdict.state in _NOT_HELD:
            self._states[name] = verdict.state
        elif verdict.state == messages.LATENCY_STATE_HELD:
            self._states.pop(name, None)
        else:
            self._quiet.add(name)
            return  # nothing was measured: the logged state stays
        if self._states.get(name) == self._told.get(name):
            self._reasons.pop(name, None)
        else:
            self._reasons[name] = verdict.reason

    def forget(self, name: str) -> None:
        """Forget a constraint that was deleted or replaced."""
        self._quiet.discard(name)
        for each in (self._states, self._told, self._reasons):
            each.pop(name, None)

    def tell(self, now_s: float) -> None:
        """Log the changes since the last report, unless that was too recent."""
        if not self._reasons or now_s < self._told_s + EVERY_S:
            return
        self._told_s = now_s
        lost = {name: reason for name, reason in self._reasons.items() if name in self._states}
        again = [name for name in self._reasons if name not in self._states]
        if len(lost) > HANDFUL:
            first = dict(list(lost.items())[:HANDFUL])
            log.warning("latency constraints are not held", count=len(lost), first=first)
        else:
            for name, reason in lost.items():
                log.warning("latency constraint is not held", constraint=name, reason=reason)
        if len(again) > HANDFUL:
            log.info("latency constraints are held again", count=len(again), first=again[:HANDFUL])
        else:
            for name in again:
                log.info("latency constraint is held again", constraint=name)
        self._told = dict(self._states)
        self._reasons.clear()
