"""The plug-ins of a broker: latency constraints, and the spans of traces. A broker stores and serves without them.

They use the hooks of ``kera.broker.replication.hooks`` and ``kera.broker.serving.hooks``; only this module knows both
sides. Rate quotas are enforced in front of the handlers, with the guard (``kera.server.access.pacing``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container

from kera.broker.latency.held_back import HeldBack
from kera.broker.latency.hold_timer import HoldTimer
from kera.broker.latency.manager import LatencyManager
from kera.broker.ownership.streams import Streams
from kera.broker.replication.manager import Replication
from kera.broker.serving.hooks import RequestHooks
from kera.broker.serving.latency_reports import LatencyReports
from kera.broker.serving.stream_access import checking, checking_groups
from kera.broker.serving.traced import TracedWrites
from kera.core.access.rights import Operation
from kera.core.base.clock import Clock
from kera.core.rpc.method import Peer
from kera.core.tracing import OFF, Tracing
from kera.server.access.guard import Door


class Plugins:
    """The plug-ins of one broker."""

    def __init__(
        self,
        streams: Streams,
        replication: Replication,
        pump: Callable[[], None],
        *,
        guard: Door | None = None,
        clock: Clock | None = None,
        tracing: Tracing = OFF,
    ) -> None:
        """`pump`: starts the requests to backups that are due; `guard`: the guard in front of the handlers."""
        guard = guard or Door()
        self.latency = latency = LatencyManager(clock) if clock is not None else LatencyManager()
        """Measures streams with a latency constraint, and advises their clients."""
        streams.dropped.listen(latency.forget)
        self.hold_timer = HoldTimer(asyncio.get_running_loop())
        """The timer for everything that is held back."""
        self.hold_timer.listen(pump)
        replication.logs.plug_in(HeldBack(replication.logs, latency.replicate, self.hold_timer.set_in))
        check = checking(guard)

        def usable(peer: Peer, operation: Operation, stream_id: int) -> Container[int]:
            stream = streams.get(stream_id)
            check(peer, operation, stream_id)
            return stream.streamlets

        self.of_requests: list[RequestHooks] = [LatencyReports(latency, usable, checking_groups(guard))]
        """The hooks for the service."""
        if tracing.is_on:
            self.of_requests.append(TracedWrites(tracing, streams))
