"""Which coordinator leads: election, proof, and the answers of the others.

    follow ──win──► write the record `LEADER` ──► load the store ──► lead
      ▲                                                             │ the proof has run out, another one
      └────────── close what was loaded, resign ◄───────────────────┘ leads, or a write has failed

Guarantees:

1. **At most one coordinator that believes to lead can write.** Each term writes the record `LEADER` (address, and an
   epoch above the last one) before it loads anything, and each write of the term depends on that very version
   (`TermStore`). So a coordinator that was asleep while another one took over cannot change anything any more.
2. **Only the leader answers.** A request is handled, and its answer given, only while the term is proven by our own
   clock: less than a lease has passed since we asked the election whether we lead. A request that ends later is
   answered with `Uncertain`, and a request while no term is proven with `NotLeader`.
3. **Memory equals the store.** A write that was refused, or whose outcome is unknown, ends the term; the next one loads
   the store anew.

An embedded store takes the same way with an election of one (`Alone`): so its epoch, too, grows with each start.

The creator of the `Leadership` defines what is served while leading, and how it is loaded.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NoReturn, Protocol

from kera.coordinator.store.metadata import (
    Check,
    MetadataDamaged,
    MetadataStore,
    MetadataStoreFailed,
    StoredRecord,
    VersionConflict,
    Write,
)
from kera.coordinator.store.numbers import next_epoch
from kera.core.base.clock import SystemClock, boottime_s
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import InternalError, KeraError, NotLeader, ProtocolError, Uncertain
from kera.core.rpc import api
from kera.core.rpc.method import Call, Method, Reply, Service
from kera.server.feature_level import FEATURE_LEVEL

log = get_logger("kera.leadership")

LEADER = "leader"
"""Key of the record of the last leader: JSON with its ``address`` and ``epoch``, the ``previous_epoch``, and
``census_since``: the first epoch from which on each leader has kept the census (``store/census``).
"""
PROOFS_PER_LEASE = 4
"""How often the election is asked per lease, so that a slow answer, and the one after it, may be late."""
PROOF_INTERVAL_S_MAX = 1.0
PAUSE_S = 0.2
"""The pause between a term and the next try, in seconds: the reason for its end may last."""

Office = Callable[[MetadataStore, int], AbstractAsyncContextManager[Service]]
"""Loads the leader's state from the store, in this epoch; yields its service, and closes it at the end."""
Observe = Callable[[str, str], None]
"""Called for each request that is refused because this coordinator does not lead: the method, and the error's code."""


def epoch_of(leader: bytes) -> int:
    """Return the epoch in the record of the last leader. Raises `MetadataDamaged`."""
    try:
        return int(json.loads(leader)["epoch"])
    except (ValueError, LookupError, TypeError) as error:
        raise MetadataDamaged(
            f"the metadata are damaged: record {LEADER} cannot be read ({error}); put a copy back with kera cluster"
            " restore FILE --force",
            key=LEADER,
        ) from error


def census_since(leader: bytes) -> int:
    """Return the first epoch from which on each leader has kept the census; 0: the last one has not."""
    return int(json.loads(leader).get("census_since", 0))


class Election(Protocol):
    """The election of the coordinator that may lead."""

    alone: bool
    """Whether there is only one coordinator: an error that keeps it from leading ends it, as no other would
    lead instead.
    """

    @property
    def lease_s(self) -> float:
        """How long nobody else can win, from the time of asking for a proof that succeeded."""
        ...

    @property
    def leader(self) -> str:
        """Address of the coordinator that leads or is about to; empty if unknown."""
        ...

    @property
    def coordinators(self) -> list[str]:
        """Addresses of the running coordinators, as far as they are known; the first one leads."""
        ...

    @property
    def feature_level(self) -> int:
        """The lowest level of the running coordinators, see ``kera.server.feature_level``."""
        ...

    @property
    def problem(self) -> str:
        """Why the leader cannot be determined; empty if nothing is wrong."""
        ...

    async def win(self) -> None:
        """Wait until this coordinator may lead."""
        ...

    async def prove(self, guard: Check) -> bool:
        """Whether this coordinator may still lead, and the record of `guard` has the expected version.

        Raises `MetadataStoreFailed` or `TimeoutError` if that cannot be determined now.
        """
        ...

    async def resign(self) -> None:
        """Let others win. Takes bounded time, and raises nothing."""
        ...


class Alone:
    """The election of a lone coordinator: its store's lock keeps others away."""

    alone = True
    lease_s = math.inf
    feature_level = FEATURE_LEVEL
    problem = ""

    def __init__(self, address: str) -> None:
        self.leader = address
        self.coordinators = [address]

    async def win(self) -> None:
        """See `Election.win`."""

    async def prove(self, guard: Check) -> bool:
        """See `Election.prove`."""
        del guard
        return True

    async def resign(self) -> None:
        """See `Election.resign`."""


class _Term:
    """A term of leadership. It ends once, and stays ended."""

    def __init__(self, epoch: int, version: int, now: Callable[[], float]) -> None:
        self.epoch = epoch
        self.guard = Check(LEADER, version)
        self.over = asyncio.Event()
        self.reason = ""
        self._now = now
        self._proven_until_s = -math.inf

    @property
    def proven(self) -> bool:
        return not self.over.is_set() and self._now() < self._proven_until_s

    def prove(self, until_s: float) -> None:
        self._proven_until_s = max(self._proven_until_s, until_s)

    def end(self, reason: str) -> None:
        if not self.over.is_set():
            self.reason = reason
            self.over.set()


class TermStore:
    """The store of a leader: each write succeeds only in its term, and a failed one ends the term."""

    def __init__(self, store: MetadataStore, term: _Term) -> None:
        self._store = store
        self._term = term

    async def get(self, key: str) -> StoredRecord | None:
        """See `MetadataStore.get`."""
        return await self._store.get(key)

    async def get_each(self, keys: Sequence[str]) -> Sequence[StoredRecord | None]:
        """See `MetadataStore.get_each`."""
        return await self._store.get_each(keys)

    async def list(self, prefix: str) -> dict[str, StoredRecord]:
        """See `MetadataStore.list`."""
        return await self._store.list(prefix)

    async def keys(self) -> set[str]:
        """See `MetadataStore.keys`."""
        return await self._store.keys()

    async def write(self, *writes: Write | Check) -> None:
        """See `MetadataStore.write`. Raises `VersionConflict` also if another coordinator has begun to lead."""
        if self._term.over.is_set():
            raise VersionConflict(f"this coordinator leads no more: {self._term.reason}")
        try:
            await self._store.write(self._term.guard, *writes)
        except (VersionConflict, MetadataStoreFailed) as error:
            self._term.end(error.message)
            raise

    async def close(self) -> None:
        """Do nothing: the store outlives the term."""


def _wall_us() -> int:
    return SystemClock().now_us()


class Leadership:
    """One coordinator's part in the election, and the access to its service while it leads."""

    def __init__(
        self,
        office: Office,
        *,
        now: Callable[[], float] = boottime_s,
        wall_us: Callable[[], int] = _wall_us,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`now`: a clock in seconds that never goes back, and continues while the host is suspended.

        `wall_us` returns the wall-clock time; it is used only for numbers.
        """
        self._office = office
        self._now = now
        self._wall_us = wall_us
        self._pause_s = pause_s
        self._election: Election | None = None
        self._address = ""
        self._term: _Term | None = None
        self._served: Service = {}
        self._led = asyncio.Event()
        self._problem = ""
        self._failing = Repeated(log)

    @property
    def leading(self) -> bool:
        """Whether this coordinator leads, and can prove it."""
        return self._term is not None and self._term.proven

    @property
    def address(self) -> str:
        """The address at which others reach this coordinator; empty before it runs for leader."""
        return self._address

    @property
    def leader(self) -> str:
        """The leader's address, as far as it is known, if another coordinator leads."""
        leader = self._election.leader if self._election else ""
        return "" if leader == self._address else leader

    @property
    def feature_level(self) -> int:
        """The lowest level of the running coordinators, as far as it is known."""
        return self._election.feature_level if self._election else 0

    @property
    def problem(self) -> str:
        """Why this coordinator neither leads nor knows the leader; empty if nothing is wrong."""
        return (self._election.problem if self._election else "") or self._problem

    async def until_first_term(self) -> None:
        """Wait until this coordinator has begun to lead for the first time."""
        await self._led.wait()

    async def run(self, store: MetadataStore, election: Election, address: str) -> NoReturn:
        """Run for leader, lead, and repeat; `address`: where others reach this coordinator.

        Raises defects; a lone coordinator also raises the error that keeps it from leading.
        """
        self._election, self._address = election, address
        while True:
            await election.win()
            try:
                await self._lead(store, election)
            except InternalError:
                raise
            except KeraError as error:
                if election.alone:
                    raise  # it would last: a store that was opened once and has become unusable has to be opened anew
                self._tell(error.message)
            except TimeoutError:
                self._tell("no proof of it in time")
            finally:
                await election.resign()
            await asyncio.sleep(self._pause_s)

    def _tell(self, reason: str) -> None:
        self._problem = reason
        self._failing.goes_on("cannot lead", error=reason)

    async def _lead(self, store: MetadataStore, election: Election) -> None:
        term = await self._begin(store)
        asked_s = self._now()
        if not await election.prove(term.guard):
            return
        term.prove(asked_s + election.lease_s)
        proving = asyncio.create_task(self._keep_proving(term, election))
        proving.add_done_callback(lambda _: term.end("the proofs have stopped"))
        try:
            async with self._office(TermStore(store, term), term.epoch) as served:
                self._term, self._served = term, served
                self._led.set()
                self._problem = ""
                self._failing.over("can lead again")
                log.info("leading", epoch=term.epoch, address=self._address)
                await term.over.wait()
                log.warning("no longer leading", epoch=term.epoch, reason=term.reason)
                self._term, self._served = None, {}
        finally:
            self._term, self._served = None, {}
            term.end("it stops")
            proving.cancel()
            await asyncio.wait([proving])
        if not proving.cancelled():
            proving.result()  # a defect, if any

    async def _begin(self, store: MetadataStore) -> _Term:
        last = await store.get(LEADER)
        previous_epoch = epoch_of(last.value) if last else 0
        epoch = next_epoch(previous_epoch, self._wall_us())
        version = last.version if last else 0
        since = (census_since(last.value) if last else 0) or epoch
        leader = {"address": self._address, "epoch": epoch, "previous_epoch": previous_epoch, "census_since": since}
        await store.write(Write(LEADER, json.dumps(leader).encode(), version))
        return _Term(epoch, version + 1, self._now)

    async def _keep_proving(self, term: _Term, election: Election) -> None:
        if math.isinf(election.lease_s):
            await term.over.wait()
            return
        interval_s = min(election.lease_s / PROOFS_PER_LEASE, PROOF_INTERVAL_S_MAX)
        try:
            async with asyncio.TaskGroup() as asking:
                # The next question does not wait for a late answer: each proof counts from its own question.
                while not term.over.is_set():
                    await asyncio.sleep(interval_s)
                    asking.create_task(self._ask_for_proof(term, election))
        except ExceptionGroup as defects:
            raise defects.exceptions[0] from None

    async def _ask_for_proof(self, term: _Term, election: Election) -> None:
        asked_s, reason = self._now(), ""
        try:
            async with asyncio.timeout(election.lease_s):
                if await election.prove(term.guard):
                    term.prove(asked_s + election.lease_s)
                else:
                    term.end("another coordinator may lead")
        except (MetadataStoreFailed, TimeoutError) as error:
            reason = str(error) or "no answer in time"
        # After a pause of this process the proof may have run out and yet be renewed: then nobody else has led.
        if not term.proven:
            term.end(f"it could not be proven in time: {reason}")

    # --- serving -----------------------------------------------------------------------------------------------

    def service(self, methods: Iterable[Method[Any, Any]], observe: Observe) -> Service:
        """Return a service of `methods` that forwards to the loaded service while this coordinator leads, and
        else refuses.
        """
        return {method: partial(self._serve, method, observe) for method in methods}

    async def _serve(self, method: Method[Any, Any], observe: Observe, call: Call[Any]) -> Reply[Any]:
        term, served = self._term, self._served
        if term is None or not term.proven:
            observe(method.name, NotLeader.code)
            raise self.not_leader()
        handler = served.get(method)
        if handler is None:
            raise ProtocolError(f"unknown method {method.name}")
        try:
            result = handler(call)
            reply = await result if inspect.isawaitable(result) else result
        except KeraError as error:
            if term.proven:
                raise
            raise self._uncertain(method) from error
        if not term.proven:
            raise self._uncertain(method)
        if method is api.DESCRIBE_CLUSTER:
            known = self._election.coordinators if self._election else []
            others = [address for address in known if address != self._address]
            reply.message.coordinators[:] = [self._address, *others]
        return reply

    def not_leader(self) -> NotLeader:
        """Return the error for callers while another coordinator leads, or none."""
        leader = self.leader
        if not leader:
            return NotLeader("no coordinator leads at the moment; ask again", leader="")
        return NotLeader(f"the coordinator at {leader} leads", leader=leader)

    def _uncertain(self, method: Method[Any, Any]) -> Uncertain:
        return Uncertain(
            f"{method.name}: this coordinator no longer leads; it may or may not have been carried out",
            address=self._address,
        )
