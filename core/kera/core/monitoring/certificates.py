"""Until when a daemon's certificate is good: for its health, and as a metric."""

from __future__ import annotations

from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily, Metric

from kera.core.clock import Clock
from kera.core.monitoring.health import Finding, concern, well, wrong
from kera.core.monitoring.sources import Steps
from kera.core.security import Tls

WARNED_DAYS = 30
_DAY_S = 86_400


class Certificates:
    """Of one daemon; a `Source`."""

    def __init__(self, tls: Tls, clock: Clock) -> None:
        self._tls = tls
        self._clock = clock

    def look(self) -> Finding:
        """For `Health.add`."""
        files, not_after_s = self._tls.files, self._tls.not_after_s
        if problem := self._tls.problem:
            return concern(f"what the files hold now is not taken: {problem}")
        if not_after_s is None:
            return well("it has none")
        day = f"{datetime.fromtimestamp(not_after_s, UTC):%Y-%m-%d %H:%M} UTC"
        left_days = (not_after_s - self._clock.now_us() / 1e6) / _DAY_S
        if left_days <= 0:
            return wrong(f"{files.cert} expired on {day}: nobody takes it any more; put a new one in its place")
        text = f"{files.cert} is good until {day}"
        return concern(f"{text}; put a new one in its place") if left_days < WARNED_DAYS else well(text)

    def steps(self, *, everything: bool) -> Steps:
        """See `Source`."""
        del everything
        yield
        families: list[Metric] = []
        not_after_s = self._tls.not_after_s
        if not_after_s is not None:
            families.append(
                GaugeMetricFamily(
                    "kera_certificate_not_after_seconds",
                    "Until when this daemon's certificate is good, in seconds since 1970.",
                    not_after_s,
                )
            )
        return families
