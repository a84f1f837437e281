"""Remarks on a rule that is valid and may not be meant: nothing has the names in it."""

from __future__ import annotations

from kera.coordinator.access.records import AccessRecords
from kera.coordinator.cluster.catalog import Catalog
from kera.core.access.identity import EVERYBODY, USER
from kera.core.base.spelling import closest
from kera.core.errors import UnknownStream
from kera.v1 import access_pb2 as messages

COMPARED_MAX = 1000
"""Names of streams, to find what somebody has meant: comparing more would hold everybody up."""


def remark_on(rule: messages.AccessRule, catalog: Catalog, records: AccessRecords) -> str:
    """For people; empty: there is nothing to say."""
    remarks = []
    kind, _, name = rule.resource.partition(":")
    if kind == "stream" and not name.endswith("*"):
        try:
            catalog.named(name)
        except UnknownStream:
            known = [stream.name for stream in catalog.streams()] if len(catalog) <= COMPARED_MAX else []
            meant = closest(name, known)
            remarks.append(f"there is no stream {name!r} now" + (f"; did you mean {meant!r}?" if meant else ""))
    if kind == "domain" and not name.endswith("*"):
        domains = {stream.config.memory_domain for stream in catalog.streams()}
        if name not in domains:
            meant = closest(name, sorted(domains))
            text = f"no stream is in memory domain {name!r} now"
            remarks.append(text + (f"; did you mean {meant!r}?" if meant else ""))
    user = rule.principal.removeprefix(USER)
    if rule.principal.startswith(USER) and rule.principal != EVERYBODY and records.user(user) is None:
        remarks.append(f"no user {user!r} is kept here, which is right for one with a certificate or a JWT")
    return "; ".join(remarks)
