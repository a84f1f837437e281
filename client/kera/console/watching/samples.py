"""Numbers over time: a bounded history of each of a bounded number of things. Pure but for the clock it is given."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from kera.console import limits

Point = tuple[float, float | None]
"""When, in seconds of the monotonic clock, and how much; None: it could not be found out."""


class Histories:
    """Histories by name; those that were not watched for longest go when there are too many."""

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        things_max: int = limits.WATCHED_GROUPS_MAX,
        points_max: int = limits.SAMPLES_MAX,
    ) -> None:
        self._now_s = now_s
        self._things_max, self._points_max = things_max, points_max
        self._points: OrderedDict[str, deque[Point]] = OrderedDict()

    def watch(self, name: str) -> None:
        """Keep what becomes of a thing from now on."""
        self._points.setdefault(name, deque(maxlen=self._points_max))
        self._points.move_to_end(name)
        while len(self._points) > self._things_max:
            self._points.popitem(last=False)

    def offer(self, name: str) -> None:
        """The same, as long as there is room without taking it from another."""
        if len(self._points) < self._things_max:
            self._points.setdefault(name, deque(maxlen=self._points_max))

    def add(self, name: str, value: float | None) -> None:
        """How much it is now, if it is watched."""
        points = self._points.get(name)
        if points is not None:
            points.append((self._now_s(), value))

    def forget(self, name: str) -> None:
        """It is not there any more."""
        self._points.pop(name, None)

    def of(self, name: str) -> list[Point]:
        """The points of a history, the oldest first."""
        return list(self._points.get(name, ()))

    @property
    def watched(self) -> list[str]:
        """All things."""
        return list(self._points)
