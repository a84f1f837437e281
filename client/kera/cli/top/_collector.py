"""Gathers a `Sample` of a cluster on request; a daemon that does not answer does not delay the others.

A view has one collector. It asks at most `DAEMONS_AT_ONCE` daemons and `GROUPS_AT_ONCE` consumer groups at a time. With
many streams, it asks less often for their list and for the findings of the diagnosis, which are then expensive.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

from kera.cli.top._constraints import HELD
from kera.cli.top._polling import Poll, all_within
from kera.cli.top._sample import Lagging, Sample, Two, TwoLags
from kera.client import ClusterDescription, ConsumerGroupSummary, LatencyDescription
from kera.client.admin.daemons import DaemonFigures, read_figures
from kera.client.admin.watching import StreamSummary, Watch
from kera.client.diagnosis import asking, cluster
from kera.client.diagnosis.findings import Finding
from kera.core.base.clock import Clock, SystemClock
from kera.core.base.internal_names import is_internal
from kera.core.errors import KeraError, UnknownLatencyConstraint
from kera.core.rpc import Channel

DAEMONS_AT_ONCE = 16
GROUPS_AT_ONCE = 4
GROUPS_LOOKED_AT = 32
"""Maximum of consumer groups whose lag is measured for one sample; more take turns."""
STREAMS_MAX = 100_000
"""Maximum of streams whose figures each broker is asked for."""
HOPS_OF_MAX = 32
"""Maximum of latency constraints that a document has in full: first those that are not met."""
DAEMON_TIMEOUT_S = 3.0
COORDINATOR_TIMEOUT_S = 3.0
LIST_TIMEOUT_S = 10.0
FINDINGS_TIMEOUT_S = 20.0
STREAMS_EVERY_S = 2.0
CONSTRAINTS_EVERY_S = 2.0
MANY_CONSTRAINTS = 100
"""With more constraints than this, their list is asked for every `MANY_EVERY_S`; a cluster has at most 1,000."""
FINDINGS_EVERY_S = 10.0
FINDINGS_SOON_S = 2.0
"""Time between two diagnoses after a daemon has stopped answering, or answers again."""
MANY_STREAMS = 2_000
MANY_EVERY_S = 30.0
"""With more than `MANY_STREAMS` streams: time between two lists of them, and between two diagnoses."""
PATIENCE_S = 1.0
"""How long a sample waits for answers; it shows which daemons have not answered by then."""


class _Member(NamedTuple):
    address: str
    channel: Channel
    poll: Poll[DaemonFigures]


class Collector:
    """Asks the daemons and the coordinator for samples, in bounded time and with a bounded number of questions.

    Call `close` at the end. Its `Watch` has to stay open until then.
    """

    def __init__(
        self,
        watch: Watch,
        clock: Clock | None = None,
        *,
        patience_s: float = PATIENCE_S,
        hops_of_max: int = 0,
        internal: bool = False,
    ) -> None:
        """`clock`: of this host. `hops_of_max`: maximum of latency constraints that each sample has in full.

        `internal`: samples include internal streams and consumer groups.
        """
        self._watch = watch
        self._clock = clock or SystemClock()
        self._patience_s = patience_s
        self._room = asyncio.Semaphore(DAEMONS_AT_ONCE)
        self._group_room = asyncio.Semaphore(GROUPS_AT_ONCE)
        self._members: dict[str, _Member] = {}
        """The daemons that are alive, by names such as ``broker 2``."""
        self._there: frozenset[str] = frozenset()
        """The names of the daemons that answer."""
        self._changed_s = float("-inf")
        """When that set changed last."""
        self._lags: dict[str, TwoLags] = {}
        self._looked_s: dict[str, float] = {}
        """When each consumer group was looked at last, also in vain: a group that fails does not go before others."""
        self.wanted_group = ""
        """A consumer group that each sample measures; empty: none."""
        self.wanted_constraint = ""
        """A latency constraint that each sample has in full; empty: none."""
        self._hops_of_max = hops_of_max
        self._internal = internal
        self._cluster: Poll[ClusterDescription] = Poll(watch.cluster, self._clock, timeout_s=COORDINATOR_TIMEOUT_S)
        self._streams: Poll[list[StreamSummary]] = Poll(
            watch.streams, self._clock, timeout_s=LIST_TIMEOUT_S, every_s=STREAMS_EVERY_S
        )
        self._groups: Poll[list[ConsumerGroupSummary]] = Poll(watch.groups, self._clock, timeout_s=LIST_TIMEOUT_S)
        self._constraints: Poll[list[LatencyDescription]] = Poll(
            watch.constraints, self._clock, timeout_s=LIST_TIMEOUT_S, every_s=CONSTRAINTS_EVERY_S
        )
        self._hops: Poll[dict[str, LatencyDescription]] = Poll(
            self._look_at_constraints, self._clock, timeout_s=LIST_TIMEOUT_S
        )
        self._looks: Poll[None] = Poll(self._look_at_groups, self._clock, timeout_s=LIST_TIMEOUT_S)
        self._findings: Poll[list[Finding]] = Poll(
            self._diagnose, self._clock, timeout_s=FINDINGS_TIMEOUT_S, every_s=FINDINGS_EVERY_S
        )

    async def close(self) -> None:
        """Stop all questions, and close the channels to daemons."""
        for poll in (self._cluster, *self._lists, self._looks, self._hops, self._findings):
            await poll.close()
        for name in list(self._members):
            await self._forget(name)

    async def sample(self, *, patience_s: float | None = None) -> Sample:
        """Take a sample now. `patience_s`: how long to wait for answers, if not as long as usual."""
        patience_s = self._patience_s if patience_s is None else patience_s
        await all_within([self._cluster], patience_s)
        await self._meet()
        lists = [each for each in self._lists if each.answer is None]
        await all_within(lists, patience_s)  # only at first: the questions about groups need their names
        members = [each.poll for each in self._members.values()]
        await all_within([*self._lists, self._looks, self._hops, self._findings, *members], patience_s)
        self._pace()
        return Sample(
            at_s=self._clock.monotonic_s(),
            at_us=self._clock.now_us(),
            cluster=self._cluster.answer,
            cluster_trouble=self._cluster.trouble,
            figures={
                name: Two(each.poll.previous, each.poll.answer)
                for name, each in self._members.items()
                if each.poll.answer is not None
            },
            troubles={
                name: trouble for name, each in self._members.items() if (trouble := each.poll.trouble) is not None
            },
            streams=[each for each in self._streams.answer or () if self._shows(each.name)],
            streams_trouble=self._streams.trouble,
            groups=[each for each in self._groups.answer or () if self._shows(each.consumer_group)],
            groups_trouble=self._groups.trouble,
            lags=dict(self._lags),
            constraints=self._constraints.answer or (),
            constraints_trouble=self._constraints.trouble,
            hops=self._hops.answer or {},
            findings=self._findings.answer,
            findings_trouble=self._findings.trouble,
        )

    def _shows(self, name: str) -> bool:
        """Return whether samples include this stream or consumer group."""
        return self._internal or not is_internal(name)

    @property
    def _lists(self) -> tuple[Poll[Any], ...]:
        return self._streams, self._groups, self._constraints

    def _pace(self) -> None:
        """Ask less often for lists that are long; ask for a diagnosis soon when a daemon has come or gone."""
        many = len(self._streams.answer or ()) > MANY_STREAMS
        self._streams.every_s = MANY_EVERY_S if many else STREAMS_EVERY_S
        many_constraints = len(self._constraints.answer or ()) > MANY_CONSTRAINTS
        self._constraints.every_s = MANY_EVERY_S if many_constraints else CONSTRAINTS_EVERY_S
        there = frozenset(name for name, each in self._members.items() if each.poll.trouble is None)
        if there != self._there:
            self._there, self._changed_s = there, self._clock.monotonic_s()
        if self._findings.asked_s <= self._changed_s:
            self._findings.every_s = FINDINGS_SOON_S
        else:
            self._findings.every_s = MANY_EVERY_S if many else FINDINGS_EVERY_S

    # -- daemons ---------------------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        """Update the daemons to those that the coordinator reports as alive, with their present addresses."""
        known = self._cluster.answer
        if known is None:
            return
        addresses = {f"broker {each.broker_id}": each.grpc_address for each in known.brokers if each.alive}
        addresses |= {f"backup {each.backup_id}": each.grpc_address for each in known.backups if each.alive}
        for name, member in list(self._members.items()):
            if addresses.get(name) != member.address:
                await self._forget(name)
        for name, address in addresses.items():
            if name not in self._members:
                channel = self._watch.channel(address)
                self._members[name] = _Member(address, channel, self._poll_of(channel))

    def _poll_of(self, channel: Channel) -> Poll[DaemonFigures]:
        async def ask() -> DaemonFigures:
            async with self._room:
                return await read_figures(channel, streams_max=STREAMS_MAX, timeout_s=DAEMON_TIMEOUT_S)

        return Poll(ask, self._clock, timeout_s=DAEMON_TIMEOUT_S + self._patience_s)

    async def _forget(self, name: str) -> None:
        member = self._members.pop(name)
        await member.poll.close()
        await member.channel.close()

    # -- consumer groups -------------------------------------------------------------------------------------------

    async def _look_at_groups(self) -> None:
        names = [each.consumer_group for each in self._groups.answer or () if self._shows(each.consumer_group)]
        for gone in self._looked_s.keys() - set(names):
            del self._looked_s[gone]
            self._lags.pop(gone, None)
        chosen = sorted(names, key=lambda name: (name != self.wanted_group, self._looked_s.get(name, float("-inf"))))
        await asyncio.gather(*map(self._look_at, chosen[:GROUPS_LOOKED_AT]))

    async def _look_at(self, name: str) -> None:
        async with self._group_room:
            self._looked_s[name] = self._clock.monotonic_s()
            try:
                async with asyncio.timeout(DAEMON_TIMEOUT_S):
                    found = await self._watch.group(name)
            except (KeraError, TimeoutError):  # the group is gone, or a broker is slow: its last figures stay
                return
        before = self._lags.get(name)
        now = Lagging(self._clock.monotonic_s(), found)
        self._lags[name] = TwoLags(before.now if before is not None else None, now)

    # -- latency constraints ---------------------------------------------------------------------------------------

    async def _look_at_constraints(self) -> dict[str, LatencyDescription]:
        known = sorted(self._constraints.answer or (), key=lambda each: each.state in HELD)
        names = [each.constraint.name for each in known[: self._hops_of_max]]
        if self.wanted_constraint and self.wanted_constraint not in names:
            names.append(self.wanted_constraint)
        found = {}
        for name in names:
            with contextlib.suppress(UnknownLatencyConstraint):  # it was deleted meanwhile
                found[name] = await self._watch.constraint(name)
        return found

    # -- diagnosis -------------------------------------------------------------------------------------------------

    async def _diagnose(self) -> list[Finding]:
        known = await self._watch.cluster()
        recoveries = await self._watch.recoveries()
        streams = await asyncio.to_thread(self._watch.descriptions)
        daemons = await asking.describe_all(asking.addresses_of(known))
        return cluster.health(asking.Picture(known, recoveries, streams, daemons))
