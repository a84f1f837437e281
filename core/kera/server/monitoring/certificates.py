"""The validity of a daemon's certificate, for its health and as a metric."""

from __future__ import annotations

from prometheus_client.core import GaugeMetricFamily, Metric

from kera.core.base.clock import Clock
from kera.core.base.health import Observation, State, concern, well, wrong
from kera.core.security import Tls
from kera.core.security.checking import lasting
from kera.server.monitoring.sources import Steps


class Certificates:
    """The certificates of one daemon; a `Source`."""

    def __init__(self, tls: Tls, clock: Clock) -> None:
        self._tls = tls
        self._clock = clock

    def look(self) -> Observation:
        """Return whether the certificate is valid, for `Health.add`."""
        not_after_s, cert = self._tls.not_after_s, self._tls.files.cert
        found = well("it has none")
        if not_after_s is not None:
            found = lasting(cert, not_after_s, self._clock.now_us() / 1e6)
        if problem := self._tls.problem:
            text = f"new files are not accepted: {problem}"
            return wrong(f"{found.text}; {text}") if found.state is State.PROBLEM else concern(text)
        if found.state is State.OK and (unfit := self._tls.unfit):
            found = concern(unfit)
        if found.state is State.OK:
            return found
        return Observation(found.state, f"{found.text}; put a new one in its place")

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
                    "When this daemon's certificate expires, in seconds since 1970.",
                    not_after_s,
                )
            )
        return families
