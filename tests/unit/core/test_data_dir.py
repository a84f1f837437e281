"""Whose a data directory is, as those are told who cannot have it."""

import os
from pathlib import Path

import pytest

from kera.backup import registration as backup
from kera.broker import registration as broker
from kera.coordinator.store.data_dir import DataDir, DataDirInUse
from kera.core.data_dir import LOCK_NAME, DataDirectory
from kera.core.errors import StartError

KINDS: dict[str, type[DataDirectory]] = {"broker": broker.BrokerDirectory, "backup": backup.BackupDirectory}
ME = rf"\(process {os.getpid()}\)"


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_who_has_it_is_named_by_its_kind(tmp_path: Path, first: str, second: str) -> None:
    holder = KINDS[first](tmp_path)
    which = f"another {first}" if first == second else f"a {first}"
    with pytest.raises(StartError, match=rf"^{which} {ME} uses data directory .*choose another --data-dir"):
        KINDS[second](tmp_path)
    holder.close()
    KINDS[second](tmp_path).close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_coordinator_is_named_as_one(tmp_path: Path, kind: str) -> None:
    coordinator = DataDir(tmp_path)
    with pytest.raises(StartError, match=rf"^a coordinator {ME} uses data directory"):
        KINDS[kind](tmp_path)
    coordinator.close()
    holder = KINDS[kind](tmp_path)
    with pytest.raises(DataDirInUse, match=rf"^a {kind} {ME} uses data directory"):
        DataDir(tmp_path)
    holder.close()


@pytest.mark.parametrize("written", [b"", b"\xff\xfe", b"what is this?", b"broker x", b"broker 2147483647"])
def test_a_holder_that_has_not_written_who_it_is_is_somebody(tmp_path: Path, written: bytes) -> None:
    holder = KINDS["broker"](tmp_path)
    (tmp_path / LOCK_NAME).write_bytes(written)
    with pytest.raises(StartError, match=r"^another process uses data directory"):
        KINDS["backup"](tmp_path)
    holder.close()
