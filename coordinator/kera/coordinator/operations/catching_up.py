"""Metadata that are older than the cluster, as after they were restored from a copy: what is waited for. Pure.

    ASKING     ──► brokers say which streams they hold, in which versions; nobody registers, nothing is done
       │  all have, and time was left to those that are not in the metadata; or the grace is over
    TAKING UP  ──► brokers register and tell of later versions, which are taken up; nothing else is done yet
       │  all is taken up that can be; or the grace is over once more
    OVER

"Nothing" is what would be decided by old metadata: recoveries, moves, drops, and new launches owning what earlier ones
did. A decision of that kind makes a second history of a stream that has gone on elsewhere.

Metadata are older than the cluster if somebody knows numbers that they should have, and have not: the epoch of a
launch above all that were given; that of a coordinator who led after the last one that the metadata know, or
assignments which that one made.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kera.server.lineage import CHANGES_BITS

NAMED_MAX = 5
"""Maximum of named members that it waits for."""


class Phase(enum.Enum):
    """The phase of catching up with a cluster that is newer than the restored metadata."""

    ASKING = "asking"
    TAKING_UP = "taking up"
    OVER = "over"


class KnownNumbers(NamedTuple):
    """The highest numbers that are in metadata when a coordinator begins to lead by them."""

    coordinator_epoch: int
    """Epoch of the coordinator that led with these metadata last; 0: unknown."""
    launch_epoch: int
    """Highest epoch of brokers' launches."""


def is_later_launch(numbers: KnownNumbers, epoch: int, current: int, epoch_max: int) -> bool:
    """Whether a launch was registered at a coordinator of which the metadata know nothing.

    `current`: the epoch of the member's launch that the metadata know, 0: none. One that was given since we lead has
    replaced all before. `epoch_max`: what may have been given by now.
    """
    return numbers.launch_epoch < epoch <= epoch_max and current <= numbers.launch_epoch


def is_later_coordinator(numbers: KnownNumbers, epoch: int, coordinator_epoch: int) -> bool:
    """Whether a coordinator has led of which the metadata know nothing. `coordinator_epoch` is ours."""
    return numbers.coordinator_epoch < epoch < coordinator_epoch


def is_later_version(numbers: KnownNumbers, version: int, coordinator_epoch: int) -> bool:
    """Whether assignments that do not come from ours were made by a coordinator of which the metadata know nothing.

    `coordinator_epoch` is ours. What an earlier coordinator made is nothing new: there are two histories already, and
    waiting once more does not help. The last one may have gone on after the copy was made.
    """
    return numbers.coordinator_epoch <= version >> CHANGES_BITS < coordinator_epoch


class CatchingUp:
    """How far it is. Told of what there is, with the time in seconds."""

    def __init__(self, now_s: float, *, least_s: float, grace_s: float) -> None:
        """`least_s`: so long is waited in any case, for brokers that are not in the metadata."""
        self.phase = Phase.ASKING
        self._least_until_s = now_s + least_s
        self._grace_s = max(grace_s, least_s)
        self._until_s = now_s + self._grace_s
        self._ends_s = self._until_s
        """When this wait is over at the latest, as things are."""
        self.waits_for: Sequence[str] = ()
        """In words."""

    def advance(self, now_s: float, silent: Collection[int], unsettled: Sequence[str]) -> None:
        """`silent`: the brokers that have not said what they hold; `unsettled`: what has to be taken up, in words."""
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
        """The members that it waits for, and how long; empty when it is over."""
        if self.phase is Phase.OVER:
            return ""
        more = len(self.waits_for) - NAMED_MAX
        named = [*self.waits_for[:NAMED_MAX], *([f"{more} more"] if more > 0 else [])]
        what = "to say what they hold" if self.phase is Phase.ASKING else "to go on as brokers know them"
        return (
            "the metadata are older than the cluster, as after they were restored from a copy; waiting for"
            f" {', '.join(named) or 'all'} {what}, {max(0.0, self._ends_s - now_s):.0f} s at most"
        )
