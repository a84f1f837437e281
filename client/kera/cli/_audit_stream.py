"""Writes the audit events of a daemon into a stream, each as a record of JSON.

The daemon's log has all events in any case. At most `EVENTS_MAX` events wait here until the stream has acknowledged
them; further events are dropped and counted, and the next record that finds room says how many. An event that was not
acknowledged is written again, so the stream may have it twice. Events that a daemon has not delivered when it ends are
only in its log.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self

from kera.client import Client, ClientSettings, ProducerSettings
from kera.core.access.audit_events import AuditEvent
from kera.core.base.health import Observation, State
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, StreamExists
from kera.core.runtime import Runtime

log = get_logger("kera.audit")

EVENTS_MAX = 10_000
BATCH_EVENTS_MAX = 500
CLIENT, PRODUCER = ClientSettings.model_construct(), ProducerSettings.model_construct()
"""Defaults, not the host's client settings and credentials: a daemon writes here."""
RETRY_S = 2.0
"""Time between two attempts, when writing fails."""


class StreamOfEvents:
    """See `kera.server.access.audit.AuditStream`."""

    def __init__(self, stream: str, bootstrap: Callable[[], str], daemon: str, runtime: Runtime) -> None:
        self._stream = stream
        self._bootstrap = bootstrap
        self._origin = {"daemon": daemon, "host": socket.gethostname()}
        self._runtime = runtime
        self._waiting: deque[bytes] = deque()
        self._come = asyncio.Event()
        self._lost = 0
        """Number of events dropped since the last one that found room."""
        self._error = ""
        """Why the last attempt to write failed; empty: it did not."""
        self._failing = Repeated(log, runtime.clock)
        self._writing: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._writing = asyncio.get_running_loop().create_task(self._write())
        return self

    def __exit__(self, *_: object) -> None:
        if self._writing is not None:
            self._writing.cancel()

    def put(self, event: AuditEvent) -> None:
        """See `AuditStream.put`."""
        if len(self._waiting) >= EVENTS_MAX:
            self._lost += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._add({"kind": "lost", "reason": f"{lost} events are only in the daemon's log"})
        self._add(event._asdict())

    def _add(self, fields: dict[str, str]) -> None:
        time = datetime.fromtimestamp(self._runtime.clock.now_us() / 1e6, UTC).isoformat(timespec="milliseconds")
        self._waiting.append(json.dumps({"time": time, **self._origin, **fields}).encode())
        self._come.set()

    def look(self) -> Observation:
        """See `AuditStream.look`."""
        if self._error:
            text = (
                f"{len(self._waiting)} events wait for stream {self._stream!r}, {self._lost} had no room: {self._error}"
            )
            return Observation(State.WARNING, text)
        return Observation(State.OK, f"stream {self._stream!r} has all but {len(self._waiting)} events")

    async def _write(self) -> None:
        await self._come.wait()  # the first event comes when the daemon serves, and knows the coordinators' addresses
        while True:
            try:
                async with await Client.connect(self._bootstrap(), CLIENT, runtime=self._runtime) as client:
                    await self._write_with(client)
            except KeraError as error:
                self._failing.goes_on("events do not get into their stream", stream=self._stream, error=error.message)
                self._error = error.message
            except Exception as error:  # noqa: BLE001 - an unexpected error must not end this task
                self._failing.goes_on("events do not get into their stream", level="exception", stream=self._stream)
                self._error = repr(error)
            await asyncio.sleep(RETRY_S)

    async def _write_with(self, client: Client) -> None:
        """Write events as they come. Raises `KeraError` when that fails."""
        try:
            await client.admin.create_stream(self._stream)
        except StreamExists:
            pass
        else:
            log.info("made the stream for events", stream=self._stream)
        async with client.producer(PRODUCER) as producer:
            await producer.prepare(self._stream)
            while True:
                await self._come.wait()
                batch = [self._waiting[index] for index in range(min(len(self._waiting), BATCH_EVENTS_MAX))]
                await asyncio.gather(*[producer.send(self._stream, event) for event in batch])
                for _ in batch:
                    self._waiting.popleft()
                self._error = ""
                self._failing.over("events get into their stream again", stream=self._stream)
                if not self._waiting:
                    self._come.clear()
