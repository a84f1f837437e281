"""A user's view of a cluster: a client with the user's rights, and its latest answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from kera.client import (
    Client,
    ClientSettings,
    ClusterDescription,
    ConsumerGroupDescription,
    ConsumerGroupSummary,
    LatencyDescription,
    Rebalancing,
    RecoveryDescription,
    StreamDescription,
)
from kera.client.admin.watching import StreamSummary, Watch
from kera.client.diagnosis.findings import Finding
from kera.console import limits
from kera.console.browsing.registered import Registered
from kera.console.watching.activity import Activities, Activity
from kera.console.watching.cached import Cached
from kera.console.watching.sizes import Sizes
from kera.console.web.problems import Refused
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, KeraError, NotAllowed

log = get_logger("kera.console")

WRITTEN, READ = "written", "read"
"""Names of the histories of bytes per second that all brokers together receive and send."""


Point = tuple[float, float | None]
"""A time, in seconds of the monotonic clock, and a value; None: the value is unknown."""


class Histories:
    """Histories by name; if there are too many, the least recently watched ones are dropped."""

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        things_max: int = limits.WATCHED_GROUPS_MAX,
        points_max: int = limits.SAMPLES_MAX,
    ) -> None:
        self._now_s = now_s
        self._things_max, self._points_max = things_max, points_max
        self._points: OrderedDict[str, deque[Point]] = OrderedDict()

    def watch(self, name: str) -> None:
        """Keep a history from now on, and mark it as recently watched."""
        self._points.setdefault(name, deque(maxlen=self._points_max))
        self._points.move_to_end(name)
        while len(self._points) > self._things_max:
            self._points.popitem(last=False)

    def offer(self, name: str) -> None:
        """Keep a history from now on, if that does not displace another."""
        if len(self._points) < self._things_max:
            self._points.setdefault(name, deque(maxlen=self._points_max))

    def add(self, name: str, value: float | None) -> None:
        """Add the present value to a history, if it is kept."""
        points = self._points.get(name)
        if points is not None:
            points.append((self._now_s(), value))

    def forget(self, name: str) -> None:
        """Drop a history."""
        self._points.pop(name, None)

    def of(self, name: str) -> list[Point]:
        """Return the points of a history, the oldest first."""
        return list(self._points.get(name, ()))

    @property
    def watched(self) -> list[str]:
        """The names of all histories."""
        return list(self._points)


Examine = Callable[[Client, ClientSettings, Sequence[StreamDescription]], Awaitable[Sequence[Finding]]]
"""Examines the health of a cluster, see `kera.client.diagnosis`. Raises `KeraError`."""


class Health(NamedTuple):
    """The health of the cluster."""

    findings: Sequence[Finding]
    severity: int


class View:
    """A user's client and its latest answers about the cluster. `user` is empty without authentication."""

    def __init__(self, client: Client, settings: ClientSettings, examine: Examine, user: str = "") -> None:
        self.client, self.user = client, user
        self._settings, self._examine = settings, examine
        self._watch = Watch(client.admin)
        self.sizes = Sizes(client.bounds)
        self.cluster: Cached[ClusterDescription] = Cached(self._watch.cluster)
        self.streams: Cached[list[StreamSummary]] = Cached(self._watch.streams, fresh_s=limits.STREAMS_CACHE_S)
        self.recoveries: Cached[list[RecoveryDescription]] = Cached(self._watch.recoveries, fresh_s=1.0)
        self.groups: Cached[list[ConsumerGroupSummary]] = Cached(self._ask_groups)
        self.balance: Cached[Rebalancing] = Cached(
            partial(client.admin.rebalance, dry_run=True), fresh_s=limits.BALANCE_CACHE_S
        )
        self._activities = Activities(self._watch.channel)
        self.activity: Cached[dict[int, Activity]] = Cached(self._ask_activity)
        self.subjects: Cached[list[str]] = Cached(client.schemas.subjects, fresh_s=limits.STREAMS_CACHE_S)
        self.constraints: Cached[list[LatencyDescription]] = Cached(client.latency.constraints)
        self.registered = Registered(client.schemas)
        self.health: Cached[Health] = Cached(self._ask_health, fresh_s=limits.HEALTH_CACHE_S)
        self.lags = Histories(
            time.monotonic, things_max=limits.WATCHED_GROUPS_PER_SESSION_MAX if user else limits.WATCHED_GROUPS_MAX
        )
        self.rates = Histories(time.monotonic)
        self._caches: list[Cached[object]] = [
            self.cluster,  # type: ignore[list-item]
            self.streams,  # type: ignore[list-item]
            self.recoveries,  # type: ignore[list-item]
            self.groups,  # type: ignore[list-item]
            self.activity,  # type: ignore[list-item]
            self.balance,  # type: ignore[list-item]
            self.subjects,  # type: ignore[list-item]
            self.constraints,  # type: ignore[list-item]
            self.health,  # type: ignore[list-item]
        ]
        self.sampled = asyncio.Event()
        """Set when each history has its first point."""
        self._sampling: asyncio.Task[None] | None = None

    async def start(self, patience_s: float) -> None:
        """Begin to sample lags and rates. Return when the first pages have their data, or after `patience_s`."""
        self._sampling = asyncio.ensure_future(self._sample())
        with contextlib.suppress(TimeoutError, KeraError):
            async with asyncio.timeout(patience_s):
                await self.sampled.wait()
                await self.health.get()

    async def close(self) -> None:
        """Stop asking, and close the client, which has the user's credentials."""
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling
        for each in self._caches:
            await each.close()
        await self._activities.close()
        await self.sizes.close()
        with contextlib.suppress(KeraError):
            await self.client.close(flush=False)

    def changed(self) -> None:
        """Drop all cached answers, because something was changed."""
        for each in self._caches:
            each.forget()
        self.sizes.forget()

    async def activities(self) -> dict[int, Activity]:
        """Return the activities of brokers, by their ids; empty: the user may not see them."""
        try:
            return await self.activity.get()
        except NotAllowed:
            return {}

    async def _ask_activity(self) -> dict[int, Activity]:
        return await self._activities.ask((await self.cluster.get()).brokers)

    async def describe_group(self, name: str) -> ConsumerGroupDescription:
        """Return the present state of a consumer group, and keep a history of its lag from now on.

        Raises `Refused` if there is no such group.
        """
        self.lags.watch(name)
        try:
            await self.streams.get()  # the next call needs the names of streams
            return await self._watch.group(name)
        except InvalidArgument as error:
            self.lags.forget(name)
            raise Refused(404, "There is no such consumer group", error.message) from error
        except NotAllowed:
            self.lags.forget(name)
            raise

    async def _ask_groups(self) -> list[ConsumerGroupSummary]:
        await self.streams.get()  # the next call needs the names of streams
        return await self._watch.groups()

    async def _ask_health(self) -> Health:
        await self.streams.get()
        streams = await asyncio.to_thread(self._watch.descriptions)
        findings = await self._examine(self.client, self._settings, streams)
        return Health(findings, max((each.severity for each in findings), default=0))

    # -- over time -------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            try:
                await self.sample()
            except Exception as error:  # a defect must not end the sampling
                log.error("cannot compute lags and rates", exc_info=error)
            self.sampled.set()
            await asyncio.sleep(limits.SAMPLE_INTERVAL_S)

    async def sample(self) -> None:
        """Add a point to each history."""
        if not self.user:  # with many signed-in users, each would ask the cluster for all groups again and again
            with contextlib.suppress(KeraError):
                for group in await self.groups.get():
                    self.lags.offer(group.consumer_group)
        for name in self.lags.watched:
            await self._sample_group(name)
        await _ignoring(self._sample_rates)

    async def _sample_group(self, name: str) -> None:
        try:
            found = await self._watch.group(name)
        except (InvalidArgument, NotAllowed):
            self.lags.forget(name)
        except KeraError:
            self.lags.add(name, None)
        else:
            self.lags.add(name, lag_of(found))

    async def _sample_rates(self) -> None:
        found = (await self.activities()).values()
        for name, values in (
            (WRITTEN, [each.bytes_in_per_s for each in found]),
            (READ, [each.bytes_out_per_s for each in found]),
        ):
            known = [value for value in values if value is not None]
            self.rates.watch(name)
            self.rates.add(name, sum(known) if known else None)


async def _ignoring(do: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(KeraError):
        await do()


def lag_of(group: ConsumerGroupDescription) -> int | None:
    """Return the number of records that a consumer group has yet to read; None: a broker gave no answer."""
    lags = [each.lag for each in group.entries]
    return None if any(lag is None for lag in lags) else sum(lag.records for lag in lags if lag is not None)
