"""Hosts of connections: when there are too many connections, the oldest of the host with the most makes room. Pure.

So whoever comes in numbers from one host crowds out nobody from another. Of who is known, a host may be the user.
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
"""Bits that the addresses of one host usually share: the owner of one IPv6 address mostly has all with the same
prefix."""


class Crowd(Generic[T]):
    """A bounded number of things, each of some host."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._hosts: dict[str, dict[T, None]] = {}
        """By host; the oldest first."""
        self._host_of: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def __contains__(self, one: object) -> bool:
        return one in self._host_of

    def __iter__(self) -> Iterator[T]:
        return iter(self._host_of)

    def add(self, one: T, host: str) -> T | None:
        """Take one more; returns who is put out for it, if anybody is. One that is here already stays as it is."""
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
        """It is gone; False if it was not here."""
        host = self._host_of.pop(one, None)
        if host is None:
            return False
        there = self._hosts[host]
        del there[one]
        if not there:
            del self._hosts[host]
        return True


def most_crowded(some: Iterable[T], host_of_one: Callable[[T], str]) -> T:
    """The oldest item of the host with the most. `some` has at least one, in the order of their age."""
    hosts: dict[str, list[T]] = {}
    for one in some:
        hosts.setdefault(host_of_one(one), []).append(one)
    return max(hosts.values(), key=len)[0]


def host_of(address: str) -> str:
    """The host of an address, as frames (``host:port``) or gRPC (``ipv4:host:port``) tell it; of IPv6 its network."""
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
