"""Discovery: which member of a consumer group looks for new groups of segments, where and when. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from kera.coordinator.consumer_groups.leases import Leases
from kera.coordinator.consumer_groups.members import Member
from kera.coordinator.consumer_groups.requests import StreamShape
from kera.v1 import consumer_group_pb2 as messages

LOOK_INTERVAL_S = 0.5
"""How often one of the members looks for new groups, in seconds."""
LOOKS_MAX = 256
"""Maximum of streamlets that a member looks at in one round; the others have their turn later."""


class Discovery:
    """The discovery of new groups in one consumer group: one of the members looks at a time."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._looked_s = float("-inf")
        self._look_at = 0
        """Index of the streamlet whose turn is next."""

    @property
    def next_s(self) -> float:
        """The time at which a member is to look for new groups."""
        return self._looked_s + LOOK_INTERVAL_S

    def look_soon(self) -> None:
        """Have the next member that sends a request look."""
        self._looked_s = float("-inf")

    def look(
        self,
        response: messages.ConsumeRoundResponse,
        member: Member,
        shapes: Mapping[int, StreamShape],
        finished: set[tuple[int, int]],
        now_s: float,
    ) -> None:
        """Have the member look for new groups: in streamlets where it has finished a group, and everywhere if
        it is time.
        """
        keys = sorted(finished)
        if now_s >= self.next_s:
            self._looked_s = now_s
            stream_ids = member.stream_ids & shapes.keys()  # a later round of the member may name other streams
            total = sum(shapes[stream_id].streamlets for stream_id in stream_ids)
            first = self._look_at % max(1, total)
            turn = _some(stream_ids, shapes, first, min(LOOKS_MAX, total))
            self._look_at = first + len(turn)
            keys += [key for key in turn if key not in finished]
        for key in keys:
            streamlet = self._leases.streamlets.get(key)
            if streamlet is None:
                response.look.add(stream_id=key[0], streamlet_id=key[1], start=True)
            elif streamlet.wants_groups:
                response.look.add(stream_id=key[0], streamlet_id=key[1], after_group_id=streamlet.listed)


def _some(
    stream_ids: AbstractSet[int], shapes: Mapping[int, StreamShape], first: int, count: int
) -> list[tuple[int, int]]:
    """Return `count` streamlets from index `first` on, in a circle, without a list of all of the possibly thousands."""
    found: list[tuple[int, int]] = []
    at, ordered = first, sorted(stream_ids)
    while len(found) < count:
        for stream_id in ordered:
            streamlets = shapes[stream_id].streamlets
            if at < streamlets:
                found += ((stream_id, number) for number in range(at, min(streamlets, at + count - len(found))))
            at = max(0, at - streamlets)
    return found
