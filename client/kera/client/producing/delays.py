"""The delays of a producer."""

from __future__ import annotations

from kera.client.producing.routes import Routes


class Delays:
    """The part of a `Producer` that tells of it."""

    routes: Routes

    @property
    def throttled_ms(self) -> int:
        """For how long, altogether, brokers have held answers back, as a quota was used up (docs/quotas.md)."""
        return self.routes.throttled_ms

    @property
    def late_ms(self) -> float:
        """For how long, altogether, chunks were left beyond their deadlines with nothing in the way.

        That is as long as the event loop was busy when one was due by ``linger_ms``, a latency target or a constraint.
        """
        return self.routes.late_s * 1000
