"""LMDB databases on a simulated disk, with LMDB's promise: committed transactions last, and all others vanish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import lmdb

from tests.simulation.engine.disk import MachineDisk


class Environment:
    """See `lmdb.Environment`."""

    def __init__(self, disk: MachineDisk, random: Random, path: str, settings: dict[str, Any]) -> None:
        self._disk = disk
        self._random = random
        self._environment = lmdb.open(path, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    @contextmanager
    def begin(self, db: Any = None, *, write: bool = False) -> Iterator[Any]:
        """See `lmdb.Environment.begin`."""
        transaction = self._environment.begin(db=db, write=write)
        try:
            yield transaction
            if write:
                self._commit(transaction)
        finally:
            transaction.abort()

    def _commit(self, transaction: Any) -> None:
        try:
            lost = self._disk.step(Path(self._environment.path()))
        except OSError as error:
            raise lmdb.DiskError(f"mdb_txn_commit: {error.strerror}") from error
        if not lost or self._random.random() < 0.5:
            transaction.commit()
        if lost:
            self._disk.lose_power()
