"""When consumer groups were used last, and which of them have no chosen name. No I/O, no waiting.

A client that generates a name, as a query without a name does for each new checkpoint, says so. Such a consumer group
is *unnamed* as long as only such clients use it. It is forgotten when it was unused for the retention of the
coordinator's settings; a named one stays until it is deleted.

Time is the time that coordinators have spent leading: each one continues where the last one stopped (`Uses.clock_ms`).
So no wall clock decides, a cluster that was shut down for a month forgets nothing when it is back, and metadata that
were restored from an older copy are as old as they were then. Uses are stored coarsely, at most one record per consumer
group and `note_ms`. So after a change of coordinators the last use of a consumer group seems to differ by that much.

Records: ``application_uses/<name>`` → ConsumerGroupUse; ``applications_clock`` → milliseconds, as decimal text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kera.v1 import consumer_group_pb2 as messages

USES = "application_uses/"
CLOCK = "applications_clock"
NOTE_MS_MAX = 3_600_000
"""Maximum interval at which uses, and the clock, are stored."""
NOTES_PER_RETENTION = 8


@dataclass(slots=True)
class _Use:
    at_ms: int
    """The time of the last use, on the clock of `Uses`."""
    unnamed: bool
    noted_ms: int | None = None
    """The stored value of `at_ms`; None: none is stored."""


class Uses:
    """The uses of all consumer groups."""

    def __init__(self, retention_ms: int, now_s: float, clock_ms: int = 0) -> None:
        """`retention_ms`: of unnamed consumer groups; 0: forever. `clock_ms`: where the last coordinator stopped."""
        self.retention_ms = retention_ms
        self.note_ms = min(NOTE_MS_MAX, max(1, retention_ms // NOTES_PER_RETENTION)) if retention_ms else NOTE_MS_MAX
        self._begun_s = now_s
        self._clock_ms = self._noted_clock_ms = clock_ms
        self._uses: dict[str, _Use] = {}
        self._dirty: set[str] = set()
        self._makers: dict[str, str] = {}
        """The principals that have created consumer groups, by group; groups without a known creator are left out."""

    def restore(self, message: messages.ConsumerGroupUse) -> None:
        """Load a stored record."""
        self._uses[message.consumer_group] = _Use(message.used_ms, message.unnamed, message.used_ms)
        self.made_by(message.consumer_group, message.created_by)

    def made_by(self, name: str, principal: str) -> None:
        """Record the creator of a consumer group; empty: unknown. The next use stores it."""
        if principal:
            self._makers[name] = principal
        else:
            self._makers.pop(name, None)

    def maker(self, name: str) -> str:
        """Return the principal that has created a consumer group; empty: unknown."""
        return self._makers.get(name, "")

    def clock_ms(self, now_s: float) -> int:
        """Return for how long coordinators have led."""
        return self._clock_ms + max(0, round((now_s - self._begun_s) * 1000))

    def use(self, name: str, now_s: float, *, unnamed: bool = False) -> None:
        """Record a use of a consumer group; `unnamed`: by a client that has generated the name."""
        at_ms = self.clock_ms(now_s)
        known = self._uses.get(name)
        if known is None:
            self._uses[name] = _Use(at_ms, unnamed)
            self._dirty.add(name)
            return
        known.at_ms = at_ms
        if (known.unnamed and not unnamed) or known.noted_ms is None or at_ms >= known.noted_ms + self.note_ms:
            known.unnamed &= unnamed
            self._dirty.add(name)

    def forget(self, name: str) -> None:
        """Forget a consumer group that does not exist any more."""
        self._makers.pop(name, None)
        known = self._uses.pop(name, None)
        if known is not None and known.noted_ms is not None:
            self._dirty.add(name)
        else:
            self._dirty.discard(name)

    def is_unnamed(self, name: str) -> bool:
        """Whether all clients that have used the consumer group have generated its name."""
        known = self._uses.get(name)
        return known is not None and known.unnamed

    def idle_ms(self, name: str, now_s: float) -> int:
        """Return how long a consumer group was unused. A group without a record, from an older version, counts
        as used now.
        """
        known = self._uses.get(name)
        if known is None:
            self.use(name, now_s)
            return 0
        return max(0, self.clock_ms(now_s) - known.at_ms)

    def expires_in_ms(self, name: str, now_s: float) -> int | None:
        """Return after how long a consumer group is forgotten if it stays unused; None: never."""
        if not self.retention_ms or not self.is_unnamed(name):
            return None
        return max(0, self.retention_ms - self.idle_ms(name, now_s))

    def expired(self, names: Iterable[str], now_s: float, kept: Collection[str]) -> list[str]:
        """Return the consumer groups of `names` to forget, without those in `kept`."""
        return [name for name in names if name not in kept and self.expires_in_ms(name, now_s) == 0]

    # --- stored records ----------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether something has to be stored."""
        return bool(self._dirty)

    def clock_due(self, now_s: float) -> bool:
        """Whether the clock has to be stored."""
        return self.clock_ms(now_s) >= self._noted_clock_ms + self.note_ms

    def take_changes(self, now_s: float) -> dict[str, bytes | None]:
        """Return the records to store, by key; they count as stored from now on."""
        changes: dict[str, bytes | None] = {}
        for name in sorted(self._dirty):
            known = self._uses.get(name)
            if known is not None:
                known.noted_ms = known.at_ms
                message = messages.ConsumerGroupUse(
                    consumer_group=name, unnamed=known.unnamed, used_ms=known.at_ms, created_by=self.maker(name)
                )
                changes[USES + name] = message.SerializeToString()
            else:
                changes[USES + name] = None
        self._dirty.clear()
        if changes or self.clock_due(now_s):
            self._noted_clock_ms = self.clock_ms(now_s)
            changes[CLOCK] = str(self._noted_clock_ms).encode()
        return changes

    def not_stored(self, changes: Iterable[str]) -> None:
        """Mark records that could not be stored for the next write."""
        for key in changes:
            if key.startswith(USES):
                self._dirty.add(key.removeprefix(USES))
