"""Who gets the memory of a domain, and what follows when one of them may not read it any more.

Nobody can take a mapping back. So what is new goes elsewhere then: to a file that is given to those who still may.
"""

from __future__ import annotations

from kera.broker.log.arena import Arena
from kera.broker.log.arena_file import ArenaFile
from kera.broker.storage.persistence import PersistenceManager
from kera.core.access.guard import Guard
from kera.core.access.identity import Identity
from kera.core.access.requirements import Need
from kera.core.access.rights import Operation
from kera.core.errors import NotAllowed
from kera.core.rpc.method import Peer
from kera.core.telemetry import get_logger

log = get_logger("kera.push")

GIVEN_MAX = 4096
"""Identities that are remembered of a file: with more, it is renewed."""


class Mappings:
    """Of all files of an arena, to whom rights have to allow it."""

    def __init__(self, arena: Arena, memory: PersistenceManager, guard: Guard) -> None:
        self._arena = arena
        self._memory = memory
        self._guard = guard
        self._given: dict[ArenaFile, set[Identity]] = {}

    def check(self, peer: Peer, domain: str) -> None:
        """Whether a peer may map the memory of a domain. Raises `NotAllowed`, and `AuthenticationFailed`."""
        self._guard.check(peer, Need(Operation.READ, _resource(domain)))
        who = peer.identity
        if who is not None and not who.is_daemon and self._guard.quota_of(who).HasField("bytes_out_per_s"):
            raise NotAllowed("a quota counts what you read, and what is read in place cannot be counted")

    def give(self, file: ArenaFile, who: Identity | None) -> None:
        """Somebody gets a file. Those who could read all memory anyway need not be remembered."""
        if who is not None and not who.is_daemon:
            self._given.setdefault(file, set()).add(who)

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
                log.info("memory is renewed: somebody who has mapped it may not read it any more", domain=file.domain)
                self._arena.renew(file.domain)
                self._memory.close_all_of(file.domain)
        return renewed

    def _has_lost(self, who: Identity, domain: str) -> bool:
        """Whether something was taken from somebody: the right, or what it had shown to be known by.

        That the time of it is up, as that of tokens is, takes nothing from who may get another one.
        """
        door = self._guard.authenticator
        is_over = door.now_s() >= who.until_s
        return not (is_over or door.holds(who)) or not self._guard.may(
            door.known(who), Operation.READ, _resource(domain)
        )


def _resource(domain: str) -> str:
    """As rules call it."""
    return f"domain:{domain}"
