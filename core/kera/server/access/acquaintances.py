"""Identities that are connected, with the access they were granted: remembered until users or rules change. Bounded.

Then who has lost anything of it loses its connections.
"""

from __future__ import annotations

from collections.abc import Callable

from kera.core.access.identity import CHANGED, Identity
from kera.core.access.rights import Operation
from kera.core.rpc.method import Peer
from kera.server.access.requirements import Need
from kera.server.access.usage import Usage, Usages

REMEMBERED_MAX = 4096
"""Identities whose rights are remembered, and rights of each."""


RESOURCE_CHARS_MAX = 512
"""Nothing that there is has a longer name: what was allowed about one is not remembered."""


class Acquaintance:
    """One identity: its peers, and what it was allowed."""

    def __init__(self, usage: Usage | None) -> None:
        self.usage = usage
        """The usage of all identities of the same user together; None: it is not counted."""
        self.here: dict[int, Peer] = {}
        self.allowed: set[Need] = set()
        """Since the last change."""
        self.resources: set[tuple[Operation, str]] = set()
        """All resources that it was allowed to use at any time since it is known: requests under way may have begun
        before a change."""
        self.forgot = False
        """It was allowed more than is remembered."""


class Acquaintances:
    """All of them. Belongs to an event loop."""

    def __init__(self, usages: Usages) -> None:
        self._usages = usages
        self._of: dict[Identity, Acquaintance] = {}
        self.forgotten: list[Callable[[], None]] = []
        """Called when what was allowed has to be asked again."""

    def __len__(self) -> int:
        return len(self._of)

    @property
    def peers(self) -> int:
        """That are here."""
        return sum(len(each.here) for each in self._of.values())

    def meet(self, peer: Peer, who: Identity) -> None:
        """It is known now whose a peer is. Raises `QuotaExceeded` if that has as many connections as it may."""
        usage, before = self.of(who).usage, peer.remembered
        if usage is not None:
            usage.connect(peer, again=before is not None and before.usage is usage)
        if before is None:
            peer.on_close.append(lambda: self._gone(peer))
        else:
            self._gone(peer)
        peer.identity, peer.remembered = who, self.of(who)
        peer.remembered.here[id(peer)] = peer

    def of(self, who: Identity) -> Acquaintance:
        """The entry of an identity."""
        known = self._of.get(who)
        if known is None:
            if len(self._of) > REMEMBERED_MAX:
                for other in [other for other, each in self._of.items() if not each.here]:
                    del self._of[other]
            known = self._of[who] = Acquaintance(self._usages.of(who))
        return known

    def allow(self, known: Acquaintance, need: Need, resource: str) -> None:
        """Remember that somebody was allowed something."""
        if len(resource) > RESOURCE_CHARS_MAX:
            return
        if len(known.allowed) >= REMEMBERED_MAX:
            known.allowed.clear()
        known.allowed.add(need)
        if len(known.resources) >= REMEMBERED_MAX:
            known.resources.clear()
            known.forgot = True
        known.resources.add((need.operation, resource))

    def is_over(self, now_s: float) -> bool:
        """Whether the time of anybody who is here is up, on the boot-time clock."""
        return any(now_s >= who.until_s for who, known in self._of.items() if known.here)

    def end(self, lost: Callable[[Identity, Acquaintance], str], spared: Peer | None = None) -> int:
        """End the connections of those who have lost something; returns how many. All are asked again from now on.

        `lost`: why somebody is ended, in words for them; empty: nothing was lost. `spared`: is not ended.
        """
        ended = 0
        for who, known in list(self._of.items()):
            known.allowed.clear()
            why = lost(who, known) or (CHANGED if known.forgot else "")
            if why:
                del self._of[who]
                ended += len(known.here)
                for peer in list(known.here.values()):
                    if peer is not spared:
                        peer.dismiss(why)
        for forgotten in self.forgotten:
            forgotten()
        return ended

    def _gone(self, peer: Peer) -> None:
        who, known = peer.identity, peer.remembered
        if who is not None and known is not None:
            known.here.pop(id(peer), None)
            if known.usage is not None:
                known.usage.disconnect(peer)
            if not known.here and len(self._of) > REMEMBERED_MAX and self._of.get(who) is known:
                del self._of[who]
