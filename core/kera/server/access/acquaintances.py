"""Connected identities, with the operations that they were allowed, remembered until users or rules change. Bounded.

An identity that loses a right then loses its connections.
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
"""Existing resources have shorter names; rights on a longer name are not remembered."""


class Acquaintance:
    """One identity: its peers, and the operations that it was allowed."""

    def __init__(self, usage: Usage | None) -> None:
        self.usage = usage
        """The usage of all identities of the same user together; None: it is not counted."""
        self.here: dict[int, Peer] = {}
        self.allowed: set[Need] = set()
        """Needs that were allowed since the last change."""
        self.resources: set[tuple[Operation, str]] = set()
        """All resources that it was ever allowed to use: requests in progress may have begun before a change."""
        self.forgot = False
        """Whether some of what it was allowed is no longer remembered."""


class Acquaintances:
    """The identities of one daemon. Belongs to an event loop."""

    def __init__(self, usages: Usages) -> None:
        self._usages = usages
        self._of: dict[Identity, Acquaintance] = {}
        self.forgotten: list[Callable[[], None]] = []
        """Called when rights have to be checked again."""

    def __len__(self) -> int:
        return len(self._of)

    @property
    def peers(self) -> int:
        """The number of connected peers."""
        return sum(len(each.here) for each in self._of.values())

    def meet(self, peer: Peer, who: Identity) -> None:
        """Set the identity of a peer. Raises `QuotaExceeded` if the identity has too many connections."""
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
        """Return the entry of an identity, a new one if need be."""
        known = self._of.get(who)
        if known is None:
            if len(self._of) > REMEMBERED_MAX:
                for other in [other for other, each in self._of.items() if not each.here]:
                    del self._of[other]
            known = self._of[who] = Acquaintance(self._usages.of(who))
        return known

    def allow(self, known: Acquaintance, need: Need, resource: str) -> None:
        """Remember that an identity was allowed an operation on a resource."""
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
        """Return whether a connected identity has expired; `now_s`: on the boot-time clock."""
        return any(now_s >= who.until_s for who, known in self._of.items() if known.here)

    def end(self, lost: Callable[[Identity, Acquaintance], str], spared: Peer | None = None) -> int:
        """End the connections of identities that have lost rights; return how many. All rights are checked again.

        `lost`: returns the reason for the peers; empty: nothing was lost. `spared`: a peer that is not ended, and that
        stays known, so that a later call ends it if the reason lasts.
        """
        ended = 0
        for who, known in list(self._of.items()):
            known.allowed.clear()
            why = lost(who, known) or (CHANGED if known.forgot else "")
            if not why:
                continue
            del self._of[who]
            for peer in list(known.here.values()):
                if peer is spared:
                    peer.remembered = self._of[who] = Acquaintance(known.usage)
                    peer.remembered.here[id(peer)] = peer
                    continue
                self._gone(peer)  # a dismissed peer has no identity, so its close would not find what counts it
                peer.dismiss(why)
                ended += 1
        for forgotten in self.forgotten:
            forgotten()
        return ended

    def _gone(self, peer: Peer) -> None:
        """Stop counting a peer. May be called repeatedly."""
        who, known = peer.identity, peer.remembered
        if who is None or known is None or known.here.pop(id(peer), None) is None:
            return
        if known.usage is not None:
            known.usage.disconnect(peer)
        if not known.here and len(self._of) > REMEMBERED_MAX and self._of.get(who) is known:
            del self._of[who]
