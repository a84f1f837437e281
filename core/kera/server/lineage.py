"""Versions of a stream's assignments, and their ancestry. Pure.

    version     epoch of the coordinator << 24 | its changes so far; always above the previous version
    lineage     the last version of each coordinator that changed them, the oldest first; the last is the version

Each coordinator has a unique epoch, even after its metadata were restored from an older copy. So version A is an
ancestor of version B if B's lineage has a version of the same coordinator which is not lower. Two versions of which
neither is an ancestor of the other belong to different histories: a coordinator has changed the assignments without
knowledge of the other version.
"""

from __future__ import annotations

from kera.v1 import common_pb2

CHANGES_BITS = 24
COORDINATORS_MAX = 64
"""Maximum in a lineage. A member that was away while more coordinators changed the stream counts as having another
history: its data are kept, and reported."""


def new_version(stream: common_pb2.StreamInfo, coordinator_epoch: int) -> None:
    """Give `stream`, whose assignments this coordinator has changed, its next version."""
    lineage = _lineage(stream)
    version = max(stream.assignments_version + 1, coordinator_epoch << CHANGES_BITS)
    if lineage and _coordinator(lineage[-1]) == _coordinator(version):
        lineage.pop()
    lineage.append(version)
    stream.assignments_version = version
    stream.assignments_lineage[:] = lineage[-COORDINATORS_MAX:]


def join(stream: common_pb2.StreamInfo, other: common_pb2.StreamInfo) -> None:
    """Make `stream` a descendant of both, before it gets its next version."""
    lineage: dict[int, int] = {}
    for version in (*_lineage(stream), *_lineage(other)):
        lineage[_coordinator(version)] = max(version, lineage.get(_coordinator(version), 0))
    stream.assignments_lineage[:] = sorted(lineage.values())
    stream.assignments_version = max(lineage.values(), default=0)


def comes_from(stream: common_pb2.StreamInfo, version: int) -> bool:
    """Return whether a stream's assignments are `version` or descend from it; 0, an unknown version, counts as yes."""
    return version == 0 or any(
        _coordinator(one) == _coordinator(version) and version <= one for one in _lineage(stream)
    )


def _lineage(stream: common_pb2.StreamInfo) -> list[int]:
    return list(stream.assignments_lineage) or [stream.assignments_version] * bool(stream.assignments_version)


def _coordinator(version: int) -> int:
    return version >> CHANGES_BITS
