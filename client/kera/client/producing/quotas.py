"""How much a producer sends at once to a broker that holds answers back, as a quota is used up (docs/quotas.md)."""

from __future__ import annotations

from kera.client.producing.sending.hooks import SenderHooks, SenderPort
from kera.client.producing.sending.request import Request
from kera.core.base.telemetry import get_logger
from kera.v1 import broker_pb2

log = get_logger("kera.producer")

THROTTLED_MS_MAX = 1000
"""For which an answer is held back as a quota is used up; after that, requests are smaller. Brokers hold none back for
longer than 2 s, so that large ones would use more than the quota says."""


class Quotas:
    """The time that quotas cost one producer."""

    def __init__(self) -> None:
        self.throttled_ms = 0
        """For how long, altogether, answers were held back."""

    def throttled(self, broker_id: int, ms: int) -> None:
        """An answer was held back for so long."""
        if not self.throttled_ms:
            log.warning("writing is limited by a quota: brokers delay their answers", broker_id=broker_id, ms=ms)
        self.throttled_ms += ms


class QuotaPace(SenderHooks):
    """The bounds of requests to one broker."""

    def __init__(self, quotas: Quotas, port: SenderPort) -> None:
        self.bytes_max = port.bounds.bytes_max
        """Size of a request now: smaller while a quota makes it wait for long."""
        self.in_flight_max = port.bounds.in_flight_max
        """One, when the broker held the last answer back: what is sent in advance would only wait there, and its time
        be up."""
        self._quotas = quotas
        self._port = port
        self._throttled = False
        """The broker held the last answer back."""

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
