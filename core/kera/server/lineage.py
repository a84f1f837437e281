"""Versions of a stream's assignments, and which of them come from which. Pure.

    version     epoch of the coordinator << 24 | its changes so far; above the last one in any case
    lineage     the last version of each coordinator that changed them, the oldest first; the last is the version

Each coordinator has an epoch that no other has, also one whose metadata were put back to an older copy. So a version is
an ancestor of another if that one's lineage names a version of the same coordinator which is not lower. What is neither
an ancestor nor a descendant is of another history: somebody has changed the assignments who knew nothing of it.
"""

from __future__ import annotations

from kera.v1 import common_pb2

CHANGES_BITS = 24
COORDINATORS_MAX = 64
"""In a lineage. Who was away while more coordinators than that changed the stream counts as one of another history:
what it has is kept, and told."""


def new_version(stream: common_pb2.StreamInfo, coordinator_epoch: int) -> None:
    """Make `stream`, whose assignments this coordinator has changed, the next version of what it was."""
    lineage = _lineage(stream)
    version = max(stream.assignments_version + 1, coordinator_epoch << CHANGES_BITS)
    if lineage and _coordinator(lineage[-1]) == _coordinator(version):
        lineage.pop()
    lineage.append(version)
    stream.assignments_version = version
    stream.assignments_lineage[:] = lineage[-COORDINATORS_MAX:]


def join(stream: common_pb2.StreamInfo, other: common_pb2.StreamInfo) -> None:
    """Have `stream` come from both, before it is made the next version."""
    lineage: dict[int, int] = {}
    for version in (*_lineage(stream), *_lineage(other)):
        lineage[_coordinator(version)] = max(version, lineage.get(_coordinator(version), 0))
    stream.assignments_lineage[:] = sorted(lineage.values())
    stream.assignments_version = max(lineage.values(), default=0)


def comes_from(stream: common_pb2.StreamInfo, version: int) -> bool:
    """Whether a stream's assignments are this version, or were made from it; 0, which nobody knows, counts as one."""
    return version == 0 or any(
        _coordinator(one) == _coordinator(version) and version <= one for one in _lineage(stream)
    )


def _lineage(stream: common_pb2.StreamInfo) -> list[int]:
    return list(stream.assignments_lineage) or [stream.assignments_version] * bool(stream.assignments_version)


def _coordinator(version: int) -> int:
    return version >> CHANGES_BITS
