"""The simulated disk loses only data that a real disk may lose."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pytest

from kera.backup.log_file import aligned
from kera.broker.storage.disk import BLOCK_BYTES, LocalDisk
from kera.core.base.blocks import sync_directory
from kera.core.data_dir import replace_durably
from tests.simulation.engine.disk import MachineDisk, PowerLost

SEEDS = range(40)


def disk_at(root: Path, seed: int = 0) -> MachineDisk:
    """A disk with a directory ``files``."""
    (root / "files").mkdir(parents=True)
    return MachineDisk(root / "kept", Random(seed), lambda: None)


def block(letter: bytes) -> bytes:
    return letter * BLOCK_BYTES


def test_a_power_loss_keeps_synced_blocks_and_any_of_the_others(tmp_path: Path) -> None:
    found = set()
    for seed in SEEDS:
        root = tmp_path / str(seed)
        disk = disk_at(root, seed)
        calls, path = disk.calls(), root / "files" / "a"
        fd = calls.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        calls.write(fd, [block(b"1") + block(b"2")], 0)
        calls.sync(fd)
        sync_directory(path.parent, calls)
        calls.write(fd, [block(b"3") + block(b"4")], 0)
        disk.power_lost()
        data = path.read_bytes()
        found.add(data[:1] + data[BLOCK_BYTES : BLOCK_BYTES + 1])
        calls.close(fd)
    assert found == {b"12", b"14", b"32", b"34"}


def test_a_power_loss_undoes_the_last_changes_of_names_first(tmp_path: Path) -> None:
    found = set()
    for seed in SEEDS:
        root = tmp_path / str(seed)
        disk = disk_at(root, seed)
        calls = disk.calls()
        for name in "abc":
            calls.close(calls.open(root / "files" / name, os.O_RDWR | os.O_CREAT, 0o600))
        calls.rename(root / "files" / "b", root / "files" / "a")
        calls.remove(root / "files" / "c")
        disk.power_lost()
        found.add("".join(sorted(path.name for path in (root / "files").iterdir())))
    assert found == {"", "a", "ab", "abc", "ac"}


@pytest.mark.parametrize("synced", [True, False])
def test_a_removed_file_comes_back_only_if_the_removal_was_not_synced(tmp_path: Path, synced: bool) -> None:
    back = 0
    for seed in SEEDS:
        root = tmp_path / str(seed)
        simulated = disk_at(root, seed)
        disk, path = LocalDisk(root, calls=simulated.calls()), root / "files" / "a"
        disk.create(path, BLOCK_BYTES)
        disk.remove(path)
        if synced:
            disk.sync_removals([path, root / "never made" / "b"])
        simulated.power_lost()
        back += path.exists()
    assert (back == 0) is synced


def test_a_later_sync_does_not_make_blocks_of_a_failed_sync_durable(tmp_path: Path) -> None:
    disk = disk_at(tmp_path)
    calls, path = disk.calls(), tmp_path / "files" / "a"
    fd = calls.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    calls.write(fd, [block(b"1")], 0)
    calls.sync(fd)
    sync_directory(path.parent, calls)
    calls.write(fd, [block(b"2") + block(b"2")], 0)
    disk.error = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        calls.sync(fd)
    disk.error = 0
    calls.sync(fd)
    calls.write(fd, [block(b"3")], BLOCK_BYTES)
    calls.sync(fd)
    disk.power_lost()
    assert path.read_bytes() == block(b"1") + block(b"3")
    calls.close(fd)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_loss_in_the_middle_leaves_the_old_or_the_new_file(tmp_path: Path, seed: int) -> None:
    """Small files and closed segments are replaced atomically and durably on such a disk."""
    disk = disk_at(tmp_path, seed)
    small, large = tmp_path / "files" / "small", tmp_path / "files" / "1" / "large"
    replace_durably(small, b"old", disk.calls())
    disk.operations_left = seed // 2
    data = aligned(2 * BLOCK_BYTES)
    data[:] = block(b"1") + block(b"2")
    done = False
    try:
        replace_durably(small, b"new", disk.calls())
        files = LocalDisk(tmp_path, disk.calls())
        files.overwrite(tmp_path / "files" / "spare", data)
        files.move(tmp_path / "files" / "spare", large)
        done = True
    except PowerLost:
        pass
    disk.power_lost()
    assert small.read_bytes() in {b"old", b"new"}
    if done:
        assert small.read_bytes() == b"new"
    if done or large.exists():
        assert large.read_bytes() == block(b"1") + block(b"2")
