"""Log lines about constraints that are no longer held, or are held again: each once, and many in one line.

A broker that is lost may break all of them at once. Up to a handful are told one by one, more of them as how many there
are, with the first few by name and why. What comes soon after is kept until some time has gone by, and told together.
The time is the caller's, on a clock that does not go back.
"""

from __future__ import annotations

from kera.coordinator.latency.budgets import Verdict
from kera.core.base.telemetry import get_logger
from kera.v1 import latency_pb2 as messages

log = get_logger("kera.latency")

HANDFUL = 5
EVERY_S = 5.0
"""Between two times that the log is told something."""
_NOT_HELD = (messages.LATENCY_STATE_VIOLATED, messages.LATENCY_STATE_INFEASIBLE, messages.LATENCY_STATE_BROKEN)


class News:
    """Logs each change between held and violated constraints once, and joins many changes in one line."""

    def __init__(self) -> None:
        self._states: dict[str, messages.LatencyState.ValueType] = {}
        """States of the constraints that are not held."""
        self._quiet: set[str] = set()
        """Those of them through which nothing has gone since: nobody is late there now."""
        self._told: dict[str, messages.LatencyState.ValueType] = {}
        """The same, as the log knows it."""
        self._reasons: dict[str, str] = {}
        """Reasons for constraints whose state has not been logged."""
        self._told_s = float("-inf")

    @property
    def not_held(self) -> int:
        """How many were not held when they were looked at last."""
        return len(self._states.keys() - self._quiet)

    def saw(self, name: str, verdict: Verdict) -> None:
        """A constraint was looked at."""
        self._quiet.discard(name)
        if verdict.state in _NOT_HELD:
            self._states[name] = verdict.state
        elif verdict.state == messages.LATENCY_STATE_HELD:
            self._states.pop(name, None)
        else:
            self._quiet.add(name)
            return  # nothing was measured: for the log it is as it was
        if self._states.get(name) == self._told.get(name):
            self._reasons.pop(name, None)
        else:
            self._reasons[name] = verdict.reason

    def forget(self, name: str) -> None:
        """A constraint was deleted, or is another one."""
        self._quiet.discard(name)
        for each in (self._states, self._told, self._reasons):
            each.pop(name, None)

    def tell(self, now_s: float) -> None:
        """Tell the log what it does not know, if it was not told something just now."""
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
