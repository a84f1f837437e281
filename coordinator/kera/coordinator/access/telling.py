"""Brings the newest users and rules to all daemons: after each change, and again after a heartbeat of an outdated
daemon.

A change is answered once all reachable members have applied it, so a revoked right is gone by then. The answer names
the members that could not be reached in time; they may apply the previous table until their next heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.core.errors import KeraError
from kera.v1 import access_pb2 as messages

TELL_S = 2.0
"""How long a change waits for each member, in seconds."""


class Member(NamedTuple):
    """A broker or a backup."""

    noun: str
    member_id: int
    address: str

    def __str__(self) -> str:
        """Return the member's name for people."""
        return f"{self.noun} {self.member_id}"


class TellMember(Protocol):
    """Sends a table to a daemon."""

    async def __call__(self, address: str, request: messages.ApplyAccessRequest, *, timeout_s: float) -> None:
        """Have the daemon apply a table. Raises `Unavailable`, `Uncertain` or the daemon's error."""
        ...


async def tell_nobody(address: str, request: messages.ApplyAccessRequest, *, timeout_s: float) -> None:
    """A `TellMember` of a cluster without security."""
    del address, request, timeout_s


class Telling:
    """Sends the newest users and rules to every member, and repeats them to a member that missed a change."""

    def __init__(self, state: State, table: Callable[[], messages.AccessTable], tell: TellMember) -> None:
        self._state = state
        self._table = table
        self._tell = tell
        self.work = Work()

    async def all(self) -> messages.Untold:
        """Send the table to all members now; return those that could not be told."""
        request = self._request()
        members = self._members()
        results = await asyncio.gather(*(self._one(member, request) for member in members), return_exceptions=True)
        untold = messages.Untold()
        for member, error in zip(members, results, strict=True):
            if isinstance(error, KeraError):
                untold.members.append(f"{member}: {error.message}")
            elif error is not None:
                raise error
        return untold

    def heard(self, noun: str, member_id: int, version: int, current: int) -> None:
        """Send the table to a current member that applies `version`, unless that is the newest, `current`."""
        if version != current:
            members = self._members()
            self.work.forget_failures(members.__contains__)
            for member in [each for each in members if (each.noun, each.member_id) == (noun, member_id)]:
                self.work.start(member, lambda member=member: self._one(member, self._request()))  # type: ignore[misc]

    async def close(self) -> None:
        """Cancel what is under way."""
        await self.work.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self.work.idle()

    async def _one(self, member: Member, request: messages.ApplyAccessRequest) -> None:
        await self._tell(member.address, request, timeout_s=TELL_S)

    def _request(self) -> messages.ApplyAccessRequest:
        return messages.ApplyAccessRequest(coordinator_epoch=self._state.coordinator_epoch, table=self._table())

    def _members(self) -> list[Member]:
        brokers, backups = self._state.brokers, self._state.backups
        return [
            *(
                Member("broker", each.broker_id, each.grpc_address)
                for each in brokers.describe_all()
                if not brokers.is_fenced(each.broker_id)
            ),
            *(
                Member("backup", each.backup_id, each.grpc_address)
                for each in backups.describe_all()
                if not backups.is_fenced(each.backup_id)
            ),
        ]
