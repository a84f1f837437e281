"""Holds a coordinator back whose metadata are older than the cluster, as after a restore from a copy. Pure.

    ASKING     ──► brokers report which streams they hold, in which versions; none can register, no other work is done
       │  all have reported, and brokers that are not in the metadata had time to; or the grace is over
    TAKING UP  ──► brokers register and report later versions, which are taken up; no other work is done yet
       │  all that can be is taken up; or the grace is over once more
    OVER

The work that has to wait is whatever old metadata would decide: recoveries, moves, drops, and that new launches
own what earlier ones did. Such a decision would start a second history of a stream that has gone on elsewhere.

Metadata are older than the cluster if a broker knows numbers that are missing in them: a launch's epoch above all that
were given, the epoch of a coordinator that led after the last one in the metadata, or assignments which that one made.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kera.server.lineage import CHANGES_BITS

NAMED_MAX = 5
"""Maximum of the awaited members that are named."""


class Phase(enum.Enum):
    """The phase of catching up with a cluster that is newer than the restored metadata."""

    ASKING = "asking"
    TAKING_UP = "taking up"
    OVER = "over"


class KnownNumbers(NamedTuple):
    """The highest numbers in the metadata when a coordinator begins to lead."""

    coordinator_epoch: int
    """Epoch of the coordinator that led with these metadata last; 0: unknown."""
    launch_epoch: int
    """Highest epoch of brokers' launches."""


def is_later_launch(numbers: KnownNumbers, epoch: int, current: int, epoch_max: int) -> bool:
    """Whether a launch was registered at a coordinator that the metadata do not know.

    `current`: the epoch of the member's launch in the metadata, 0: none. A launch that this coordinator has registered
    has replaced all before. `epoch_max`: the highest epoch that may have been given by now.
    """
    return numbers.launch_epoch < epoch <= epoch_max and current <= numbers.launch_epoch


def is_later_coordinator(numbers: KnownNumbers, epoch: int, coordinator_epoch: int) -> bool:
    """Whether a coordinator has led that the metadata do not know. `coordinator_epoch` is the caller's."""
    return numbers.coordinator_epoch < epoch < coordinator_epoch


def is_later_version(numbers: KnownNumbers, version: int, coordinator_epoch: int) -> bool:
    """Whether foreign assignments were made by a coordinator that the metadata do not know.

    `coordinator_epoch` is the caller's. Assignments of an earlier coordinator are no sign: there are two histories
    already,
    and waiting once more does not help. The last known coordinator may have continued after the copy was made.
    """
    return numbers.coordinator_epoch <= version >> CHANGES_BITS < coordinator_epoch


class CatchingUp:
    """The progress of catching up. The caller passes the facts, and the time in seconds."""

    def __init__(self, now_s: float, *, least_s: float, grace_s: float) -> None:
        """`least_s`: the least time to wait for brokers that are not in the metadata."""
        self.phase = Phase.ASKING
        self._least_until_s = now_s + least_s
        self._grace_s = max(grace_s, least_s)
        self._until_s = now_s + self._grace_s
        self._ends_s = self._until_s
        """The latest end of the present wait."""
        self.waits_for: Sequence[str] = ()
        """The awaited members or streams, in words."""

    def advance(self, now_s: float, silent: Collection[int], unsettled: Sequence[str]) -> None:
        """Advance the phase. `silent`: the brokers that have not reported; `unsettled`: what has yet to be
        taken up, in words.
        """
        if self.phase is Phase.ASKING:
            self.waits_for = [f"broker {broker_id}" for broker_id in sorted(silent)]
            self.waits_for = self.waits_for or ["brokers that are not in the metadata"]
            self._ends_s = self._until_s if silent else self._least_until_s
            if now_s >= self._until_s or (not silent and now_s >= self._least_until_s):
                self.phase = Phase.TAKING_UP
                self._until_s = self._ends_s = now_s + self._grace_s
                return
        if self.phase is Phase.TAKING_UP:
            self.waits_for = unsettled
            if now_s >= self._until_s or not unsettled:
                self.phase = Phase.OVER

    def describe(self, now_s: float) -> str:
        """Say what the coordinator waits for, and how long; empty once it is over."""
        if self.phase is Phase.OVER:
            return ""
        more = len(self.waits_for) - NAMED_MAX
        named = [*self.waits_for[:NAMED_MAX], *([f"{more} more"] if more > 0 else [])]
        what = "to say what they hold" if self.phase is Phase.ASKING else "to go on as brokers know them"
        return (
            "the metadata are older than the cluster, as after they were restored from a copy; waiting for"
            f" {', '.join(named) or 'all'} {what}, {max(0.0, self._ends_s - now_s):.0f} s at most"
        )
