"""The common part of the checks of data directories."""

from pathlib import Path
from typing import ClassVar

import pytest

from kera.core import data_dir
from kera.core.errors import StartError
from kera.server.verifying import check_identity, unused


class Identity(data_dir.MemberIdentity):
    """The identity of a daemon."""

    role: ClassVar[str] = "daemon"


class Directory(data_dir.DataDirectory):
    """The data directory of a daemon."""

    identity: ClassVar[type[data_dir.MemberIdentity]] = Identity


@pytest.fixture
def path(tmp_path: Path) -> Path:
    owner = Directory(tmp_path)
    owner.store(3, "cluster")
    owner.close()
    return tmp_path


def test_no_daemon_starts_in_a_directory_during_its_check(path: Path) -> None:
    with unused(path) as free:
        assert free
        with pytest.raises(StartError):
            Directory(path)
    owner = Directory(path)
    with unused(path) as free:
        assert not free
    owner.close()


def test_a_directory_without_a_lock_is_unused(tmp_path: Path) -> None:
    with unused(tmp_path) as free:
        assert free


def test_both_files_are_checked(path: Path) -> None:
    assert list(check_identity(path, Identity)) == []
    first, copy = (path / name for name in Identity.names())
    first.write_bytes(b"{}")
    assert [(each.severity, each.path) for each in check_identity(path, Identity)] == [("damage", first)]
    first.unlink()
    assert [(each.severity, each.path) for each in check_identity(path, Identity)] == [("warning", first)]
    copy.unlink()
    (finding,) = check_identity(path, Identity)
    assert finding.text == "is missing: a daemon would join as a new one, to which none of this belongs"
