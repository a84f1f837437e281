"""A bounded cache of the owners of producer ids. The coordinator decides them, and an owner never changes.

An unknown id is looked up in the background. Meanwhile the broker refuses its chunk, and the client sends it again. So
known producers never wait for the coordinator, and go on while it is away.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kera.core.base.ids import PRODUCER_IDS
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, Unavailable
from kera.v1 import coordinator_pb2

log = get_logger("kera.access")

FindProducers = Callable[[coordinator_pb2.FindProducersRequest], Awaitable[coordinator_pb2.FindProducersResponse]]
KNOWN_MAX = 100_000
"""Maximum number of known ids and blocks of ids; beyond it, all are forgotten and looked up again when needed."""
ASKED_MAX = 1000
"""Maximum number of ids that wait for a request to the coordinator, which then has all of them."""
PAUSE_S = 0.2
"""Pause after a failed request."""
NOBODY_S = 1.0
"""How long the broker remembers that an id has no owner yet."""


class Use(NamedTuple):
    """A principal's wish to write under an id."""

    producer_id: int
    stream_id: int
    """0 for ids that the coordinator gives, because these belong to the same producer in all streams."""
    principal: str


class Owner(NamedTuple):
    """The users who may write under an id. If no field is set, no user may."""

    principal: str = ""
    name: str = ""
    """Users with the right to use the producer of this name may write."""
    anybody: bool = False


ANYBODY, NOBODY = Owner(anybody=True), Owner()


class ProducerOwners:
    """A bounded cache of the owners of producer ids, which asks the coordinator for an unknown one in the background.

    Belongs to an event loop.
    """

    def __init__(self) -> None:
        self.asks = False
        """Whether the coordinator can be asked; one of an earlier version cannot, and knows no owners."""
        self._blocks: list[tuple[int, int, Owner]] = []
        """Blocks of ids, each with its first id, last id and owner, in order."""
        self._claims: dict[tuple[int, int], Owner] = {}
        """The owners of ids that writers chose, by stream and id."""
        self._nobody: dict[Use, float] = {}
        """Uses of ids without an owner, with the time until which this is remembered. The key includes the principal,
        so that a principal that asks for an id in advance does not keep it from its owner."""
        self._wanted: dict[Use, None] = {}
        self._wakes = asyncio.Event()

    def note_coordinator(self, *, finds_producers: bool) -> None:
        """Record whether the coordinator that leads answers `FindProducers`."""
        self.asks = finds_producers

    def owner(self, producer_id: int, stream_id: int, principal: str) -> Owner | None:
        """Return the owner of an id that `principal` wants to write under; None if it is still being looked up."""
        chosen = producer_id in PRODUCER_IDS
        known = self._claims.get((stream_id, producer_id)) if chosen else self._in_block(producer_id)
        if known is not None:
            return known
        if not self.asks:
            return ANYBODY
        use = Use(producer_id, stream_id if chosen else 0, principal)
        if self._nobody.get(use, 0.0) > asyncio.get_running_loop().time():
            return NOBODY
        if len(self._wanted) < ASKED_MAX:
            self._wanted[use] = None
            self._wakes.set()
        return None

    def _in_block(self, producer_id: int) -> Owner | None:
        at = bisect_right(self._blocks, producer_id, key=lambda block: block[0])
        if not at or producer_id > self._blocks[at - 1][1]:
            return None
        return self._blocks[at - 1][2]

    def forget(self, stream_id: int) -> None:
        """Forget the claims of ids in a dropped stream."""
        for key in [key for key in self._claims if key[0] == stream_id]:
            del self._claims[key]

    async def ask_for_ever(self, find: FindProducers) -> None:
        """Ask the coordinator for the owners of wanted ids, without end."""
        failing = Repeated(log)
        while True:
            await self._wakes.wait()
            self._wakes.clear()
            uses, self._wanted = list(self._wanted), {}
            request = coordinator_pb2.FindProducersRequest(
                uses=[coordinator_pb2.ProducerUse(**use._asdict()) for use in uses]
            )
            try:
                answer = await find(request)
                if len(answer.owners) != len(uses):
                    raise Unavailable(
                        f"the coordinator has named {len(answer.owners)} owners, and {len(uses)} were asked"
                    )
            except KeraError as error:  # clients that send again cause another request
                failing.goes_on("cannot look up owners of producer ids", ids=len(uses), error=error.message)
                await asyncio.sleep(PAUSE_S)
                continue
            failing.over("owners of producer ids can be looked up again")
            for use, owner in zip(uses, answer.owners, strict=True):
                self._note(use, owner)

    def _note(self, use: Use, told: coordinator_pb2.ProducerOwner) -> None:
        owner = Owner(told.principal, told.name, told.anybody)
        if owner == NOBODY:
            if len(self._nobody) >= ASKED_MAX:
                self._nobody.clear()
            self._nobody[use] = asyncio.get_running_loop().time() + NOBODY_S
            return
        if len(self._blocks) + len(self._claims) >= KNOWN_MAX:
            self._blocks.clear()
            self._claims.clear()
        if use.producer_id in PRODUCER_IDS:
            self._claims[use.stream_id, use.producer_id] = owner
        elif self._in_block(use.producer_id) is None:
            at = bisect_right(self._blocks, told.first_id, key=lambda block: block[0])
            self._blocks.insert(at, (told.first_id, told.last_id, owner))
