"""Calls of the leading coordinator, by clients and daemons that know several addresses.

`Coordinators.ask` calls the coordinator that answered last. If that one names another leader, it calls the leader, even
at an address that it did not know before; otherwise it tries the next address. If none leads, the caller has to retry.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from itertools import count

from kera.core.base.address import split_address
from kera.core.base.closing import close_all
from kera.core.errors import ClosedError, InvalidArgument, KeraError, NotLeader, Unavailable, Uncertain
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.method import Channel, Method, RequestT, ResponseT, call
from kera.core.runtime import MACHINE, OpenChannel

__all__ = ["LEARNED_MAX", "Coordinators"]

LEARNED_MAX = 8
"""Maximum of addresses that coordinators have named, besides the given ones; the oldest is dropped for a new one."""
CONVERSATIONS_MAX = 8
"""Number of conversations that share a connection. A coordinator serves this many calls of one connection at once, and
calls whose answers have to wait must delay neither other calls nor each other."""


class Coordinators:
    """The coordinators of one cluster. Belongs to an event loop."""

    def __init__(
        self, addresses: str, *, bulk_bytes_max: int = BULK_BYTES_MAX, channel: OpenChannel = MACHINE.channel
    ) -> None:
        """`addresses` are ``host:port``, several with commas. Raises `InvalidArgument`."""
        self.addresses = _addresses(addresses)
        self._bulk_bytes_max = bulk_bytes_max
        self._open = channel
        self._learned: list[str] = []
        self._channels: dict[tuple[str, int], Channel] = {}
        """Connections by address and number: 0 for single calls, higher ones for conversations."""
        self._conversations: dict[str, int] = {}
        """The number of each conversation's connection, from 1."""
        self._closing: set[asyncio.Task[None]] = set()
        self._current = self.addresses[0]
        self._closed = False

    async def ask(
        self, method: Method[RequestT, ResponseT], message: RequestT, *, timeout_s: float, conversation: str = ""
    ) -> ResponseT:
        """Call the coordinator that leads; try each address at most once, for `timeout_s` each.

        `conversation`: the name of a series of calls whose answers may have to wait for an event. Its calls of one
        method arrive in order, over a connection that few other conversations share. `end_conversation` ends it.

        Raises the error that the leader answers; `NotLeader` if none leads, `Unavailable` if none can be reached, and
        `Uncertain` as soon as one call is uncertain: the next call then begins with the next address.
        """
        tried: list[str] = []
        unreachable: Unavailable | None = None
        leaderless: NotLeader | None = None
        address: str | None = self._current
        while address is not None:
            tried.append(address)
            named = ""
            try:
                answer = await self._call(address, method, message, timeout_s, conversation)
            except NotLeader as error:
                leaderless = error
                named = str(error.attributes.get("leader", ""))
            except Uncertain:
                if self._current == address:
                    self._current = self._after(address)
                raise
            except Unavailable as error:
                if "address" not in error.attributes:
                    raise  # the coordinator itself has answered that it lacks a resource
                if unreachable is None or "refused" in error.attributes:  # a refusal says more than a lack of answer
                    unreachable = error
            except KeraError:
                self._current = address
                raise
            else:
                self._current = address
                return answer
            address = self._next(named, tried)
        if leaderless is not None:
            raise leaderless
        reason = unreachable.message if unreachable else "none is known"
        text = f"no coordinator can be reached ({reason})"
        if unreachable is not None and "refused" in unreachable.attributes:
            raise Unavailable(text, refused=True)  # a process listens there
        raise Unavailable(f"{text}; is the cluster running (kera dev)?")

    def _next(self, named: str, tried: list[str]) -> str | None:
        """Return the address to try next; `named`: the leader that the last one has named."""
        if named not in tried and _is_address(named):
            self._learn(named)
            return named
        return next((address for address in (*self.addresses, *self._learned) if address not in tried), None)

    def _after(self, address: str) -> str:
        known = [*self.addresses, *self._learned]
        return known[(known.index(address) + 1) % len(known)] if address in known else known[0]

    def _learn(self, address: str) -> None:
        if address in self.addresses or address in self._learned:
            return
        self._learned.append(address)
        if len(self._learned) > LEARNED_MAX:
            forgotten = self._learned.pop(0)
            for key in [each for each in self._channels if each[0] == forgotten]:
                task = asyncio.get_running_loop().create_task(self._channels.pop(key).close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _call(
        self, address: str, method: Method[RequestT, ResponseT], message: RequestT, timeout_s: float, conversation: str
    ) -> ResponseT:
        key = address, self._connection_of(conversation)
        channel = self._channels.get(key)
        if channel is None:
            if self._closed:
                raise ClosedError("the connections to the coordinators are closed")
            channel = self._channels[key] = self._open(address, bulk_bytes_max=self._bulk_bytes_max)
        return await call(channel, method, message, timeout_s=timeout_s)

    def _connection_of(self, conversation: str) -> int:
        if not conversation:
            return 0
        if conversation not in self._conversations:
            taken = Counter(self._conversations.values())
            self._conversations[conversation] = next(each for each in count(1) if taken[each] < CONVERSATIONS_MAX)
        return self._conversations[conversation]

    def end_conversation(self, conversation: str) -> None:
        """Forget a conversation, which must have no more calls."""
        self._conversations.pop(conversation, None)

    async def close(self) -> None:
        """Close all connections; no more are made after it."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        await close_all((*(channel.close for channel in channels), partial(asyncio.gather, *self._closing)))


def _addresses(text: str) -> list[str]:
    """Return the addresses in a comma-separated list. Raises `InvalidArgument`."""
    if not isinstance(text, str):
        raise InvalidArgument(f"addresses of coordinators are text, host:port, several with commas; not {text!r}")
    found = [address.strip() for address in text.split(",") if address.strip()]
    for address in found:
        if not split_address(address)[1]:
            raise InvalidArgument(
                f"address {address!r} has port 0, which no server listens on; give the coordinator's port",
                address=address,
            )
    if not found:
        raise InvalidArgument("no address of a coordinator is given; give host:port, several with commas")
    return found


def _is_address(text: str) -> bool:
    try:
        return split_address(text)[1] > 0
    except InvalidArgument:
        return False
