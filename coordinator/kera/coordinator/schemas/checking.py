"""Compares a schema with earlier ones without holding up the coordinator.

One thread compares, one comparison after the other, and callers with many take turns with others, since even a short
definition may take long. Only small sets of Arrow columns are compared at once in the loop. The number of waiting
comparisons is bounded; the rules bound how long each takes (``kera.server.schemas.differences``).
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

from kera.coordinator.cluster.changing import Changing
from kera.core.errors import IncompatibleSchema, Unavailable
from kera.core.schemas import Compatibility, SchemaType
from kera.server.schemas.compatibility import Definition, Version, incompatibilities

SMALL_CHARS_MAX = 4 << 10
"""Maximum of all definitions in a comparison that runs in the loop: a millisecond."""
WAITING_MAX = 256
"""Maximum of waiting comparisons: each holds its definition."""

TOLD_CHARS_MAX = 1_200
"""Maximum of incompatibilities in an error, which has to fit into metadata of gRPC; `CheckSchema` reports more."""


class Checking:
    """Compares schemas on a thread, in a bounded queue in which callers take turns."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kera-schemas")
        self._turns = Changing()
        self._waiting = 0

    async def incompatibilities(self, new: Definition, earlier: list[Version], mode: Compatibility) -> list[str]:
        """Return the incompatibilities of `new` with earlier versions.

        Raises `InvalidSchema`, and `Unavailable` if too many comparisons wait.
        """
        looked_at = earlier if mode.transitive else earlier[-1:]
        size = len(new.text) + sum(len(each.definition.text) for each in looked_at)
        if new.schema_type is SchemaType.ARROW and size <= SMALL_CHARS_MAX:
            return incompatibilities(new, earlier, mode)
        if self._waiting >= WAITING_MAX:
            raise Unavailable(f"{self._waiting} schemas are being compared; ask again")
        with contextlib.ExitStack() as leaving:
            self._waiting += 1
            leaving.callback(self._leave)
            await self._turns.acquire()
            leaving.callback(self._turns.release)
            running = asyncio.get_running_loop().run_in_executor(self._thread, incompatibilities, new, earlier, mode)
            running.add_done_callback(_heard)
            # The comparison keeps its place if its caller goes: the next one would only wait behind it in the thread.
            after = leaving.pop_all()
            running.add_done_callback(lambda _: after.close())
        return await asyncio.shield(running)

    def _leave(self) -> None:
        self._waiting -= 1

    async def close(self) -> None:
        """Wait for the comparison under way; cancel those that wait."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)


def _heard(running: asyncio.Future[list[str]]) -> None:
    """Read the error of a comparison whose caller may be gone, so that asyncio does not log it."""
    if not running.cancelled():
        running.exception()


def incompatible(subject: str, found: list[str]) -> IncompatibleSchema:
    """Return the error, with as many of the incompatibilities as fit into it."""
    told, room = list[str](), TOLD_CHARS_MAX
    for each in found:
        room -= len(each)
        if told and room < 0:
            break
        told.append(each)
    more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
    return IncompatibleSchema(f"{subject}: {found[0]}{more}", subject=subject, incompatibilities=told)
