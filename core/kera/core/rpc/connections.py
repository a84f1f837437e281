"""How many connections a daemon serves at once, and which one makes room for another. Pure.

Each connection takes a file descriptor, and a process has so many. What its log, its index and its own connections need
must be left, or clients that only connect could stop it from writing. So connections are bounded, by a setting or by
what the limit of descriptors leaves, and each kind of them gets its part: one kind cannot use up another's.

When a part is full, the connection makes room that is missed least: of those over which nothing is in flight, first
one over which nothing was ever asked, then the one that has been quiet for longest. If there is none, the new one is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from kera.core.base.settings import InvalidSettings

DESCRIPTORS_RESERVED = 512
"""For what is not a connection of a client: files, connections to other daemons, and those just being accepted."""
CONNECTIONS_MAX_DEFAULT = 10_000
"""Unless a setting says otherwise: each takes memory, too."""
BACKLOG = 64
"""Connections that wait to be accepted; an event loop accepts all of them before it looks at one."""


class Quiet(Protocol):
    """A connection, as far as it matters whether it may be closed."""

    @property
    def evictable(self) -> bool:
        """Whether nothing is in flight over it."""
        ...

    @property
    def asked(self) -> bool:
        """Whether anything was ever asked over it."""
        ...

    @property
    def active_s(self) -> float:
        """When it was last seen to be used."""
        ...


QuietT = TypeVar("QuietT", bound=Quiet)


def connections_max(setting: int | None, descriptors: int) -> int:
    """How many connections to serve. Raises `InvalidSettings` when that needs more descriptors than there are."""
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
    """The connections of each kind, at least one each."""
    total = sum(weights.values())
    return {kind: max(1, connections * weight // total) for kind, weight in weights.items()}


def idlest(connections: Iterable[QuietT]) -> QuietT | None:
    """The one to close for another; None: all are in use."""
    return min(
        (each for each in connections if each.evictable), key=lambda each: (each.asked, each.active_s), default=None
    )
