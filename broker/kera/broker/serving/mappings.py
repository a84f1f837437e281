"""Readers that map the memory of a domain, and the steps when one of them may not read it any more.

Nobody can take a mapping back. So what is new goes elsewhere then: to a file that is given to those who still may.
Whoever has shown a token may no longer once its time is up, whether it is still here or not: it may have been leaked.
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
"""Identities that are remembered of a file: with more, it is renewed."""
_NOW_S = -math.inf


class Mappings:
    """The mappings of all files of an arena that need a right."""

    def __init__(self, arena: Arena, memory: PersistenceManager, guard: Guard) -> None:
        self._arena = arena
        self._memory = memory
        self._guard = guard
        self._given: dict[ArenaFile, set[Identity]] = {}
        self._until_s = math.inf
        """When the first of them may not read any longer, on the boot-time clock."""

    @property
    def is_over(self) -> bool:
        """Whether the time of somebody is up: `renew`."""
        return self._guard.authenticator.now_s() >= self._until_s

    def check(self, peer: Peer, domain: str) -> None:
        """Whether a peer may map the memory of a domain. Raises `NotAllowed`, and `AuthenticationFailed`."""
        self._guard.check(peer, Need(Operation.READ, _resource(domain)))
        who = peer.identity
        if who is not None and not who.is_daemon and self._is_counted(who):
            raise NotAllowed(
                "you have a quota for reading, and reads from shared memory cannot be counted; have the broker send"
                " the data"
            )

    def give(self, file: ArenaFile, who: Identity | None) -> None:
        """Somebody is about to get a file. Those who could read all memory anyway need not be remembered."""
        if who is None or who.is_daemon:
            return
        file.note_given()
        given = self._given.setdefault(file, set())
        given.add(who if who.how == "jwt" else who._replace(until_s=math.inf))  # of others it is known otherwise
        self._until_s = _NOW_S if len(given) > GIVEN_MAX else min(self._until_s, self._good_until_s(who))

    def renew(self) -> list[ArenaFile]:
        """See whether somebody has lost what it was given; returns the files that are in use no more for that."""
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
        """Whether something was taken from somebody: the right, or what it had shown to be known by."""
        door = self._guard.authenticator
        return (
            not door.is_still(who)
            or door.now_s() >= self._good_until_s(who)
            or not self._guard.may(door.known(who), Operation.READ, _resource(domain))
            or self._is_counted(who)
        )

    def _good_until_s(self, who: Identity) -> float:
        """How long it is good what somebody has shown: a session ends, but not the password that it came from."""
        if who.token_id:
            until_s = self._guard.authenticator.accounts.until_s(who.token_id)  # it may have been renewed
            return _NOW_S if until_s is None else until_s
        return who.until_s if who.how == "jwt" else math.inf

    def _is_counted(self, who: Identity) -> bool:
        return self._guard.quota_of(who).HasField("bytes_out_per_s")


def _resource(domain: str) -> str:
    """As rules call it."""
    return f"domain:{domain}"
