"""Hosts of connections: if there are too many connections, the host with the most loses its oldest one. Pure.

So many connections from one host do not crowd out those of other hosts. For peers that have authenticated, the "host"
may be the user.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar
from urllib.parse import unquote

from kera.core.base.address import split_address
from kera.core.errors import InvalidArgument

T = TypeVar("T")

IPV6_HOST_BITS = 64
"""Bits that the addresses of one host usually share: the owner of one IPv6 address mostly has all addresses with the
same prefix."""


class Crowd(Generic[T]):
    """A bounded number of items, each of which belongs to a host."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._hosts: dict[str, dict[T, None]] = {}
        """The items by host, the oldest first."""
        self._host_of: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def __contains__(self, one: object) -> bool:
        return one in self._host_of

    def __iter__(self) -> Iterator[T]:
        return iter(self._host_of)

    def add(self, one: T, host: str) -> T | None:
        """Add an item; return the item that is removed to make room, if any. Adding it again changes nothing."""
        if one in self._host_of:
            return None
        self._host_of[one] = host
        self._hosts.setdefault(host, {})[one] = None
        if len(self._host_of) <= self.size_max:
            return None
        crowded = max(self._hosts.values(), key=len)
        oldest = next(iter(crowded))
        self.remove(oldest)
        return oldest

    def remove(self, one: T) -> bool:
        """Remove an item; False if it was not here."""
        host = self._host_of.pop(one, None)
        if host is None:
            return False
        there = self._hosts[host]
        del there[one]
        if not there:
            del self._hosts[host]
        return True


def most_crowded(some: Iterable[T], host_of_one: Callable[[T], str]) -> T:
    """Return the oldest item of the host with the most. `some` has at least one item, the oldest first."""
    hosts: dict[str, list[T]] = {}
    for one in some:
        hosts.setdefault(host_of_one(one), []).append(one)
    return max(hosts.values(), key=len)[0]


def host_of(address: str) -> str:
    """Return the host of an address (``host:port``, or gRPC's form ``ipv4:host:port``); for IPv6 its network."""
    scheme, _, rest = address.partition(":")
    try:
        host, _ = split_address(unquote(rest) if scheme in {"ipv4", "ipv6"} else address)
        ip = ipaddress.ip_address(host.partition("%")[0])
    except (InvalidArgument, ValueError):
        return address
    if not isinstance(ip, ipaddress.IPv6Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, IPV6_HOST_BITS), strict=False))
