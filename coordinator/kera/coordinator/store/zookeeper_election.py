"""Which coordinator leads: an election by candidates in ZooKeeper.

Each candidate is a node of ZooKeeper that lasts as long as its owner's session. The oldest candidate leads.

**Proofs.** While its candidate's node exists nobody else leads. ZooKeeper removes the node if it has not heard from its
session for the session time-out. So a coordinator that asks for its node and finds it, leads for `LEASE_PART` of the
time-out from when it asked. It asks with a transaction, for which a majority of the ensemble has to be there. It need
not ask whether its node is still the oldest: no younger one becomes older. The rest of the time-out is a margin,
because servers report their sessions to the ensemble's leader only once per half tick: a time-out is at least two
ticks.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from kera.coordinator.store.metadata import Check, MetadataStoreFailed, MetadataStoreFull
from kera.coordinator.store.zookeeper_layout import candidate_id, candidate_level, candidates_path, record_path
from kera.coordinator.store.zookeeper_session import (
    CLOSE_TIMEOUT_S,
    RETRY_INTERVAL_S,
    Lost,
    NodeMissing,
    Watch,
    ZooKeeperSession,
    check,
)
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger

log = get_logger("kera.zookeeper")

POLL_INTERVAL_S = 1.0
"""How often candidates look, in seconds, besides watches: a connection that breaks loses their notifications."""
LEASE_PART = 2 / 3


class ZooKeeperElection:
    """See `kera.coordinator.store.leadership.Election`."""

    alone = False

    def __init__(self, session: ZooKeeperSession, address: str, *, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        """`address`: where clients and daemons reach this coordinator."""
        self._session = session
        self._address = address
        self._poll_interval_s = poll_interval_s
        self._path = candidates_path(session.root)
        self._id = candidate_id(session.new_id())
        """Prefix of our node's name; finds the node even if the connection broke before we learned the whole name."""
        self._candidates: dict[str, str] = {}
        """Addresses by node; the leader's comes first."""
        self._changed = asyncio.Event()
        self._wake = self._waker()
        """One watch for all looks: kazoo keeps each distinct watch until it has fired."""
        self._problem = ""
        self._failing = Repeated(log)
        self._looking: asyncio.Task[None] | None = None

    @property
    def lease_s(self) -> float:
        """See `Election.lease_s`."""
        return self._session.timeout_s * LEASE_PART

    @property
    def leader(self) -> str:
        """See `Election.leader`."""
        return next(iter(self._candidates.values()), "")

    @property
    def coordinators(self) -> list[str]:
        """See `Election.coordinators`."""
        return list(dict.fromkeys(self._candidates.values()))

    @property
    def feature_level(self) -> int:
        """See `Election.feature_level`."""
        return min(map(candidate_level, self._candidates), default=0)

    @property
    def problem(self) -> str:
        """See `Election.problem`."""
        return self._problem

    async def win(self) -> None:
        """See `Election.win`."""
        while True:
            try:
                self._changed.clear()
                await self._look(self._wake)
                node = self._mine()
                if node is None:
                    await self._stand()
                elif not await self._session.owns(node):
                    await self._session.delete(node)  # from an earlier session: it will vanish any moment
                elif self._is_first(node):
                    self._works()
                    return
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), self._poll_interval_s)
                self._works()
            except (MetadataStoreFailed, MetadataStoreFull) as error:
                self._problem = error.message
                self._failing.goes_on("cannot run for leader", error=error.message)
                await asyncio.sleep(RETRY_INTERVAL_S)

    def _works(self) -> None:
        self._problem = ""
        self._failing.over("can run for leader again")

    async def prove(self, guard: Check) -> bool:
        """See `Election.prove`."""
        node = self._mine()
        if node is None:
            return False
        record = check(record_path(self._session.root, guard.key), guard.expected_version - 1)
        async with asyncio.timeout(self.lease_s):
            held = await self._session.holds(check(node), record)
        if held and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look_at_others())
        return held

    async def resign(self) -> None:
        """See `Election.resign`."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
            self._looking = None
        with contextlib.suppress(MetadataStoreFailed, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._look()
                while (node := self._mine()) is not None:
                    await self._session.delete(node)
                    del self._candidates[node]

    async def _look_at_others(self) -> None:
        """Refresh the list of coordinators, which only informs callers: no proof waits for it, or fails because
        of it.
        """
        with contextlib.suppress(MetadataStoreFailed, MetadataStoreFull):
            await self._look()

    async def _stand(self) -> None:
        """Become the youngest candidate."""
        with contextlib.suppress(Lost):
            await self._session.make_ephemeral(f"{self._path}/{self._id}-", self._address.encode())

    def _mine(self) -> str | None:
        return next((node for node in self._candidates if node.startswith(f"{self._path}/{self._id}-")), None)

    def _is_first(self, node: str) -> bool:
        return node == next(iter(self._candidates), None)

    async def _look(self, watch: Watch | None = None) -> None:
        """Read the list of candidates; `watch` is called on kazoo's thread when it changes."""
        await self._session.sync()
        try:
            names = await self._session.children(self._path, watch)
        except NodeMissing:  # another program has deleted it
            await self._session.make(self._path)
            names = ()
        known, found = self._candidates, {}
        for name in sorted(names, key=lambda name: name.rpartition("-")[2]):
            node = f"{self._path}/{name}"
            if node in known:
                found[node] = known[node]
                continue
            with contextlib.suppress(NodeMissing):
                found[node] = (await self._session.get(node)).value.decode()
        self._candidates = found

    def _waker(self) -> Watch:
        loop = asyncio.get_running_loop()

        def changed(_: Any) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._changed.set)

        return changed
