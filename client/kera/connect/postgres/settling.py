"""Waits for transactions that may still add rows before a place that has been read.

Sequences give out numbers before their rows become visible. So a reader that has seen the row with the largest key, or
has taken a snapshot, waits until all transactions that were writing at that moment have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kera.connect.errors import Refused
from kera.connect.postgres import sql
from kera.connect.postgres.connection import Database

PAUSE_S = 0.05
SETTLE_S = 60.0
"""How long a copy waits for such transactions, unless the address has ``settle``."""


def settled(database: Database, source: str, shown: str, *, is_table: bool, settle_s: float) -> Iterator[None]:
    """Wait until the transactions that write to `source` now have ended; yield None repeatedly meanwhile.

    `is_table`: `source` is a table. For a view or a query, any transaction may write to the tables that it reads.
    `settle_s`: the time limit; 0 does not wait at all. Raises `Refused` if a transaction has not ended in time.
    """
    if not settle_s:
        return
    under_way = _under_way(database, source, is_table=is_table)
    until_s = time.monotonic() + settle_s
    while under_way():
        if time.monotonic() > until_s:
            raise Refused(
                f"{shown}: a transaction has been under way for {settle_s:.0f} s, and may yet add rows with smaller"
                " keys than are there. Start the copy again when it has ended; with settle=0 in the address it does"
                " not wait, and passes over such rows"
            )
        time.sleep(PAUSE_S)
        yield None


def _under_way(database: Database, source: str, *, is_table: bool) -> Callable[[], bool]:
    """Return a function that returns whether any of the transactions that may be writing now is still under way."""
    if is_table:
        writers = set(database.rows(sql.WRITERS, [source]))
        database.commit()

        def some_write() -> bool:
            writers.intersection_update(database.rows(sql.WRITERS, [source]) if writers else ())
            database.commit()
            return bool(writers)

        return some_write
    ((horizon,),) = database.rows(sql.NEXT_TRANSACTION)
    database.commit()

    def some_are_older() -> bool:
        ((oldest,),) = database.rows(sql.OLDEST_TRANSACTION)
        database.commit()
        return bool(oldest < horizon)

    return some_are_older
