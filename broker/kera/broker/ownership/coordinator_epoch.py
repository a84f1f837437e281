"""The epoch of the coordinator that leads, whose orders a broker carries out.

Orders come over connections that anyone may open, and name the epoch of their sender. A false epoch that is too high
would make the orders of the real coordinator stale. So a broker believes an epoch only if the coordinator confirms it
in an answer to the broker's registration or heartbeats. An order with a later epoch waits for the next heartbeat, which
is sent at once.

Promise: `value` never goes back, and only answers of the coordinator move it. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kera.core.errors import StaleEpoch, Unavailable

CONFIRM_TIMEOUT_S = 5.0
"""How long an order waits for the answer to a heartbeat."""
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
        """`confirmed`: the coordinator has to confirm epochs; if False, the epoch of any order is believed.

        `wanted`: the event of that name, if other parts share it.
        """
        self.value = 0
        """The highest epoch that the coordinator has confirmed."""
        self.wanted = wanted or asyncio.Event()
        """Set when a heartbeat has to be sent now; the sender of heartbeats clears it."""
        self._confirmed = confirmed
        self._confirm_timeout_s = confirm_timeout_s
        self._answers = 0
        self._answered = asyncio.Event()

    def observe(self, epoch: int) -> None:
        """Note the coordinator's epoch from an answer. Lower epochs, from late answers, change nothing."""
        self.value = max(self.value, epoch)
        self._answers += 1
        self._answered.set()
        self._answered = asyncio.Event()

    def refuse_stale(self, epoch: int) -> None:
        """Raise `StaleEpoch` if the epoch of an order is that of a replaced coordinator, or missing."""
        if epoch < self.value and (epoch or self._confirmed):
            raise StaleEpoch(
                f"another coordinator leads since epoch {self.value}; the epoch of this order is {epoch}",
                coordinator_epoch=self.value,
            )

    async def confirm(self, epoch: int) -> None:
        """Return once an order of this epoch may be carried out.

        Raises `StaleEpoch`, and `Unavailable` if the coordinator does not confirm an epoch that is later than `value`.
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
