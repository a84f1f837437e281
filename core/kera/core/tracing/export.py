"""Sends spans to a collector: a bounded queue, and a thread that empties it.

Code that ends a span puts it into the queue and goes on; spans that do not fit are dropped and counted. A collector
that is slow or gone delays only the thread; the end of a process waits for it for at most `CLOSE_S`. One log line a
minute says how many spans were dropped or refused.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kera.core.base.telemetry import get_logger

QUEUE_MAX = 4096
"""Maximum of waiting spans; each takes some 2 KB."""
BATCH_MAX = 512
PERIOD_S = 0.5
CLOSE_S = 2.0
SAID_EVERY_S = 60.0

log = get_logger("kera.tracing")


class Sends(Protocol):
    """Sends spans to a collector."""

    def __call__(self, spans: Sequence[Any], /) -> bool:
        """Send `spans`; return whether the collector has taken them. May take long, and may raise anything."""
        ...


class Exporting:
    """Sends spans to a collector from a bounded queue, without delaying the threads that add them.

    Any thread may `add`.
    """

    def __init__(
        self,
        send: Sends,
        *,
        queue_max: int = QUEUE_MAX,
        now_s: Callable[[], float] = time.monotonic,
        said_every_s: float = SAID_EVERY_S,
    ) -> None:
        self._send = send
        self._queue_max = queue_max
        self._now_s = now_s
        self._said_every_s = said_every_s
        self._said_s = float("-inf")
        self._queue: deque[Any] = deque()
        self._busy = False
        """Whether a batch is being sent."""
        self.dropped = 0
        """Spans since the last log line for which there was no room, or that the collector did not take."""
        self._changed = threading.Condition()
        self._closed = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Start the thread in this process. After a fork, the queued spans belong to the parent."""
        self._queue.clear()
        self._changed, self._busy = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="kera-traces", daemon=True)
        self._thread.start()

    def add(self, span: Any) -> None:
        """Queue a span for export, if there is room."""
        if len(self._queue) >= self._queue_max or self._closed:
            self.dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) == BATCH_MAX:
            with self._changed:
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued spans have been sent or refused; return whether that was done in time."""
        ends_s = time.monotonic() + timeout_s
        with self._changed:
            self._changed.notify_all()
            while self._queue or self._busy:
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(min(left_s, PERIOD_S))
                self._changed.notify_all()
        return True

    def close(self) -> None:
        """Send the remaining spans if that does not take longer than `CLOSE_S`, and end."""
        self.flush(CLOSE_S)
        self._closed = True
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    if self._closed:
                        return
                    self._changed.wait(PERIOD_S)
                batch = [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]
                self._busy = bool(batch)
            if batch:
                self._bring(batch)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
            self._say()

    def _bring(self, batch: Sequence[Any]) -> None:
        try:
            taken = self._send(batch)
        except Exception as error:  # noqa: BLE001 - no error of tracing may have other effects
            taken = False
            log.debug("spans could not be exported", error=f"{type(error).__name__}: {error}")
        if not taken:
            self.dropped += len(batch)

    def _say(self) -> None:
        now_s = self._now_s()
        if self.dropped and now_s - self._said_s >= self._said_every_s:
            dropped, self.dropped, self._said_s = self.dropped, 0, now_s
            log.warning("spans were not exported: the collector does not take them, or not quickly", spans=dropped)
