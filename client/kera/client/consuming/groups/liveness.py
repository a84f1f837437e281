"""Decides whether a member of a consumer group may go on: it reaches the coordinator, and its caller makes progress.

When the member has not reached the coordinator for longer than the session time-out, it delivers nothing more: other
members may have its groups by then. It also stops when the caller asks for more after more than the progress time-out,
until the coordinator has answered. All times are on the boot-time clock, so leases also expire while a host sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from kera.client.consuming.groups.keep_alive import KeepAlive
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.core.base.clock import Clock
from kera.core.runtime import MakeHeartbeats


class Liveness:
    """The liveness of one member, with the sender of its heartbeats, which `heartbeats` makes: by default a thread."""

    def __init__(
        self,
        coordinators: Sequence[str],
        settings: GroupConsumerSettings,
        clock: Clock,
        *,
        consumer_group: str,
        member_id: str,
        heartbeats: MakeHeartbeats = KeepAlive,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._keep_alive = heartbeats(
            coordinators,
            consumer_group=consumer_group,
            member_id=member_id,
            interval_s=settings.heartbeat_interval_ms / 1000,
            busy_ms=lambda: self.busy_ms,
            clock=clock,
        )
        self._busy_since_s: float | None = None
        """Time since which the caller is at work; None: it waits for more."""
        self.worked_s = 0.0
        """Total time that the caller has been at work, up to its last request for more."""
        self._late_s = float("-inf")
        """Time when the caller last came back too late: until an answer to a later message, other members may have all
        groups of this one."""

    def start(self) -> None:
        """Start heartbeats; the caller is at work."""
        self.caller_works()
        self.answered(self._clock.boottime_s())
        self._keep_alive.start()

    def stop(self) -> None:
        """Stop heartbeats."""
        self._keep_alive.stop()

    @property
    def busy_ms(self) -> int:
        """Time since the caller has been at work; 0: it waits for more. The thread reads it, too."""
        since_s = self._busy_since_s
        return 0 if since_s is None else max(1, round((self._clock.boottime_s() - since_s) * 1000))

    def caller_works(self) -> None:
        """Note that the caller's wait has ended: with data, an error, or a cancellation."""
        self._busy_since_s = self._clock.boottime_s()

    def caller_waits(self) -> bool:
        """Note that the caller asks for more. Returns whether it does so too late."""
        since_s = self._busy_since_s
        if since_s is None:
            return False
        now_s = self._clock.boottime_s()
        self.worked_s += now_s - since_s
        late = (now_s - since_s) * 1000 > self._settings.progress_timeout_ms
        if late:
            self._late_s = now_s
        self._busy_since_s = None
        return late

    def answered(self, sent_s: float) -> None:
        """Note that the coordinator has answered a message that was sent at this time."""
        self._keep_alive.answered(sent_s)

    @property
    def in_doubt(self) -> bool:
        """Whether other members may have this member's groups: it delivers nothing until the coordinator answers."""
        heard_s = self._keep_alive.heard_s
        silent_s = self._clock.boottime_s() - heard_s
        return silent_s > self._settings.session_timeout_ms / 1000 or heard_s < self._late_s
