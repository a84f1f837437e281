"""Errors that only a backup raises, when its state of a replica differs from the broker's."""

from __future__ import annotations

from kera.core.errors import NotAccepted


class UnknownReplica(NotAccepted):
    """The backup has no such replica."""

    code = "unknown_replica"


class ReplicaOffset(NotAccepted):
    """The replica does not have the length from which the request continues; `attributes` has both lengths."""

    code = "replica_offset"


class ReplicaClosed(NotAccepted):
    """Nothing can be appended to the replica any more: open another virtual segment."""

    code = "replica_closed"
