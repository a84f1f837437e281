"""The health of a daemon: whether it can do its work, and if not, why.

A daemon adds a check for each thing that its work needs. The checks run in the daemon's event loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from kera.v1 import daemon_pb2


class State(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """The daemon does its work, and is ready; an operator should look at this."""
    PROBLEM = "problem"
    """The daemon cannot do its work, or not all of it: it is not ready."""


class Observation(NamedTuple):
    """The result of a check."""

    state: State
    text: str
    """For people: what is wrong, and what helps; if nothing is wrong, what an operator would like to know."""


class Check(NamedTuple):
    """The state of one thing."""

    name: str
    state: State
    text: str

    def to_message(self) -> daemon_pb2.HealthCheck:
        """Its wire form."""
        state = daemon_pb2.HealthState.Value(f"HEALTH_STATE_{self.state.name}")
        return daemon_pb2.HealthCheck(name=self.name, state=state, text=self.text)


def well(text: str = "ok") -> Observation:
    """Return an observation that nothing is wrong."""
    return Observation(State.OK, text)


def concern(text: str) -> Observation:
    """See `State.WARNING`."""
    return Observation(State.WARNING, text)


def wrong(text: str) -> Observation:
    """See `State.PROBLEM`."""
    return Observation(State.PROBLEM, text)


class Health:
    """The checks of one daemon, and whether it is ready.

    A daemon is not ready before `started`, nor from `stopping` on.
    """

    def __init__(self) -> None:
        self._state = wrong("it is starting")
        self._looks: dict[str, Callable[[], Observation]] = {}

    def starting(self, what: str) -> None:
        """The daemon is starting, and `what` may take long."""
        self._state = wrong(f"it is starting: {what}")

    def started(self) -> None:
        """Note that the daemon serves now."""
        self._state = well("it serves")

    def stopping(self) -> None:
        """Note that the daemon is about to end."""
        self._state = wrong("it is stopping: what it has is handed over to others, and written to disk")

    def add(self, name: str, look: Callable[[], Observation]) -> None:
        """Add a check: `look` is called for each request for health, and must not take long."""
        self._looks[name] = look

    def checks(self) -> list[Check]:
        """Run all checks and return their results."""
        return [Check("state", *self._state), *(Check(name, *look()) for name, look in self._looks.items())]
