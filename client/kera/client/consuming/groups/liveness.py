"""Whether a member of a consumer group may go on: the coordinator hears of it, and its caller comes for more in time.

While the coordinator cannot be reached for longer than the session time-out, nothing more is delivered: somebody else
may have the groups by then. Likewise when the caller comes back after more than the progress time-out, until the
coordinator has answered. All this goes by the boot-time clock: a host that wakes up finds its leases run out.
"""

from __future__ import annotations

from collections.abc import Sequence

from kera.client.consuming.groups.keep_alive import KeepAlive
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.core.base.clock import Clock
from kera.core.runtime import MakeHeartbeats


class Liveness:
    """The liveness of one member, with the sender of its heartbeats: a thread, unless `heartbeats` makes something
    else.
    """

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
        """Since when the caller does not wait for more; None: it does."""
        self.worked_s = 0.0
        """How long the caller has been at work in all, up to when it came for more the last time."""
        self._late_s = float("-inf")
        """When the caller came back too late, the last time: before an answer to what was sent since, others may have
        all that this member had."""

    def start(self) -> None:
        """The member joins; the caller is at work."""
        self.caller_works()
        self.answered(self._clock.boottime_s())
        self._keep_alive.start()

    def stop(self) -> None:
        """No more heartbeats."""
        self._keep_alive.stop()

    @property
    def busy_ms(self) -> int:
        """How long the caller has been at work; 0: it waits for more. Asked by the thread, too."""
        since_s = self._busy_since_s
        return 0 if since_s is None else max(1, round((self._clock.boottime_s() - since_s) * 1000))

    def caller_works(self) -> None:
        """The caller has got something, or whatever else ended its wait."""
        self._busy_since_s = self._clock.boottime_s()

    def caller_waits(self) -> bool:
        """The caller comes for more; whether that is too late."""
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
        """The coordinator has answered what was sent then."""
        self._keep_alive.answered(sent_s)

    @property
    def in_doubt(self) -> bool:
        """Others may have what this member had: nothing is delivered before the coordinator has answered."""
        heard_s = self._keep_alive.heard_s
        silent_s = self._clock.boottime_s() - heard_s
        return silent_s > self._settings.session_timeout_ms / 1000 or heard_s < self._late_s
