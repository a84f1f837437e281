"""How many connections a daemon serves at once, and which of them is closed to make room for a new one. Pure.

Each connection takes a file descriptor, and their number is limited. The daemon needs some for its log, its index and
its own connections; otherwise clients that only connect could stop it from writing. So connections are bounded, by a
setting or by the limit of descriptors, and each kind of connection gets a share that other kinds cannot use up.

If a share is full, the least useful connection without requests in flight is closed: first one that has never carried a
request, then the one that has been quiet for longest. If all have requests in flight, the new connection is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from kera.core.base.settings import InvalidSettings

DESCRIPTORS_RESERVED = 512
"""Descriptors for files, for connections to other daemons, and for connections that are just being accepted."""
CONNECTIONS_MAX_DEFAULT = 10_000
"""The maximum unless a setting says otherwise, as each connection takes memory, too."""
BACKLOG = 64
"""Connections that wait to be accepted; an event loop accepts all of them before it serves any."""


class Quiet(Protocol):
    """The properties of a connection that decide whether it may be closed."""

    @property
    def evictable(self) -> bool:
        """Whether nothing is in flight over it."""
        ...

    @property
    def asked(self) -> bool:
        """Whether it has ever carried a request."""
        ...

    @property
    def active_s(self) -> float:
        """When it was last seen to be used."""
        ...


QuietT = TypeVar("QuietT", bound=Quiet)


def connections_max(setting: int | None, descriptors: int) -> int:
    """Return how many connections to serve. Raises `InvalidSettings` if that needs too many descriptors."""
    reserved = min(DESCRIPTORS_RESERVED, descriptors // 2)
    if setting is None:
        return min(CONNECTIONS_MAX_DEFAULT, descriptors - reserved)
    if setting + reserved > descriptors:
        raise InvalidSettings(
            f"connections_max {setting} needs {setting + reserved} file descriptors, {reserved} of them for the"
            f" daemon's own files, and the limit is {descriptors}; raise it (ulimit -n), or set connections_max to"
            f" {descriptors - reserved} or less",
            connections_max=setting,
            descriptors=descriptors,
        )
    return setting


def parts_of(connections: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Return the number of connections for each kind, at least one."""
    total = sum(weights.values())
    return {kind: max(1, connections * weight // total) for kind, weight in weights.items()}


def idlest(connections: Iterable[QuietT]) -> QuietT | None:
    """Return the connection to close for a new one; None: all are in use."""
    return min(
        (each for each in connections if each.evictable), key=lambda each: (each.asked, each.active_s), default=None
    )
