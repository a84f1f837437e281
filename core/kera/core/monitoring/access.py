"""Who has authenticated, who could not, and what was denied: counts of one daemon with security on."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kera.core.access.guard import Guard
from kera.core.monitoring.sources import Steps


class AccessCounts:
    """A `Source`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def steps(self, *, everything: bool) -> Steps:
        """See `Source`."""
        del everything
        yield
        audit, known = self._guard.audit, self._guard.known
        return [
            CounterMetricFamily(
                "kera_access_authentications_failed", "Times that somebody showed nothing that is good.", audit.failed
            ),
            CounterMetricFamily("kera_access_denied", "Requests of what somebody may not do.", audit.denied),
            CounterMetricFamily(
                "kera_access_changes", "Changes of users, rules and tokens that this coordinator made.", audit.changed
            ),
            GaugeMetricFamily("kera_access_version", "Of the users and rules that hold.", self._guard.version),
            GaugeMetricFamily(
                "kera_access_connections", "Connections and calls of those who have authenticated.", known.peers
            ),
        ]
