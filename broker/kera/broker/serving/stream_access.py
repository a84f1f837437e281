"""Rights on a stream, checked again when a request gets to it.

Many ranges or cursors take their time, and those of a read session are kept: a stream that was not here when the
request came may be by then, and nobody has asked whether who named its id may see it.
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
    """A `CheckStream` where everybody may do everything."""


CheckGroup = Callable[[Peer, str], None]
"""Raises `NotAllowed` if the peer may not use the consumer group of this name."""


def checking_groups(door: Door) -> CheckGroup:
    """The same of consumer groups."""
    if not isinstance(door, Guard):
        return lambda _peer, _name: None
    return lambda peer, name: door.check(peer, Need(Operation.USE, group(name)))


def checking(door: Door) -> CheckStream:
    """The check for peers behind `door`."""
    if not isinstance(door, Guard):
        return nothing_is_kept

    def check(peer: Peer, operation: Operation, stream_id: int) -> None:
        door.check(peer, Need(operation, stream_id))

    return check
