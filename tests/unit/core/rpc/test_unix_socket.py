"""Unix sockets of daemons: their paths and their modes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kera.core.base.address import UNIX_PATH_BYTES_MAX
from kera.core.rpc.unix_socket import ANY_USER, OWN_USER, SHORT_DIRECTORY_NAME, bind_unix, unix_socket_path


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data directory whose path is too long for sockets; temporary files go to the test's own directory."""
    with tempfile.TemporaryDirectory(prefix="kera-", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        path = tmp_path / ("d" * UNIX_PATH_BYTES_MAX)
        path.mkdir()
        yield path


def test_a_socket_is_in_the_data_directory_or_in_a_short_one(deep: Path) -> None:
    found = [unix_socket_path(deep, name) for name in ("broker", "push", "broker")]

    assert unix_socket_path(Path("/data"), "broker") == Path("/data/broker.sock")
    assert [path.name for path in found] == ["broker.sock", "push.sock", "broker.sock"]
    assert {path.parent for path in found} == {Path((deep / SHORT_DIRECTORY_NAME).read_text())}
    assert all(len(bytes(path)) <= UNIX_PATH_BYTES_MAX for path in found)
    assert found[0].parent.stat().st_mode & 0o777 == 0o711
    bind_unix(found[0]).close()


def test_a_socket_is_in_tmp_if_the_directory_for_temporary_files_is_too_deep(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    path = unix_socket_path(deep, "broker")
    path.parent.rmdir()

    assert path.parent.parent == Path("/tmp")


@pytest.mark.parametrize("spoil", ["gone", "link", "open to others", "no path", "other owner"])
def test_a_short_directory_that_is_no_longer_ours_is_replaced(deep: Path, spoil: str) -> None:
    note = deep / SHORT_DIRECTORY_NAME
    before = unix_socket_path(deep, "broker").parent
    elsewhere = before.with_name("elsewhere")
    if spoil in ("gone", "link"):
        before.rename(elsewhere)
    if spoil == "link":
        before.symlink_to(elsewhere)
    elif spoil == "open to others":
        before.chmod(0o777)
    elif spoil == "no path":
        note.write_bytes(b"\xff\0")
    elif spoil == "other owner":
        if os.geteuid():
            pytest.skip("only root can give a directory to another user")
        os.chown(before, 65_534, 65_534)

    after = unix_socket_path(deep, "broker").parent

    assert after != before
    assert Path(note.read_text()) == after


@pytest.mark.parametrize(
    ("directory_mode", "mode", "warned"), [(0o700, ANY_USER, True), (0o711, ANY_USER, False), (0o700, OWN_USER, False)]
)
def test_a_socket_that_other_users_cannot_reach_is_logged(directory_mode: int, mode: int, warned: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="kera-", dir="/tmp") as name, capture_logs() as lines:
        directory = Path(name)
        directory.chmod(directory_mode)
        bind_unix(directory / "push.sock", mode).close()

    assert [line["directories"] for line in lines] == ([[name]] if warned else [])
