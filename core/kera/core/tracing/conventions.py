"""Attributes of OpenTelemetry's semantic conventions for messaging, version 1.45 (in development), as far as they fit.

A stream is a destination, a streamlet a partition of it, a record a message.
"""

from __future__ import annotations

SYSTEM = "kera"


def messaging(
    operation: str, stream: str, *, messages: int | None = None, group: str = "", kind: str = ""
) -> dict[str, str | int | float | bool]:
    """Return the attributes of a span of `operation`; `kind`: the conventions' operation type, if its name differs."""
    found: dict[str, str | int | float | bool] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind or operation,
    }
    if stream:
        found["messaging.destination.name"] = stream
    if messages is not None:
        found["messaging.batch.message_count"] = messages
    if group:
        found["messaging.consumer.group.name"] = group
    return found
