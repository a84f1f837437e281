"""Rights on a stream, checked again when a request gets to it.

A request with many ranges or cursors takes a while, and a read session keeps its ranges. A stream that was unknown when
the request arrived may be here by then, and the first check did not cover it.
"""

from __future__ import annotations

from collections.abc import Callable

from kera.core.access.rights import Operation
from kera.core.rpc.method import Peer
from kera.server.access.guard import Door, Guard
from kera.server.access.requirements import Need, group

CheckStream = Callable[[Peer, Operation, int], None]
"""Raises `NotAllowed`, or `UnknownStream` if the peer may not even know that the stream with this id is here."""


def nothing_is_kept(_peer: Peer, _operation: Operation, _stream_id: int) -> None:
    """Allow everything: the `CheckStream` of a broker without access control."""


CheckGroup = Callable[[Peer, str], None]
"""Raises `NotAllowed` if the peer may not use the consumer group of this name."""


def checking_groups(door: Door) -> CheckGroup:
    """Return the check for the use of consumer groups by peers behind `door`."""
    if not isinstance(door, Guard):
        return lambda _peer, _name: None
    return lambda peer, name: door.check(peer, Need(Operation.USE, group(name)))


def checking(door: Door) -> CheckStream:
    """Return the check of rights on streams for peers behind `door`."""
    if not isinstance(door, Guard):
        return nothing_is_kept

    def check(peer: Peer, operation: Operation, stream_id: int) -> None:
        door.check(peer, Need(operation, stream_id))

    return check
