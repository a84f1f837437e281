"""Reads stored records again while a coordinator leads, and restores the ones that somebody else changed.

The leader is the store's only writer, but in ZooKeeper somebody else can delete or add a node, or set another value.
The next leader would find that the census is wrong, and refuse to lead. So the leader reads a few records each second,
and all of them within a few minutes. Its memory has what was written last: it puts a record back that differs, deletes
one that it never wrote, and reports this in the log and in its health. Like every write, this one depends on the record
of the leader, so a coordinator that another one has replaced restores nothing.

A node whose name stands for no record is not noticed here: the store reports it to the next leader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from kera.coordinator.cluster.state import State
from kera.coordinator.store.leadership import LEADER
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError

log = get_logger("kera.coordinator")

PAUSE_S = 1.0
TURNS_PER_ROUND = 60
RECORDS_PER_TURN_MIN, RECORDS_PER_TURN_MAX = 10, 100
SHOWN_S = 3600.0
"""How long health reports a record that was put back, in seconds."""


class Rereading:
    """Rereads the stored records in turns, and restores a record that another program changed."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._left: list[str] = []
        """Keys that have yet to be read in this round."""
        self._per_turn = RECORDS_PER_TURN_MIN
        self._reading: asyncio.Task[None] | None = None
        self._put_back, self._put_back_s = "", 0.0
        """The records that were put back last, in words, and the time."""

    def start(self) -> None:
        """Begin to read."""
        self._reading = asyncio.create_task(self._read_for_ever())

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    @property
    def problem(self) -> str:
        """The records that somebody else changed in the store recently, in words; empty: none."""
        is_old = self._state.clock.monotonic_s() - self._put_back_s > SHOWN_S
        return "" if is_old else self._put_back

    async def _read_for_ever(self) -> None:
        while not self._state.lost.done():
            await asyncio.sleep(PAUSE_S)
            try:
                await self.turn()
            except KeraError as error:
                log.warning("records of the metadata could not be read again", error=error.message)
            except Exception:
                log.exception("unexpected exception while records of the metadata were read again")

    async def turn(self) -> None:
        """Compare the next few records, and undo foreign changes. Raises the store's errors."""
        ledger = self._state.ledger
        if not self._left:
            self._left = [key for key in (*ledger.snapshot(), *await ledger.added_by_others()) if key != LEADER]
            wanted = -(-len(self._left) // TURNS_PER_ROUND)
            self._per_turn = min(max(wanted, RECORDS_PER_TURN_MIN), RECORDS_PER_TURN_MAX)
        some, self._left = self._left[: self._per_turn], self._left[self._per_turn :]
        changed = await ledger.changed_by_others(some)
        if changed:  # or this coordinator has just changed them: look again while it writes nothing
            await self._state.change(self._restore(list(changed)))

    async def _restore(self, keys: Sequence[str]) -> None:
        state = self._state
        changed = await state.ledger.changed_by_others(keys)
        if not changed or state.lost.done():
            return
        added = [key for key in changed if state.ledger.get(key) is None]
        await state.restore(changed)
        deleted = [key for key, version in changed.items() if not version]
        log.error(
            "restored records of the metadata: another program deleted, changed or added them in the store",
            deleted=deleted,
            changed=[key for key in changed if key not in deleted and key not in added],
            added=added,
        )
        one, others = next(iter(changed)), f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        did = "deleted" if one in deleted else "added" if one in added else "changed"
        undone = "deleted it" if one in added else "put it back"
        self._put_back_s = state.clock.monotonic_s()
        self._put_back = (
            f"another program {did} record {one}{others} in the store, and the coordinator {undone}; find the other"
            " writer: only coordinators may write"
        )
