"""Readers that have mapped the memory of a domain, and what the broker does when one of them loses its rights.

A mapping cannot be revoked. When a reader loses its rights, new data therefore goes to another file, which only readers
with rights get. A reader that authenticated by a token loses its rights when the token expires, even if it has
disconnected: the token may have been leaked.
"""

from __future__ import annotations

import math

from kera.broker.log.arena import Arena
from kera.broker.log.arena_file import ArenaFile
from kera.broker.storage.persistence import PersistenceManager
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.base.telemetry import get_logger
from kera.core.errors import NotAllowed
from kera.core.rpc.method import Peer
from kera.server.access.guard import Guard
from kera.server.access.requirements import Need

log = get_logger("kera.push")

GIVEN_MAX = 4096
"""Maximum number of identities that are remembered for a file; with more, the file is renewed."""
_NOW_S = -math.inf


class Mappings:
    """The readers that have mapped files of an arena by a right, which they may lose."""

    def __init__(self, arena: Arena, memory: PersistenceManager, guard: Guard) -> None:
        self._arena = arena
        self._memory = memory
        self._guard = guard
        self._given: dict[ArenaFile, set[Identity]] = {}
        self._until_s = math.inf
        """When the first identity loses its rights, on the boot-time clock."""

    @property
    def is_over(self) -> bool:
        """Whether the rights of an identity may have expired, so `renew` has to be called."""
        return self._guard.authenticator.now_s() >= self._until_s

    def check(self, peer: Peer, domain: str) -> None:
        """Check that a peer may map the memory of a domain. Raises `NotAllowed` and `AuthenticationFailed`."""
        self._guard.check(peer, Need(Operation.READ, _resource(domain)))
        who = peer.identity
        if who is not None and not who.is_daemon and self._is_counted(who):
            raise NotAllowed(
                "you have a quota for reading, and reads from shared memory cannot be counted; have the broker send"
                " the data"
            )

    def give(self, file: ArenaFile, who: Identity | None) -> None:
        """Remember that `who` is about to get a file. Peers that may read all memory anyway are not remembered."""
        if who is None or who.is_daemon:
            return
        file.note_given()
        given = self._given.setdefault(file, set())
        given.add(who if who.how == "jwt" else who._replace(until_s=math.inf))  # the guard tracks the others
        self._until_s = _NOW_S if len(given) > GIVEN_MAX else min(self._until_s, self._good_until_s(who))

    def renew(self) -> list[ArenaFile]:
        """Replace the files of which a holder has lost its rights; return the files that were replaced."""
        renewed = [
            file
            for file, given in self._given.items()
            if len(given) > GIVEN_MAX or any(self._has_lost(who, file.domain) for who in given)
        ]
        for file in renewed:
            del self._given[file]
            if not self._arena.is_renewed(file):
                log.info("renewing memory: a reader that has mapped it has lost its rights", domain=file.domain)
                self._arena.renew(file.domain)
                self._memory.close_all_of(file.domain)
        times = [self._good_until_s(who) for given in self._given.values() for who in given]
        self._until_s = min(times, default=math.inf)
        return renewed

    def _has_lost(self, who: Identity, domain: str) -> bool:
        """Whether an identity has lost its right to read the domain, or the credentials that identified it."""
        door = self._guard.authenticator
        return (
            not door.is_still(who)
            or door.now_s() >= self._good_until_s(who)
            or not self._guard.may(door.known(who), Operation.READ, _resource(domain))
            or self._is_counted(who)
        )

    def _good_until_s(self, who: Identity) -> float:
        """Return when the credentials of `who` expire: a session or a token does, a password does not."""
        if who.token_id:
            until_s = self._guard.authenticator.accounts.until_s(who.token_id)  # it may have been renewed
            return _NOW_S if until_s is None else until_s
        return who.until_s if who.how == "jwt" else math.inf

    def _is_counted(self, who: Identity) -> bool:
        return self._guard.quota_of(who).HasField("bytes_out_per_s")


def _resource(domain: str) -> str:
    """Return the name of a domain in access rules."""
    return f"domain:{domain}"
