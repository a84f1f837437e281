"""`kera check` as the load and the verdict of a test that does something to the cluster meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from kera.cli.check._options import Options
from kera.cli.check._run import Check, Outcome, carry_out
from tests.chaos.verdict import Wrong

LOOK_S = 0.01
LOAD_S_MAX = 6 * 3600.0
"""The load ends when it is told to."""
WITHIN_S = 60.0
"""What `kera check` gives everything after the load; and each record, until it is given up."""


class Load:
    """A check whose load is on."""

    def __init__(self, check: Check, options: Options) -> None:
        self._check = check
        self._options = options

    async def goes_on(self) -> tuple[float, float]:
        """How long it takes until each streamlet has had an acknowledgement, and readers all that was there by then."""
        check, begun_s = self._check, self._check.now_s()
        while check.acknowledgements.since_s(self._options.streamlets) <= begun_s:
            await asyncio.sleep(LOOK_S)
        acked_s, wanted = check.now_s(), check.ledger.floors()
        readers = [f"reader {number}" for number in range(1, self._options.readers + 1)]
        while any(
            check.ledger.next_of(reader).get(entry, 0) < record
            for reader in readers
            for entry, record in wanted.items()
        ):
            await asyncio.sleep(LOOK_S)
        return acked_s - begun_s, check.now_s() - begun_s

    @property
    def acknowledged(self) -> int:
        """Records, so far."""
        return self._check.ledger.acknowledged

    async def until_acknowledged(self, records: int) -> None:
        """Wait for so many of them."""
        while self.acknowledged < records:
            await asyncio.sleep(LOOK_S)

    def end(self) -> None:
        """Send no more."""
        self._check.shared.stopping.set()


async def checked(bootstrap: str, meanwhile: Callable[[Load], Awaitable[None]], options: Options) -> Outcome:
    """Do something while a load is on; then the load ends. What `meanwhile` raises comes out when all has ended."""
    failures: list[BaseException] = []

    @asynccontextmanager
    async def watching(check: Check) -> AsyncIterator[None]:
        load = Load(check, options)

        async def work() -> None:
            try:
                await meanwhile(load)
            except Exception as error:  # noqa: BLE001 - it is raised below
                failures.append(error)
            finally:
                load.end()

        task = asyncio.create_task(work())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    outcome = await carry_out(options, bootstrap, watching)
    if failures:
        raise failures[0]
    return outcome


async def all_checked(
    bootstrap: str, meanwhile: Callable[[list[Load]], Awaitable[None]], every: Sequence[Options]
) -> list[Outcome]:
    """Likewise with a load for each of the options, all at the same time."""
    outcomes: list[Outcome] = []

    async def with_others(loads: list[Load], others: Sequence[Options]) -> None:
        if not others:
            await meanwhile(loads)
            return
        outcomes.append(await checked(bootstrap, lambda load: with_others([*loads, load], others[1:]), others[0]))

    await with_others([], every)
    return outcomes[::-1]


def check_kept(outcome: Outcome) -> None:
    """Raise `Wrong` unless every promise was kept."""
    if outcome.verdict != "kept":
        raise Wrong("; ".join([outcome.verdict, outcome.impossible or "", *outcome.lines]))
