"""The monitoring of one daemon: its health, its metrics, and, if a port is set, both over HTTP.

    /livez         200: the daemon's event loop turns; 503: it has not for `STUCK_S`: restart the process
    /readyz        200: it can do its work; 503: it cannot, and why. Lines of text, or JSON if the client asks for it
    /metrics       totals of the daemon
    /metrics/all   the same, and metrics of each stream, within the sources' limits

State that the loop owns is read in the loop. The server's thread makes text of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kera.core.base.address import join_address
from kera.core.base.build import this_build
from kera.core.base.health import Check, Health, State, wrong
from kera.core.base.loop_lag import LoopLag
from kera.core.base.turns import Turns
from kera.core.errors import KeraError
from kera.core.rpc import Call, Reply, Service, api
from kera.core.rpc.grpc_options import BEARER
from kera.core.rpc.method import Evidence
from kera.core.runtime import MACHINE, Runtime
from kera.server.access.guard import Door, Guard
from kera.server.feature_level import FEATURE_LEVEL
from kera.server.monitoring.access import AccessCounts
from kera.server.monitoring.certificates import Certificates
from kera.server.monitoring.figures import STREAMS_AT_ONCE_MAX, PerStream, figures_of
from kera.server.monitoring.http_server import LIMITS, HttpServer, Limits, Request, Response, Route, text
from kera.server.monitoring.sources import Aside, OfProcess, Registered, Source, rendered, room_of
from kera.v1 import daemon_pb2

T = TypeVar("T")

STUCK_S = 10.0
"""Longer than any planned work keeps a loop, as a restart because of this loses all requests in flight."""
READY_S = 2.0
"""Time for the loop to find whether the daemon is ready."""
COLLECT_S = 8.0
"""Time for the loop to collect metrics."""
PROCESS_S = 1.0
"""Time for metrics that need no loop: a file system may hang."""
_SIGNS = {State.OK: "+", State.WARNING: "!", State.PROBLEM: "-"}


class Monitor:
    """Collects a daemon's health and metrics, and serves them over HTTP if a port is set.

    Created in the daemon's loop; `close` it last.
    """

    def __init__(
        self,
        role: str,
        directories: Sequence[Path] = (),
        *,
        runtime: Runtime = MACHINE,
        limits: Limits = LIMITS,
        stuck_s: float = STUCK_S,
        guarded: bool = False,
    ) -> None:
        """`role`: coordinator, broker or backup; `directories`: directories to which the daemon writes.

        `guarded`: only clients that the door admits (see `guarded_by`) get answers to more than probes.
        """
        self._guarded = guarded
        self._door: Door | None = None if guarded else Door()
        self.health = Health()
        self.registry = CollectorRegistry()
        """The registry of metrics that `prometheus_client` itself counts."""
        self._loop = asyncio.get_running_loop()
        self._lag: LoopLag | None = None
        """The lag of the loop; measured only if there is an HTTP server."""
        self._sources: list[Source] = [Registered(self.registry)]
        self._of_scrapes: list[Source] = []
        """Sources that each scrape resets. Live views do not read them, so that Prometheus misses nothing."""
        self._per_stream: PerStream | None = None
        self._process = OfProcess(directories)
        self._directories = directories
        self._role = role
        self._runtime = runtime
        self._clock = runtime.clock
        self._begun_s = self._clock.monotonic_s()
        self._launch_id = f"{self._clock.now_us():x}"
        self._looking = Aside("kera-process-metrics")
        self._looking_at_room = Aside("kera-file-systems")
        self._turns = Turns()
        self._stuck_s = stuck_s
        self._scrapes_s = 0.0
        self._server: HttpServer | None = None
        self._limits = limits
        if runtime.tls is not None:
            certificates = Certificates(runtime.tls, runtime.clock)
            self.health.add("certificate", certificates.look)
            self.add(certificates)

    def guarded_by(self, door: Door) -> Door:
        """Let `door` decide from now on who may see metrics, and why the daemon is not ready; returns `door`."""
        self._door = door
        if isinstance(door, Guard):
            self.add(AccessCounts(door))
        for name, look in door.looks.items():
            self.health.add(name, look)
        return door

    def add(self, source: Source) -> None:
        """Add a source of metrics."""
        self._sources.append(source)

    def watch_streams(self, per_stream: PerStream) -> None:
        """Add the source of figures of single streams."""
        self._per_stream = per_stream

    def serve(self, host: str, port: int | None) -> dict[str, str]:
        """Serve on `host`:`port` (0: any free one, None: nowhere); returns the address. Raises `PortTaken`."""
        if port is None:
            return {}
        self._lag = LoopLag()
        scraped = CollectorRegistry()
        scraped.register(self._lag)
        self._of_scrapes.append(Registered(scraped))
        self._server = HttpServer(
            {
                "/livez": Route(self._livez, "probes", is_open=True),
                "/readyz": Route(self._readyz, "probes", is_open=True),
                "/metrics": Route(self._for_known(self._metrics), "metrics"),
                "/metrics/all": Route(self._for_known(self._metrics_all), "everything"),
            },
            self._limits,
            self._runtime.tls,
        )
        return {"metrics_address": join_address(host, self._server.listen(host, port))}

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
        if self._lag is not None:
            self._lag.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the daemon's loop --------------------------------------------------------------------------------------

    async def collect(self, *, everything: bool) -> list[Metric]:
        """Return the metrics of the sources, without those of the process."""
        return await self._collect([*self._sources, *self._of_scrapes], everything=everything)

    async def _collect(self, sources: Sequence[Source], *, everything: bool) -> list[Metric]:
        families: list[Metric] = []
        for source in sources:
            families += await self._turns.run(source.steps(everything=everything), self)
        return families

    def service(self) -> Service:
        """Return the methods of a daemon's gRPC server about the daemon itself."""
        return {api.DESCRIBE_DAEMON: self._describe, api.READ_FIGURES: self._figures}

    async def _describe(self, _: Call[daemon_pb2.DescribeDaemonRequest]) -> Reply[daemon_pb2.DescribeDaemonResponse]:
        rooms = await self._looking_at_room.run(lambda: room_of(self._directories), PROCESS_S)
        build = this_build()
        response = daemon_pb2.DescribeDaemonResponse(
            role=self._role,
            version=build.version,
            feature_level=FEATURE_LEVEL,
            commit=build.commit,
            native=build.native,
            security=self._guarded,
            node_id=self._runtime.node_id(),
            uptime_ms=round((self._clock.monotonic_s() - self._begun_s) * 1000),
            checks=[each.to_message() for each in self.health.checks()],
            file_systems=[daemon_pb2.FileSystem(**room._asdict()) for room in rooms],
        )
        response.now_us = self._clock.now_us()  # last, as callers compare it with the middle of their round trip
        return Reply(response)

    async def _figures(self, call: Call[daemon_pb2.ReadFiguresRequest]) -> Reply[daemon_pb2.ReadFiguresResponse]:
        request = call.message
        families = [*self._process.process(), self._of_processor()]
        response = daemon_pb2.ReadFiguresResponse(launch_id=self._launch_id)
        response.figures.extend(figures_of([*families, *await self._collect(self._sources, everything=False)]))
        if request.streams_max and self._per_stream is not None:
            steps = self._per_stream.of_streams(request.after_stream_id, min(request.streams_max, STREAMS_AT_ONCE_MAX))
            response.streams.extend((found := await self._turns.run(steps, self)).streams)
            response.more_streams = found.more
        response.uptime_us = round((self._clock.monotonic_s() - self._begun_s) * 1_000_000)
        return Reply(response)

    def _of_processor(self) -> Metric:
        """Return the processor time of the loop's thread and of all threads: it shows whether the loop is saturated."""
        family = CounterMetricFamily(
            "kera_processor_seconds", "processor time of the loop's thread, and of all threads", labels=["of"]
        )
        taken = self._clock.processor_s()
        if taken is not None:
            family.add_metric(["loop"], taken[0])
            family.add_metric(["process"], taken[1])
        return family

    async def _checks(self) -> list[Check]:
        return self.health.checks()

    # -- on the server's thread ------------------------------------------------------------------------------------

    async def _ask(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the daemon's loop. Raises `TimeoutError`."""
        asked = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(asked)

    @property
    def _still_s(self) -> float:
        return self._lag.still_s if self._lag is not None else 0.0

    def _still(self) -> str:
        return f"the event loop has not turned for {self._still_s:.1f} s"

    async def _livez(self, _: Request) -> Response:
        if self._still_s >= self._stuck_s:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, f"{self._still()}; restart this process")
        return text(HTTPStatus.OK, "live")

    async def _readyz(self, request: Request) -> Response:
        try:
            checks = await self._ask(self._checks(), READY_S)
        except TimeoutError:
            checks = [Check("loop", *wrong(self._still()))]
        ready = all(each.state is not State.PROBLEM for each in checks)
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        if not (request.is_known and await self._refusal(request) is None):
            checks = []  # the reasons are not public
        if "application/json" in request.fields.get("accept", ""):
            found = [{"name": each.name, "state": each.state.value, "text": each.text} for each in checks]
            document = {"ready": ready, "checks": found}
            return Response(status, json.dumps(document).encode() + b"\n", "application/json")
        lines = [f"[{_SIGNS[each.state]}] {each.name}: {each.text}" for each in checks]
        return text(status, "\n".join(["ready" if ready else "not ready", *lines]))

    def _for_known(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer_known(request: Request) -> Response:
            refusal = await self._refusal(request)
            return await answer(request) if refusal is None else refusal

        return answer_known

    async def _refusal(self, request: Request) -> Response | None:
        """Return the answer that refuses a client; None: it may see metrics."""
        if self._door is not None and not self._door.asks:
            return None
        token = request.fields.get("authorization", "")
        shown = Evidence(request.certificate, token=token.removeprefix(BEARER) if token.startswith(BEARER) else "")

        async def ask() -> bool | None:
            return None if self._door is None else self._door.may_watch(shown)

        try:
            may = await self._ask(ask(), READY_S)
        except TimeoutError:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, self._still())
        except KeraError as error:
            return text(HTTPStatus.UNAUTHORIZED, error.message)
        if may is None:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, "it is starting, and cannot check rights yet")
        if not may:
            return text(
                HTTPStatus.FORBIDDEN,
                "show a certificate, or a token (Authorization: Bearer …), of a user who may describe the cluster:"
                " kera acl grant user:NAME describe cluster",
            )
        return None

    async def _metrics(self, _: Request) -> Response:
        return await self._rendered(everything=False)

    async def _metrics_all(self, _: Request) -> Response:
        return await self._rendered(everything=True)

    async def _rendered(self, *, everything: bool) -> Response:
        begun_s = time.monotonic()
        process = await self._looking.run(self._process.collect, PROCESS_S)
        try:
            families = await self._ask(self.collect(everything=everything), COLLECT_S)
        except TimeoutError:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, f"metrics cannot be collected: {self._still()}")
        last = GaugeMetricFamily(
            "kera_scrape_seconds", "how long the scrape before this one took to be made", value=self._scrapes_s
        )
        body = await asyncio.to_thread(rendered, [*process, *families, last])
        self._scrapes_s = time.monotonic() - begun_s
        return Response(HTTPStatus.OK, body, CONTENT_TYPE_LATEST)
