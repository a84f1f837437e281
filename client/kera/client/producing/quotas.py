"""Bounds on what a producer sends at once to a broker that holds answers back for a used-up quota (docs/quotas.md)."""

from __future__ import annotations

from kera.client.producing.sending.hooks import SenderHooks, SenderPort
from kera.client.producing.sending.request import Request
from kera.core.base.telemetry import get_logger
from kera.v1 import broker_pb2

log = get_logger("kera.producer")

THROTTLED_MS_MAX = 1000
"""Requests become smaller when a broker holds an answer back for longer than this. Brokers hold answers back for 2 s at
most, so that large requests would exceed the quota."""


class Quotas:
    """The time that quotas cost one producer."""

    def __init__(self) -> None:
        self.throttled_ms = 0
        """Total time for which answers were held back."""

    def throttled(self, broker_id: int, ms: int) -> None:
        """Note that a broker held an answer back for `ms`."""
        if not self.throttled_ms:
            log.warning("writing is limited by a quota: brokers delay their answers", broker_id=broker_id, ms=ms)
        self.throttled_ms += ms


class QuotaPace(SenderHooks):
    """Bounds of requests to one broker, smaller while quotas delay its answers."""

    def __init__(self, quotas: Quotas, port: SenderPort) -> None:
        self.bytes_max = port.bounds.bytes_max
        """Maximum size of a request now: smaller while a quota delays answers for long."""
        self.in_flight_max = port.bounds.in_flight_max
        """Maximum number of requests in flight: one if the broker held the last answer back, because further requests
        would only wait there until they time out."""
        self._quotas = quotas
        self._port = port
        self._throttled = False
        """Whether the broker held the last answer back."""

    def on_answer(self, request: Request, answer: broker_pb2.MultiWriteChunksResponse, now_s: float) -> None:  # noqa: ARG002
        """See `SenderHooks`."""
        ms, most = answer.throttled_ms, self._port.bounds
        if not ms and not self._throttled and self.bytes_max == most.bytes_max:
            return
        self._throttled = ms > 0
        self.in_flight_max = 1 if self._throttled else most.in_flight_max
        if ms > THROTTLED_MS_MAX:
            self.bytes_max = max(1, self.bytes_max // 2)
        elif ms < THROTTLED_MS_MAX // 4:
            self.bytes_max = min(self.bytes_max * 2, most.bytes_max)
        if ms:
            self._quotas.throttled(self._port.broker_id, ms)
