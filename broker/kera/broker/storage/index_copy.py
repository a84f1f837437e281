"""Copies the intact records of an index: ``python -m kera.broker.storage.index_copy FROM TO``, a separate process.

LMDB has no checksums, and trusts its pages. A process that reads a damaged page may crash, so the copy runs in a
process where nothing can be lost. It prints, as JSON, how many records are intact, damaged, and missing from the tree,
and whether the copy could be written: on a full disk it only checks the records. ``foreign`` counts named databases: an
index has none, but the metadata of a coordinator does.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import lmdb

from kera.broker.storage.index import MAP_BYTES
from kera.broker.storage.index_format import intact

BATCH_RECORDS = 10_000
OTHERS = frozenset({b"store", b"records"})
"""The named databases in a coordinator's metadata. No key of an index looks like these."""


def copy_intact(source: Path, target: Path) -> dict[str, int]:
    """Copy the intact records; return the counts that the process prints."""
    with lmdb.open(str(source), map_size=MAP_BYTES, readonly=True, lock=False) as old:
        expected = old.stat()["entries"]
        records: list[tuple[bytes, bytes]] = []
        copied = damaged = foreign = 0
        copy = _Copy(target)
        last = b""
        with old.begin() as reading:
            for key, value in reading.cursor():
                if key <= last or copied + damaged > expected:
                    damaged += 1
                    break
                last = key
                foreign += key in OTHERS
                if not intact(key, value):
                    damaged += 1
                    continue
                copied += 1
                records.append((key, value))
                if len(records) == BATCH_RECORDS:
                    copy.add(records)
                    records = []
        copy.add(records)
        written = copy.close()
    return {
        "copied": copied,
        "damaged": damaged,
        "missing": max(0, expected - copied - damaged),
        "foreign": foreign,
        "written": written,
    }


class _Copy:
    """The copy, which is given up when the disk does not take it."""

    def __init__(self, path: Path) -> None:
        self._environment: lmdb.Environment | None = None
        with contextlib.suppress(OSError, lmdb.Error):
            path.mkdir(parents=True)
            self._environment = lmdb.open(str(path), map_size=MAP_BYTES, sync=False, lock=False, mode=0o600)

    def add(self, records: list[tuple[bytes, bytes]]) -> None:
        """Append records, which must be in order and behind those already there."""
        if self._environment is None:
            return
        try:
            with self._environment.begin(write=True) as writing:
                for key, value in records:
                    writing.put(key, value, append=True)
        except lmdb.Error:
            self._environment.close()
            self._environment = None

    def close(self) -> bool:
        """Close the copy; return whether all of it is on disk."""
        if self._environment is None:
            return False
        try:
            self._environment.sync(True)  # noqa: FBT003 - lmdb's own signature
        except lmdb.Error:
            return False
        finally:
            self._environment.close()
        return True


if __name__ == "__main__":
    json.dump(copy_intact(Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
