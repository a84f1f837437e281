"""Small files with the state of daemons and tools, each with every kind of damage.

A file that has a copy is rewritten from it. A file without a copy is refused with an error that names it, or is known
to be gone. A damaged file never yields a value that was not written: it has a checksum, or the damage is in a name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kera.backup.fences import load_fences, store_fences
from kera.backup.registration import BackupDirectory
from kera.broker.registration import BrokerDirectory
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_copy import copy_intact
from kera.cli import _contexts
from kera.cli._run import UsageError
from kera.connect.endpoints import parse_end
from kera.connect.files.sink import STATE, FilesSink
from kera.connect.pieces import Piece
from kera.core.data_dir import DataDirectory
from kera.core.errors import KeraError
from tests.unit.connect.test_files import ROWS, given


class Kept(NamedTuple):
    """State of one kind."""

    names: tuple[str, ...]
    """Names of the file, and of its copy if it has one."""
    store: Callable[[Path], Any]
    """Writes the state below a directory; returns the expected result of `load`."""
    load: Callable[[Path], Any]
    nothing: Any
    """The result of `load` without the file, or the exceptions that it raises then."""


def _store_identity(kind: type[DataDirectory]) -> Callable[[Path], Any]:
    def store(path: Path) -> Any:
        owner = kind(path, lambda: "f00d")
        owner.store(7, "cluster", 3)
        owner.close()
        return 7, "cluster", "f00d", 3

    return store


def _load_identity(kind: type[DataDirectory]) -> Callable[[Path], Any]:
    def load(path: Path) -> Any:
        owner = kind(path, lambda: "new")
        try:
            return *owner.load(), owner.directory_id, owner.coordinator_epoch
        finally:
            owner.close()

    return load


def _store_fences(path: Path) -> dict[int, int]:
    store_fences(path, {1: 1, 2: 1 << 40})
    return {1: 1, 2: 1 << 40}


async def _copied(path: Path) -> Any:
    sink = FilesSink(parse_end(f"{path}/", file_format="jsonl"))  # type: ignore[arg-type]
    try:
        progress = await sink.open(given(ROWS.schema))
        if not progress.places:
            await sink.put([Piece("0", 0, 1, ROWS)])
            await sink.finish(complete=True)
        return dict(progress.places), progress.records
    finally:
        await sink.close()


def _store_copy(path: Path) -> Any:
    asyncio.run(_copied(path))
    return {"0": 1}, ROWS.num_rows


def _store_contexts(path: Path) -> Any:
    (path / "kera").mkdir()
    with _contexts.changing() as contexts:
        contexts.by_name["here"] = _contexts.Context("127.0.0.1:7420")
        contexts.current = "here"
    return _contexts.load()


def _store_index(path: Path) -> Any:
    SegmentIndex.open(path).close(clean=True)
    return True


def _load_index(path: Path) -> Any:
    index, whole = SegmentIndex.open_checked(path, copy_intact)
    index.close(clean=True)
    return whole


NOBODY = (0, "", "new", 0)
KEPT = {
    "broker": Kept(
        BrokerDirectory.identity.names(), _store_identity(BrokerDirectory), _load_identity(BrokerDirectory), NOBODY
    ),
    "backup": Kept(
        BackupDirectory.identity.names(), _store_identity(BackupDirectory), _load_identity(BackupDirectory), NOBODY
    ),
    "fences": Kept(("fences.json", "fences.copy.json"), _store_fences, load_fences, {}),
    "copy": Kept((STATE,), _store_copy, lambda path: asyncio.run(_copied(path)), KeraError),
    "contexts": Kept(("kera/contexts.json",), _store_contexts, lambda _: _contexts.load(), _contexts.Contexts()),
    "index": Kept(("data.crc32",), _store_index, _load_index, True),
}
ALIKE = {"backup"}
"""Kinds that the code of another kind stores: identities."""


def _flipped(data: bytes) -> bytes:
    """Data with another digit or letter, which are still JSON."""
    at = next(at for at in range(len(data) // 2, len(data)) if chr(data[at]).isalnum())
    return data[:at] + (b"1" if data[at : at + 1] != b"1" else b"2") + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "flipped": _flipped,
    "list": lambda _: b"[]",
    "number": lambda _: b"7",
    "fields of other types": lambda data: json.dumps({name: [1] for name in _fields(data)}).encode(),
    "nested": lambda _: b"[" * 100_000,
    "no text": lambda _: b"\xff\xfe\x00",
}


def _fields(data: bytes) -> dict[str, Any]:
    found = json.loads(data) if data.startswith(b"{") else {"format": 1}
    return {name: value for name, value in found.items() if name != "crc32c"}


@pytest.fixture
def directory(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(in_memory))
    return in_memory


def spoil(path: Path, damage: str) -> None:
    data = DAMAGES[damage](path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(kind, at, marks=[pytest.mark.slow] if kind in ALIKE else [])
        for kind, kept in KEPT.items()
        for at in range(len(kept.names))
    ],
)
def test_a_damaged_file_is_restored_from_its_copy_or_refused_by_name(
    directory: Path, kind: str, number: int, damage: str
) -> None:
    kept = KEPT[kind]
    written = kept.store(directory)
    assert kept.load(directory) == written
    spoil(directory / kept.names[number], damage)
    if len(kept.names) == 2:
        assert kept.load(directory) == written
        files = [(directory / name).read_bytes() for name in kept.names]
        assert files[0] == files[1], "the damaged one is not written anew"
    elif kind == "index" or (damage == "missing" and not isinstance(kept.nothing, type)):
        assert kept.load(directory) == kept.nothing
    else:
        with pytest.raises((KeraError, UsageError)) as caught:
            kept.load(directory)
        assert damage == "missing" or str(directory / kept.names[0]) in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if kind in ALIKE else [])
        for kind, kept in KEPT.items()
        if len(kept.names) == 2
    ],
)
def test_a_damaged_file_with_a_damaged_copy_is_refused_with_a_remedy(directory: Path, kind: str, damage: str) -> None:
    kept = KEPT[kind]
    kept.store(directory)
    for name in kept.names:
        spoil(directory / name, damage)
    if damage == "missing":
        assert kept.load(directory) == kept.nothing
        return
    with pytest.raises(KeraError, match=r"restore.*or remove") as caught:
        kept.load(directory)
    assert str(directory / kept.names[0]) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", KEPT)
def test_a_partial_temporary_file_is_ignored(directory: Path, kind: str) -> None:
    kept = KEPT[kind]
    written = kept.store(directory)
    for name in kept.names:
        path = directory / name
        for beside in (path.with_suffix(".tmp"), path.with_name(f"{path.name}.tmp")):
            beside.write_bytes(path.read_bytes()[:10])
    assert kept.load(directory) == written
