"""Audit events that go into a stream: their fate while the stream does not accept them."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from structlog.testing import capture_logs

from kera.cli._audit_stream import EVENTS_MAX, StreamOfEvents
from kera.client import Client
from kera.core.access.audit_events import AuditEvent
from kera.core.base.clock import FakeClock
from kera.core.base.health import State
from kera.core.runtime import MACHINE

EVENT = AuditEvent("denied", "user:alice", "10.0.0.9:1", operation="read", resource="stream:orders")


def test_events_beyond_the_capacity_are_counted_in_a_lost_event() -> None:
    stream = StreamOfEvents("audit", lambda: "127.0.0.1:1", "broker", MACHINE)
    for _ in range(EVENTS_MAX + 5):
        stream.put(EVENT)
    assert len(stream._waiting) == EVENTS_MAX
    first = json.loads(stream._waiting[0])
    assert (first["daemon"], first["kind"], first["resource"]) == ("broker", "denied", "stream:orders")
    for _ in range(10):
        stream._waiting.popleft()
    stream.put(EVENT)

    lost, last = (json.loads(each) for each in list(stream._waiting)[-2:])
    assert (lost["kind"], lost["reason"]) == ("lost", "5 events are only in the daemon's log")
    assert last["kind"] == "denied"


@pytest.mark.parametrize("variable", ["", "KERA_CLIENT_TLS_CA", "KERA_CLIENT_RETRY_TIMEOUT_MS"])
async def test_health_says_why_events_do_not_reach_their_stream(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid settings for clients on the same host do not change the reason."""
    if variable:
        monkeypatch.setenv(variable, "nonsense")
    stream = StreamOfEvents("audit", lambda: "not an address", "broker", MACHINE)
    with stream:
        assert stream.look().state is State.OK
        stream.put(EVENT)
        async with asyncio.timeout(10):
            while stream.look().state is State.OK:
                await asyncio.sleep(0.01)
        assert "1 events wait for stream 'audit'" in stream.look().text
        assert "not an address" in stream.look().text


async def test_a_lasting_unexpected_error_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, several = 0, asyncio.Event()

    async def connect(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            several.set()
        raise ValueError("a bug")

    monkeypatch.setattr(Client, "connect", connect)
    monkeypatch.setattr("kera.cli._audit_stream.RETRY_S", 0)
    stream = StreamOfEvents("audit", lambda: "h:1", "broker", dataclasses.replace(MACHINE, clock=FakeClock()))
    with capture_logs() as lines, stream:
        stream.put(EVENT)
        async with asyncio.timeout(30):
            await several.wait()

    assert [(each["log_level"], each["stream"]) for each in lines] == [("error", "audit")]
    assert "a bug" in stream.look().text
