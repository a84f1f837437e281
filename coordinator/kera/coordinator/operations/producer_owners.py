"""Owners of producer ids: brokers ask for them before they accept chunks, where security is on.

    an id of                                     belongs to                          known by
    a producer without a name                    the principal that got it           the block that it is in
    a named producer                             who may use ``producer:NAME``       the record of the name
    a writer that chooses it, in one stream      the principal that writes first     a claim

Ids without a name are given in blocks, each to one principal, so that one record names the owner of many ids. A new
coordinator gives each principal a new block. Anybody may use an id that is in no block: it was given by an earlier
version, to a daemon, while security was off, or after the copy was made from which metadata were restored. An id that
has yet to be given belongs to nobody.

An answer about an id stays true, so brokers may keep it: a block never changes its principal, and a claim is only
removed with its stream, or when there are too many claims.

Records: ``producer-blocks/<first id, 16 hexadecimal digits>`` → JSON: `last_id`, `principal`.
``producer-claims/<stream id>/<producer id>`` → JSON: `number`, which grows with each claim, and `principal`.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.state import State
from kera.coordinator.store.ledger import Changes, number
from kera.core.base.ids import PRODUCER_IDS
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.server.access.guard import CALLER
from kera.v1 import coordinator_pb2

LAST_PRODUCER_ID = "last/producer_id"
BLOCKS = "producer-blocks/"
CLAIMS = "producer-claims/"
BLOCK_IDS_MIN = 64
BLOCK_IDS_MAX = 1 << 16
"""Maximum of a block of ids. The first block of a principal is small, and each later one twice as large."""
CLAIMS_MAX = 100_000
"""Maximum of claims: beyond it, the oldest claim of the principal with the most is forgotten, and its id is
free again.
"""
USES_MAX = 1000
"""Maximum of ids in one request."""


class Block(NamedTuple):
    """Ids that belong to one principal."""

    first_id: int
    last_id: int
    principal: str


class Claim(NamedTuple):
    """The ownership of an id in one stream."""

    number: int
    principal: str


class ProducerOwners:
    """Decides which principal owns a producer id. A decision about an id is final. Belongs to one coordinator."""

    def __init__(self, state: State, name_of: Callable[[int], str | None]) -> None:
        """`name_of` returns the name of a producer, by its id."""
        self._state = state
        self._name_of = name_of
        self._blocks: list[Block] = []
        """All blocks, sorted by id."""
        self._open: dict[str, tuple[int, Block]] = {}
        """The next free id of each principal's last block, and that block."""
        self._claims: dict[tuple[int, int], Claim] = {}
        """The claims by stream and id, the oldest first."""
        self._claims_of: defaultdict[str, dict[tuple[int, int], None]] = defaultdict(dict)
        """The keys of each principal's claims, the oldest first."""

    def load(self) -> None:
        """Load blocks and claims from the ledger."""
        ledger = self._state.ledger
        for name in ledger.children(BLOCKS.rstrip("/")):
            record = json.loads(ledger.get(name) or b"{}")
            self._blocks.append(Block(_last_hex(name), record["last_id"], record["principal"]))
        claims = []
        for stream in {key.rpartition("/")[0] for key in ledger.snapshot() if key.startswith(CLAIMS)}:
            for key in ledger.children(stream):
                record = json.loads(ledger.get(key) or b"{}")
                claims.append(((_last_hex(stream), _last_hex(key)), Claim(record["number"], record["principal"])))
        for place, claim in sorted(claims, key=lambda item: item[1].number):
            self._put(place, claim)

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.FIND_PRODUCERS: self._answer}

    # --- giving ids ------------------------------------------------------------------------------------------------

    async def give(self, principal: str) -> int:
        """Return the id of a new producer without a name; empty `principal`: it gets no owner. One call at a time."""
        state = self._state
        if not principal:
            producer_id = state.next_id(LAST_PRODUCER_ID)
            await state.write({LAST_PRODUCER_ID: number(producer_id)})
            return producer_id
        producer_id, block = self._open.get(principal, (1, Block(1, 0, principal)))
        if producer_id > block.last_id:
            before = block.last_id - block.first_id + 1
            producer_id = state.next_id(LAST_PRODUCER_ID)
            last_id = producer_id + min(max(BLOCK_IDS_MIN, 2 * before), BLOCK_IDS_MAX) - 1
            block = Block(producer_id, last_id, principal)
            record = json.dumps({"last_id": last_id, "principal": principal}).encode()
            await state.write({LAST_PRODUCER_ID: number(last_id), f"{BLOCKS}{producer_id:016x}": record})
            self._blocks.append(block)
        self._open[principal] = producer_id + 1, block
        return producer_id

    # --- owners of ids ---------------------------------------------------------------------------------------------

    async def _answer(self, request: coordinator_pb2.FindProducersRequest) -> coordinator_pb2.FindProducersResponse:
        if len(request.uses) > USES_MAX:
            raise InvalidArgument(
                f"at most {USES_MAX} ids in a request; ask for the others in the next", limit=USES_MAX
            )
        if any(use.producer_id in PRODUCER_IDS for use in request.uses):
            await self._state.change(self._claim(list(request.uses)))
        return coordinator_pb2.FindProducersResponse(owners=[self._owner(use) for use in request.uses])

    async def _claim(self, uses: list[coordinator_pb2.ProducerUse]) -> None:
        """Give ids that writers choose to the principals that use them first."""
        last = next(reversed(self._claims.values())).number if self._claims else 0
        new: dict[tuple[int, int], Claim] = {}
        for use in uses:
            key = use.stream_id, use.producer_id
            known = use.stream_id in self._state.catalog and key not in self._claims and key not in new
            if use.producer_id in PRODUCER_IDS and use.principal and known:
                last += 1
                new[key] = Claim(last, use.principal)
        if not new:
            return
        changes: dict[str, bytes | None] = {_claim_key(*key): _claim_record(claim) for key, claim in new.items()}
        oldest = self._to_forget(len(self._claims) + len(new) - CLAIMS_MAX)
        changes |= {_claim_key(*key): None for key in oldest}
        await self._state.write(changes)
        for key in oldest:
            self._remove(key)
        for key, claim in new.items():
            self._put(key, claim)

    def _to_forget(self, count: int) -> list[tuple[int, int]]:
        """Return the oldest claims of the principals with most, so that no principal can push out the claims of
        others.
        """
        if count <= 0:
            return []
        most = [(-len(keys), principal) for principal, keys in self._claims_of.items()]
        heapq.heapify(most)
        taken: Counter[str] = Counter()
        for _ in range(min(count, len(self._claims))):
            left, principal = most[0]
            taken[principal] += 1
            heapq.heapreplace(most, (left + 1, principal))
        return [key for principal, number in taken.items() for key in islice(self._claims_of[principal], number)]

    def _put(self, key: tuple[int, int], claim: Claim) -> None:
        self._claims[key] = claim
        self._claims_of[claim.principal][key] = None

    def _remove(self, key: tuple[int, int]) -> None:
        principal = self._claims.pop(key).principal
        del self._claims_of[principal][key]
        if not self._claims_of[principal]:
            del self._claims_of[principal]

    def _owner(self, use: coordinator_pb2.ProducerUse) -> coordinator_pb2.ProducerOwner:
        producer_id = use.producer_id
        owner = coordinator_pb2.ProducerOwner(first_id=producer_id, last_id=producer_id)
        if producer_id in PRODUCER_IDS:
            claim = self._claims.get((use.stream_id, producer_id))
            owner.principal = "" if claim is None else claim.principal
            return owner
        name = self._name_of(producer_id)
        if name is not None:
            owner.name = name
            return owner
        at = bisect_right(self._blocks, producer_id, key=lambda block: block.first_id)
        if at and producer_id <= self._blocks[at - 1].last_id:
            owner.first_id, owner.last_id, owner.principal = self._blocks[at - 1]
        else:
            owner.anybody = producer_id < self._state.next_id(LAST_PRODUCER_ID)
        return owner

    # --- deleted streams -------------------------------------------------------------------------------------------

    def forgotten(self, stream_id: int) -> Changes:
        """Return the changes to write with the deletion of a stream."""
        return dict.fromkeys(self._state.ledger.children(_claims_path(stream_id)))

    def forget(self, stream_id: int) -> None:
        """Forget the claims in a stream that was deleted."""
        for key in [key for key in self._claims if key[0] == stream_id]:
            self._remove(key)


def caller_principal() -> str:
    """Return the caller's principal if it owns producer ids; empty: a daemon, or security is off."""
    peer = CALLER.get()
    who = None if peer is None else peer.identity
    return "" if who is None or who.is_daemon else who.principal


def _claims_path(stream_id: int) -> str:
    return f"{CLAIMS}{stream_id:016x}"


def _claim_key(stream_id: int, producer_id: int) -> str:
    return f"{_claims_path(stream_id)}/{producer_id:016x}"


def _claim_record(claim: Claim) -> bytes:
    return json.dumps(claim._asdict()).encode()


def _last_hex(key: str) -> int:
    return int(key.rpartition("/")[2], 16)
