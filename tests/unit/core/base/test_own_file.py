import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kera.core.base.own_file import open_own, open_own_directory

NOBODY = 65_534


def link(path: Path) -> None:
    own = path.with_name("own")
    own.touch(0o600)
    path.symlink_to(own)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def of_nobody(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    path.touch(0o600)
    os.chown(path, NOBODY, NOBODY)


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (link, "a symbolic link"),
    "pipe": (os.mkfifo, "a pipe"),
    "directory": (Path.mkdir, "a directory"),
    "socket": (listening, "a socket"),
    "other user": (of_nobody, f"it belongs to user {NOBODY}"),
    "other mode": (lambda path: path.touch(0o640), "other users have access to it (mode 0640)"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_file_that_is_not_this_users_own_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "planted"
    plant, reason = PLANTED[what]
    plant(path)

    with pytest.raises(PermissionError) as raised:
        open_own(path, os.O_RDWR)

    assert reason in str(raised.value)
    assert raised.value.filename == str(path)


def test_an_own_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "own"
    path.touch(0o600)

    fd = open_own(path, os.O_RDWR)

    assert stat.S_ISREG(os.fstat(fd).st_mode)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_file_has_to_belong_to_the_named_user(tmp_path: Path) -> None:
    path = tmp_path / "own"
    path.touch(0o600)

    with pytest.raises(PermissionError, match="belongs to user"):
        open_own(path, user=os.geteuid() + 1)
    os.close(open_own(path, user=os.geteuid()))


def test_a_file_that_is_replaced_before_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, others = tmp_path / "own", tmp_path / "others"
    path.touch(0o600)
    others.touch()
    others.chmod(0o666)
    opening = os.open

    def replaced(name: Path, flags: int, *rest: int) -> int:
        others.replace(path)
        return opening(name, flags, *rest)

    monkeypatch.setattr(os, "open", replaced)

    with pytest.raises(PermissionError, match="other users have access"):
        open_own(path)


def test_only_an_own_directory_is_opened(tmp_path: Path) -> None:
    own, linked, shared = tmp_path / "own", tmp_path / "linked", tmp_path / "shared"
    own.mkdir(0o700)
    linked.symlink_to(own)
    shared.mkdir(0o755)

    os.close(open_own_directory(own))
    with pytest.raises(OSError, match="linked"):
        open_own_directory(linked)
    with pytest.raises(PermissionError, match="other users have access"):
        open_own_directory(shared)
