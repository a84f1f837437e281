"""Until when a certificate is good: for a daemon's health, as a metric, and for who is about to use it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from kera.core.base.clock import Clock
from kera.core.base.health import Finding, State, concern, well, wrong
from kera.core.security import Tls
from kera.server.monitoring.sources import Steps

WARNED_DAYS = 30
_DAY_S = 86_400


def lasting(cert: Path | None, not_after_s: float, now_s: float) -> Finding:
    """Whether a certificate is good, and for long enough, by seconds since 1970. What to do is left to who tells it."""
    day = f"{datetime.fromtimestamp(not_after_s, UTC):%Y-%m-%d %H:%M} UTC"
    left_days = (not_after_s - now_s) / _DAY_S
    if left_days <= 0:
        return wrong(f"{cert} expired on {day}: nobody takes it any more")
    text = f"{cert} is good until {day}"
    return concern(text) if left_days < WARNED_DAYS else well(text)


class Certificates:
    """The certificates of one daemon; a `Source`."""

    def __init__(self, tls: Tls, clock: Clock) -> None:
        self._tls = tls
        self._clock = clock

    def look(self) -> Finding:
        """For `Health.add`."""
        not_after_s, cert = self._tls.not_after_s, self._tls.files.cert
        found = well("it has none")
        if not_after_s is not None:
            found = lasting(cert, not_after_s, self._clock.now_us() / 1e6)
        if problem := self._tls.problem:
            text = f"what the files hold now is not taken: {problem}"
            return wrong(f"{found.text}; {text}") if found.state is State.PROBLEM else concern(text)
        if found.state is State.OK and (unfit := self._tls.unfit):
            found = concern(unfit)
        if found.state is State.OK:
            return found
        return Finding(found.state, f"{found.text}; put a new one in its place")

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
