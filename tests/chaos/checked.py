"""`kera check` as the load and the verdict of a test that does something to the cluster meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

from kera.cli.check._options import Options
from kera.cli.check._run import Check, Outcome, carry_out
from tests.chaos.verdict import Wrong

LOOK_S = 0.01
LOAD_S_MAX = 6 * 3600.0
"""A limit that is never reached: the test ends the load earlier."""
WITHIN_S = 60.0
"""Time that `kera check` allows for everything after the load, and for each record until it is given up."""


class Load:
    """A running check."""

    def __init__(self, check: Check, options: Options, running: asyncio.Task[Outcome]) -> None:
        self._check = check
        self._options = options
        self._running = running

    @property
    def outcome(self) -> Outcome:
        """The outcome of the check, once it has ended."""
        return self._running.result()

    async def goes_on(self) -> tuple[float, float]:
        """The time until each streamlet has an acknowledgement, and until readers have all records written by then.

        Raises `Wrong` if that has become impossible.
        """
        check, begun_s = self._check, self._check.now_s()
        await self._until(lambda: check.acknowledgements.since_s(self._options.streamlets) > begun_s)
        acked_s, wanted = check.now_s(), check.ledger.floors()
        readers = [f"reader {number}" for number in range(1, self._options.readers + 1)]
        await self._until(
            lambda: all(
                check.ledger.next_of(reader).get(entry, 0) >= record
                for reader in readers
                for entry, record in wanted.items()
            )
        )
        return acked_s - begun_s, check.now_s() - begun_s

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if (why := self._check.shared.impossible) is not None:
                raise Wrong(f"{self.stream}: {why}")
            await asyncio.sleep(LOOK_S)

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self._check.shared.stream

    @property
    def streamlets(self) -> int:
        """The number of its streamlets."""
        return self._options.streamlets

    @property
    def acknowledged(self) -> int:
        """The number of records acknowledged so far."""
        return self._check.ledger.acknowledged

    async def until_acknowledged(self, records: int) -> None:
        """Wait until this many records are acknowledged."""
        await self._until(lambda: self.acknowledged >= records)

    def begin_period(self) -> None:
        """Forget earlier pauses; a pause that goes on counts from its beginning."""
        self._check.acknowledgements.begin_period()

    def pause_s(self, streamlets: Collection[int] | None = None) -> float:
        """The longest time of this period without an acknowledgement for one of these; None: without any at all."""
        return self._check.acknowledgements.pause_s(streamlets)

    def end(self) -> None:
        """Send no more."""
        self._check.shared.stopping.set()


@asynccontextmanager
async def loaded(bootstrap: str, options: Options) -> AsyncIterator[Load]:
    """Run a load during the block, and end it after; then its outcome is available. Errors come in a group."""
    options = replace(options, keep=True)  # the test may look at the cluster after any outcome
    begun = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def watching(check: Check) -> AsyncIterator[None]:
        begun.set_result(check)
        yield

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(carry_out(options, bootstrap, watching))
        load = Load(await begun, options, running)
        try:
            yield load
        finally:
            load.end()


@asynccontextmanager
async def under_check(bootstrap: str, options: Options) -> AsyncIterator[Load]:
    """Like `loaded`, and raises `Wrong` after the block unless every promise was kept and every record acknowledged."""
    async with loaded(bootstrap, options) as load:
        yield load
    judge(load.stream, load.outcome)


def judge(stream: str, outcome: Outcome) -> None:
    """Raises `Wrong` unless every promise was kept, and every record was acknowledged."""
    if outcome.verdict != "kept":
        raise Wrong("; ".join([f"{stream}: {outcome.verdict}", outcome.impossible or "", *outcome.lines]))
    if outcome.acknowledged != outcome.sent:
        failed = outcome.sent - outcome.acknowledged
        raise Wrong(f"{stream}: {failed:,} of {outcome.sent:,} records failed: {outcome.notes}")
