"""Copy the intact records of an index: ``python -m kera.broker.index_copy FROM TO``, a process of its own.

LMDB has no checksums of its own, and trusts its pages. Whoever reads a damaged one may crash, which is why this is not
done where anything could be lost. Prints, as JSON, how many records were copied, damaged, and missing from the tree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lmdb

from kera.broker.segment_index import MAP_BYTES, intact


def copy_intact(source: Path, target: Path) -> dict[str, int]:
    """Copy record by record; see the head of this module."""
    target.mkdir(parents=True)
    copied = damaged = 0
    last = b""
    with (
        lmdb.open(str(source), map_size=MAP_BYTES, readonly=True, lock=False) as old,
        lmdb.open(str(target), map_size=MAP_BYTES, sync=False, mode=0o600) as new,
    ):
        expected = old.stat()["entries"]
        with old.begin() as reading, new.begin(write=True) as writing:
            for key, value in reading.cursor():
                if key <= last or copied + damaged > expected:
                    damaged += 1
                    break
                last = key
                if intact(key, value):
                    writing.put(key, value, append=True)
                    copied += 1
                else:
                    damaged += 1
        new.sync(True)  # noqa: FBT003 - lmdb's own signature
    return {"copied": copied, "damaged": damaged, "missing": max(0, expected - copied - damaged)}


if __name__ == "__main__":
    json.dump(copy_intact(Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
