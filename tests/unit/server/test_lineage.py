"""Versions of a stream's assignments, and their ancestors."""

from kera.server.lineage import CHANGES_BITS, COORDINATORS_MAX, comes_from, new_version
from kera.v1 import common_pb2


def changed(stream: common_pb2.StreamInfo, coordinator_epoch: int, times: int = 1) -> common_pb2.StreamInfo:
    later = common_pb2.StreamInfo()
    later.CopyFrom(stream)
    for _ in range(times):
        new_version(later, coordinator_epoch)
    return later


def test_all_earlier_versions_of_all_coordinators_are_ancestors() -> None:
    versions, stream = [], common_pb2.StreamInfo()
    for coordinator_epoch in (3, 4, 9):
        for _ in range(3):
            stream = changed(stream, coordinator_epoch)
            versions.append(stream.assignments_version)

    assert versions == sorted(set(versions))
    assert all(comes_from(stream, version) for version in (0, *versions))
    assert len(stream.assignments_lineage) == 3


def test_changes_after_a_copy_are_of_another_history() -> None:
    copy = changed(common_pb2.StreamInfo(), 3, times=2)
    same_coordinator, another = changed(copy, 3), changed(copy, 4)
    restored = changed(copy, 5)

    for later in (same_coordinator, another):
        assert comes_from(later, copy.assignments_version)
        assert not comes_from(copy, later.assignments_version)
        assert not comes_from(restored, later.assignments_version)
        assert not comes_from(later, restored.assignments_version)


def test_a_stream_without_a_lineage_gets_one_at_its_next_change() -> None:
    old = common_pb2.StreamInfo(assignments_version=7)
    now = changed(old, 5)

    assert list(now.assignments_lineage) == [7, 5 << CHANGES_BITS]
    assert comes_from(now, 7)
    assert comes_from(old, 6)
    assert not comes_from(old, 8)


def test_versions_of_coordinators_beyond_the_lineage_are_of_another_history() -> None:
    first = stream = changed(common_pb2.StreamInfo(), 1)
    for coordinator_epoch in range(2, COORDINATORS_MAX + 2):
        stream = changed(stream, coordinator_epoch)

    assert len(stream.assignments_lineage) == COORDINATORS_MAX
    assert not comes_from(stream, first.assignments_version)
