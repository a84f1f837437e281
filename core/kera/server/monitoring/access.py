"""Metrics of access at a daemon with security on: authentications, failures, denials, and the usage of principals."""

from __future__ import annotations

from collections import Counter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kera.server.access.guard import Guard
from kera.server.monitoring.sources import Steps

PRINCIPALS_MAX = 20
"""Number of principals, the busiest ones, that have separate series."""
_COUNTED = {
    "requests": ("requests", "Requests of a principal."),
    "bytes_in": ("bytes_in", "Bytes of chunks that a principal has written."),
    "bytes_out": ("bytes_out", "Bytes of chunks that a principal has read."),
    "waits": ("throttled", "Answers that were held back as the principal's quota was used up."),
    "waited_s": ("throttled_seconds", "Total time that answers were held back."),
}
"""The figures of each principal, and their metrics."""


class AccessCounts:
    """The metrics of access, as a `Source`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def steps(self, *, everything: bool) -> Steps:
        """See `Source`."""
        yield
        audit, known = self._guard.audit, self._guard.known
        families: list[Metric] = [
            CounterMetricFamily("kera_access_authentications_failed", "Authentications that failed.", audit.failed),
            CounterMetricFamily("kera_access_denied", "Requests that were denied.", audit.denied),
            CounterMetricFamily(
                "kera_access_changes",
                "Changes of users, rules, streams, groups and members that this daemon carried out.",
                audit.changed,
            ),
            GaugeMetricFamily("kera_access_version", "Version of the users and rules in force.", self._guard.version),
            GaugeMetricFamily(
                "kera_access_connections", "Connections and calls of authenticated clients.", known.peers
            ),
        ]
        if everything:
            families += self._of_principals()
        return families

    def _of_principals(self) -> list[Metric]:
        totals: dict[str, Counter[str]] = {}
        # A user has two usages if only some of its identities are super users.
        for usage in self._guard.usages.busiest(PRINCIPALS_MAX):
            of = totals.setdefault(usage.who.principal, Counter())
            of.update({name: getattr(usage, name) for name in (*_COUNTED, "connections")})
        families: list[Metric] = []
        for name, (metric, text) in _COUNTED.items():
            counted = CounterMetricFamily(f"kera_principal_{metric}", text, labels=["principal"])
            for principal, of in totals.items():
                counted.add_metric([principal], of[name])
            families.append(counted)
        connections = GaugeMetricFamily(
            "kera_principal_connections", "Connections that a principal has.", labels=["principal"]
        )
        for principal, of in totals.items():
            connections.add_metric([principal], of["connections"])
        left_out = GaugeMetricFamily(
            "kera_principals_left_out",
            "Principals with requests, but without series of their own.",
            value=max(0, len(self._guard.usages) - PRINCIPALS_MAX),
        )
        return [*families, connections, left_out]
