"""Which coordinator leads, as the coordinator itself says: whose orders a broker carries out.

Orders come over connections that anyone may open, with the epoch of whoever gives them. An epoch that nobody leads
with would make all that is lower stale, and so the orders of the coordinator that really leads. So it is believed only
when the coordinator says it, in an answer to this broker's registration or heartbeats; an order that claims a later one
waits for the next of them, which is sent at once.

Promise: `value` never goes back, and only answers of the coordinator move it. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kera.core.errors import StaleEpoch, Unavailable

CONFIRM_TIMEOUT_S = 5.0
"""How long an order waits for a heartbeat to be answered."""
ANSWERS_MIN = 2
"""The first answer may be to a heartbeat that had been sent before the coordinator began to lead."""


class CoordinatorEpoch:
    """The epoch of the coordinator that leads. It never goes back, and only the coordinator's answers raise it."""

    def __init__(
        self,
        *,
        confirmed: bool = True,
        confirm_timeout_s: float = CONFIRM_TIMEOUT_S,
        wanted: asyncio.Event | None = None,
    ) -> None:
        """`confirmed`: epochs have to be said by the coordinator itself; else whatever an order claims is believed.

        `wanted`: see there; others may want a heartbeat, too.
        """
        self.value = 0
        """The highest that the coordinator has said."""
        self.wanted = wanted or asyncio.Event()
        """A heartbeat is to be sent now. Whoever sends heartbeats clears it."""
        self._confirmed = confirmed
        self._confirm_timeout_s = confirm_timeout_s
        self._answers = 0
        self._answered = asyncio.Event()

    def observe(self, epoch: int) -> None:
        """The coordinator has answered, and is of this epoch. A lower one is an answer that came late."""
        self.value = max(self.value, epoch)
        self._answers += 1
        self._answered.set()
        self._answered = asyncio.Event()

    def refuse_stale(self, epoch: int) -> None:
        """Raise `StaleEpoch` if an order of this epoch comes from a coordinator that was replaced, or names none."""
        if epoch < self.value and (epoch or self._confirmed):
            raise StaleEpoch(
                f"another coordinator leads since epoch {self.value}; the epoch of this order is {epoch}",
                coordinator_epoch=self.value,
            )

    async def confirm(self, epoch: int) -> None:
        """Return when an order of this epoch is to be carried out.

        Raises `StaleEpoch`, and `Unavailable` when the coordinator does not confirm an epoch that is later than all
        before it.
        """
        if epoch > self.value:
            if not self._confirmed:
                self.value = epoch
                return
            enough = self._answers + ANSWERS_MIN
            with suppress(TimeoutError):
                async with asyncio.timeout(self._confirm_timeout_s):
                    while self.value < epoch and self._answers < enough:
                        self.wanted.set()
                        await self._answered.wait()
            if self.value < epoch:
                raise Unavailable(
                    f"this broker has not heard from the coordinator that it leads with epoch {epoch}; it knows of"
                    f" {self.value}; try again",
                    coordinator_epoch=self.value,
                )
        self.refuse_stale(epoch)
