"""Heartbeats of a consumer from a separate thread: they go on while the user's code blocks the event loop.

The thread shares only a few numbers with the loop, and has its own connection, with gRPC's synchronous API. It needs
the interpreter lock now and then; code that never releases it silences the heartbeats, which is intended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import grpc

from kera.core.base.clock import Clock
from kera.core.base.telemetry import get_logger
from kera.core.errors import ProtocolError
from kera.core.rpc import api
from kera.core.rpc.grpc_options import AUTHORIZATION, BEARER, ERROR_METADATA, client_options
from kera.core.rpc.grpc_strangers import beside_call
from kera.core.rpc.method import Introduction, Method, RequestT, ResponseT
from kera.core.rpc.wire import error_from_message, parse
from kera.core.security import Tls
from kera.v1 import common_pb2, consumer_group_pb2

log = get_logger("kera.consumer")

TIMEOUT_S_MAX = 5.0


class KeepAlive:
    """Sends a heartbeat every `interval_s`, unless the coordinator has answered a round within that time."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        consumer_group: str,
        member_id: str,
        interval_s: float,
        busy_ms: Callable[[], int],
        clock: Clock,
        tls: Tls | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        """`busy_ms`: called on the thread; returns how long the consumer has been in its user's code."""
        self._addresses = list(addresses)
        self._leader = self._addresses[0]
        self._consumer_group = consumer_group
        self._member_id = member_id
        self._interval_s = interval_s
        self._busy_ms = busy_ms
        self._clock = clock
        self._tls = tls
        self._tls_version = b""
        self._introduction = introduction
        self._shown: dict[str, tuple[tuple[str, str], ...]] = {}
        """The metadata that identifies this client in calls, by address."""
        self._stop = threading.Event()
        self._channels: dict[str, grpc.Channel] = {}
        self._failing = False
        self._heard_s = clock.boottime_s()
        self._thread = threading.Thread(target=self._run, name="kera-keep-alive", daemon=True)

    @property
    def heard_s(self) -> float:
        """Time when the last answered message was sent, on the boot-time clock: a heartbeat, or a round."""
        return self._heard_s

    def answered(self, sent_s: float) -> None:
        """Note that the coordinator has answered a message that was sent at this time."""
        self._heard_s = max(self._heard_s, sent_s)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end; returns at once."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause_s()):
                if self._clock.boottime_s() - self._heard_s >= self._interval_s:
                    self._say()
        finally:
            self._close()

    def _close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _open(self, address: str) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(address, options=client_options())
        return grpc.secure_channel(address, self._tls.channel_credentials(), options=client_options())

    def _pause_s(self) -> float:
        """Return the time until the next heartbeat is due; after an unanswered one not at once."""
        return max(self._interval_s / 4, self._heard_s + self._interval_s - self._clock.boottime_s())

    def _say(self) -> None:
        """Send one heartbeat to the leading coordinator: the last known one, or else any other."""
        reason = ""
        for address in dict.fromkeys([self._leader, *self._addresses]):
            sent_s = self._clock.boottime_s()
            try:
                answer = self._ask(address)
            except Exception as error:  # noqa: BLE001 - after any error, the thread must go on
                reason, leader = _reason(error), _leader_in(error)
                if leader:
                    self._leader = leader
                    with contextlib.suppress(Exception):
                        answer = self._ask(leader)
                        self._heard(leader, sent_s, answer)
                        return
                continue
            self._heard(address, sent_s, answer)
            return
        if not (self._failing or self._stop.is_set()):
            self._failing = True
            log.warning("no coordinator answers heartbeats", consumer_group=self._consumer_group, error=reason)

    def _heard(self, address: str, sent_s: float, answer: consumer_group_pb2.KeepAliveResponse) -> None:
        self._leader, self._failing = address, False
        if answer.member:
            self.answered(sent_s)

    def _ask(self, address: str) -> consumer_group_pb2.KeepAliveResponse:
        if self._tls is not None and self._tls.version != self._tls_version:
            self._tls_version = self._tls.version
            self._close()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        request = consumer_group_pb2.KeepAliveRequest(
            consumer_group=self._consumer_group, member_id=self._member_id, busy_ms=self._busy_ms()
        )
        if self._introduction is not None and address not in self._shown:
            self._shown[address] = self._introduce(channel, self._introduction)
        try:
            return self._call(channel, api.KEEP_ALIVE, request, self._shown.get(address, ()))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._shown.pop(address, None)  # authenticate again next time
            raise

    def _introduce(self, channel: grpc.Channel, introduction: Introduction) -> tuple[tuple[str, str], ...]:
        steps = introduction(each_call=True)
        try:
            request = next(steps)
            while True:
                shown = beside_call(request.SerializeToString())
                request = steps.send(self._call(channel, api.AUTHENTICATE, type(request)(), shown))
        except StopIteration as done:
            return ((AUTHORIZATION, BEARER + done.value),) if done.value else ()

    def _call(
        self,
        channel: grpc.Channel,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        shown: tuple[tuple[str, str | bytes], ...] = (),
    ) -> ResponseT:
        send = channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        answer: ResponseT = send(request, timeout=min(TIMEOUT_S_MAX, 4 * self._interval_s), metadata=shown)
        return answer


def _reason(error: Exception) -> str:
    reason = error.details() if isinstance(error, grpc.Call) else str(error)
    return reason or type(error).__name__


def _leader_in(error: Exception) -> str:
    """Return the leading coordinator named in another coordinator's error; empty if there is none."""
    for key, value in getattr(error, "trailing_metadata", tuple)() or ():
        if key == ERROR_METADATA:
            with contextlib.suppress(ProtocolError):
                known = error_from_message(parse(common_pb2.Error, value))
                return str(known.attributes.get("leader") or "")
    return ""
