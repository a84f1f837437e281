"""Errors that only a backup has: its own view of a replica and the broker's differ."""

from __future__ import annotations

from kera.core.errors import NotAccepted


class UnknownReplica(NotAccepted):
    """The backup has no such replica."""

    code = "unknown_replica"


class ReplicaOffset(NotAccepted):
    """The replica does not have the length that the request goes on from; `attributes` has both."""

    code = "replica_offset"


class ReplicaClosed(NotAccepted):
    """Nothing can be appended to the replica any more: open another virtual segment."""

    code = "replica_closed"
