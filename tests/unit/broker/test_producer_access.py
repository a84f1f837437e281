"""With security on, only the owner of a producer id may write chunks with it. The coordinator names the owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kera.broker.ownership import producer_owners
from kera.broker.ownership.streams import name_of, not_here
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.base.ids import PRODUCER_IDS
from kera.core.errors import Unavailable
from kera.core.rpc import api
from kera.core.rpc.method import Peer
from kera.server.access.audit import Audit
from kera.server.access.guard import Guard
from kera.v1 import broker_pb2, coordinator_pb2
from tests.unit.broker.support import STREAM_ID, Broker, Engine, chunk, stream_info
from tests.unit.core.access.support import DAEMON, Now, authenticator, rule, table, user

ALICE, BOB, SUPER = Identity("alice"), Identity("bob"), Identity("root", is_super=True)
MINE, NAMED, OLD = 100, 200, 300
CHOSEN = PRODUCER_IDS[3]


class Coordinator:
    """Knows the owners of ids; an id that writers choose goes to the first principal that asks for it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.is_there = True
        self.claims: dict[int, str] = {}
        self.leaves_out = 0
        """The number of owners that its next answer lacks."""

    async def find(self, request: coordinator_pb2.FindProducersRequest) -> coordinator_pb2.FindProducersResponse:
        if not self.is_there:
            raise Unavailable("there is no coordinator")
        self.asked += [use.producer_id for use in request.uses]
        left_out, self.leaves_out = self.leaves_out, 0
        uses = request.uses[: len(request.uses) - left_out]
        return coordinator_pb2.FindProducersResponse(owners=[self._owner(use) for use in uses])

    def _owner(self, use: coordinator_pb2.ProducerUse) -> coordinator_pb2.ProducerOwner:
        owner = coordinator_pb2.ProducerOwner(first_id=use.producer_id, last_id=use.producer_id)
        if use.producer_id in PRODUCER_IDS:
            owner.principal = self.claims.setdefault(use.producer_id, use.principal)
        elif MINE <= use.producer_id < MINE + 10:
            owner.principal, owner.first_id, owner.last_id = "user:alice", MINE, MINE + 9
        elif use.producer_id == NAMED:
            owner.name = "billing"
        elif use.producer_id == OLD:
            owner.anybody = True
        return owner


class Guarded:
    """A broker that has a guard with rules, and asks a coordinator."""

    def __init__(self, engine: Engine) -> None:
        self.coordinator = Coordinator()
        self.guard = Guard(
            authenticator(Now()), Audit(Now()), name_of=lambda number: name_of(engine.streams, number), unknown=not_here
        )
        self.rules = [rule("user:*", f"stream:stream-{STREAM_ID}", Operation.WRITE)]
        self.apply(1)
        self.broker = Broker(engine, stream_info(), guard=self.guard)
        self.owners = self.broker.broker.producer_owners
        self.owners.note_coordinator(finds_producers=True)
        self.asking = asyncio.create_task(self.owners.ask_for_ever(self.coordinator.find))
        self.peers: dict[Identity, Peer] = {}
        for who in (ALICE, BOB, SUPER, DAEMON):
            self.connect(who)

    def connect(self, who: Identity) -> None:
        """Give `who` a new connection to write over."""
        peer = self.peers[who] = Peer("unix", "")
        peer.end = lambda: None
        self.guard.known.meet(peer, who)

    def apply(self, version: int) -> None:
        self.guard.apply(table(version, [user("alice"), user("bob")], self.rules), 1)

    def try_once(self, who: Identity, producer_id: int, sequence: int) -> str:
        """Write once, and return the code of the error, if any."""
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
        reply = self.broker.start(api.MULTI_WRITE_CHUNKS, request, chunk(producer_id, sequence), peer=self.peers[who])
        return str(reply.message.statuses[0].error.code)

    async def write(self, who: Identity, producer_id: int, sequence: int = 0) -> str:
        """Write as a client does: again, as long as the broker is asking."""
        async with asyncio.timeout(20):
            while (code := self.try_once(who, producer_id, sequence)) == "unavailable":
                await asyncio.sleep(0)
        return code


@pytest.fixture
async def guarded(engine: Engine) -> AsyncIterator[Guarded]:
    guarded = Guarded(engine)
    yield guarded
    guarded.asking.cancel()


async def test_only_owner_super_user_and_daemons_may_use_a_producer_id(guarded: Guarded) -> None:
    assert guarded.try_once(ALICE, MINE, 0) == "unavailable", "it is asked"
    assert await guarded.write(ALICE, MINE) == ""
    for sequence in (0, 1):
        assert guarded.try_once(BOB, MINE, sequence) == "not_allowed"
    assert guarded.try_once(ALICE, MINE + 1, 0) == "", "a block is asked for once"
    assert guarded.coordinator.asked == [MINE]
    assert [guarded.try_once(who, MINE, sequence) for who, sequence in ((SUPER, 1), (DAEMON, 2))] == ["", ""]


async def test_the_coordinator_is_asked_again_after_an_answer_without_all_owners(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_owners, "PAUSE_S", 0)
    guarded.coordinator.leaves_out = 1

    assert await guarded.write(ALICE, MINE) == ""
    assert guarded.coordinator.asked == [MINE, MINE]


async def test_a_named_producer_may_be_used_only_while_a_rule_allows_it(guarded: Guarded) -> None:
    assert await guarded.write(ALICE, NAMED) == "not_allowed"
    guarded.rules.append(rule("user:alice", "producer:bill*", Operation.USE, rule_id=2))
    guarded.apply(2)
    assert await guarded.write(ALICE, NAMED) == ""
    assert await guarded.write(BOB, NAMED, 1) == "not_allowed"
    guarded.rules.pop()
    guarded.apply(3)
    guarded.connect(ALICE)  # the broker has ended the earlier connection
    assert guarded.try_once(ALICE, NAMED, 1) == "not_allowed"


async def test_an_id_that_writers_choose_belongs_to_its_first_user(guarded: Guarded) -> None:
    assert await guarded.write(ALICE, CHOSEN) == ""
    assert await guarded.write(BOB, CHOSEN, 1) == "not_allowed"


async def test_anybody_may_use_an_id_of_an_earlier_version_and_nobody_a_future_id(guarded: Guarded) -> None:
    assert await guarded.write(ALICE, OLD) == await guarded.write(BOB, OLD, 1) == ""
    assert await guarded.write(ALICE, 999) == "not_allowed"


async def test_an_id_used_too_early_works_for_its_owner_once_it_is_given(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await guarded.write(BOB, 999) == "not_allowed"
    monkeypatch.setattr("tests.unit.broker.test_producer_access.MINE", 990)
    assert await guarded.write(ALICE, 999) == ""


async def test_known_producers_go_on_without_a_coordinator(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_owners, "PAUSE_S", 0.001)
    assert await guarded.write(ALICE, MINE) == ""
    guarded.coordinator.is_there = False
    guarded.rules.append(rule("user:bob", "group:x", Operation.USE, rule_id=3))
    guarded.apply(2)
    assert guarded.try_once(ALICE, MINE, 1) == ""
    assert guarded.try_once(ALICE, NAMED, 0) == "unavailable"
    await asyncio.sleep(0)
    guarded.coordinator.is_there = True
    assert await guarded.write(ALICE, NAMED) == "not_allowed"


async def test_ids_are_not_checked_while_the_coordinator_cannot_find_producers(guarded: Guarded) -> None:
    guarded.owners.note_coordinator(finds_producers=False)
    assert guarded.try_once(BOB, MINE, 0) == ""
    guarded.owners.note_coordinator(finds_producers=True)
    assert await guarded.write(BOB, MINE, 1) == "not_allowed"


async def test_the_number_of_remembered_owners_is_bounded(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_owners, "KNOWN_MAX", 5)
    for number in range(12):
        assert await guarded.write(ALICE, PRODUCER_IDS[number]) == ""
    assert len(guarded.owners._claims) <= 5
    assert await guarded.write(BOB, PRODUCER_IDS[0], 1) == "not_allowed", "it is asked for anew"
