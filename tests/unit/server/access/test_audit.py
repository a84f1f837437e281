"""Audit events: when they are written, and their contents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.core.access.audit_events import AuditEvent
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.base.settings import InvalidSettings
from kera.core.errors import Unavailable
from kera.core.rpc import api
from kera.core.rpc.method import Call, Reply
from kera.core.runtime import Runtime
from kera.server.access.audit import REPEATED_S, TOLD_MAX, Audit
from kera.server.access.guard import Guard
from kera.server.access.requirements import CHANGES, REQUIREMENTS, Who
from kera.server.access.settings import DaemonAccessSettings, guard_of
from kera.v1 import broker_pb2, coordinator_pb2
from tests.unit.core.access.support import STREAMS, Now, authenticator, peer, rule, table, user


def audit_of(now: Now) -> tuple[Audit, list[AuditEvent]]:
    events: list[AuditEvent] = []
    return Audit(now, events.append), events


def test_each_event_names_the_principal_and_the_action() -> None:
    audit, events = audit_of(Now())
    audit.authentication_failed("10.0.0.9:1", "grpc", "the password is not right", user="alice")
    audit.authentication_failed("10.0.0.9:1", "grpc", "the token is not known")
    audit.denied_to("user:alice", "10.0.0.9:1", "read", "stream:orders", "no rule allows it")
    audit.changed_by("user:admin", "10.0.0.9:2", "grant", rule_id=7, operations=["read"])
    audit.done_by("user:admin", "10.0.0.9:2", "DeleteStream", "stream:orders")

    assert [event[:-1] for event in events] == [
        ("authentication_failed", "user:alice", "10.0.0.9:1", "grpc", "", ""),
        ("authentication_failed", "", "10.0.0.9:1", "grpc", "", ""),
        ("denied", "user:alice", "10.0.0.9:1", "", "read", "stream:orders"),
        ("changed", "user:admin", "10.0.0.9:2", "", "grant", ""),
        ("changed", "user:admin", "10.0.0.9:2", "", "DeleteStream", "stream:orders"),
    ]
    assert json.loads(events[3].reason) == {"rule_id": 7, "operations": ["read"]}


def test_a_repeated_event_is_written_once_in_a_while() -> None:
    now = Now()
    audit, events = audit_of(now)
    for _ in range(100):
        audit.denied_to("user:alice", "10.0.0.9:1", "read", "stream:orders", "no rule allows it")
        audit.done_by("user:admin", "10.0.0.9:2", "Drain", "cluster")
    assert len(events) == 2
    now.s += 11
    audit.done_by("user:admin", "10.0.0.9:2", "Drain", "cluster")
    assert len(events) == 3


def test_events_about_ever_new_names_are_limited() -> None:
    now = Now()
    audit, events = audit_of(now)
    with capture_logs() as lines:
        for number in range(1000):
            audit.authentication_failed("10.0.0.9:1", "grpc", "the password is not right", user=f"guess{number}")
            audit.denied_to("user:alice", "10.0.0.9:1", "read", f"stream:guess{number}", "no rule allows it")
        assert len(lines) == len(events) == 2 * TOLD_MAX
        now.s += REPEATED_S
        audit.authentication_failed("10.0.0.9:1", "grpc", "the password is not right", user="bob")
        audit.changed_by("user:admin", "10.0.0.9:2", "grant", rule_id=7)
    assert [line.get("untold") for line in lines[-2:]] == [1000 - TOLD_MAX, None]
    assert f"{1000 - TOLD_MAX} earlier ones of this kind" in events[-2].reason
    assert (audit.failed, audit.denied) == (1001, 1000)


def test_texts_of_peers_are_shortened_in_events() -> None:
    """Otherwise each refusal, remembered for a while, takes as much memory and log as a request has bytes."""
    audit, events = audit_of(Now())
    for number in range(10):
        audit.authentication_failed("10.0.0.9:1", "grpc", "no such user", user=f"{number}{'x' * 500_000}")
        audit.denied_to("user:alice", "10.0.0.9:1", "create", f"stream:{number}{'x' * 500_000}", "no rule allows it")
        audit.done_by("user:alice", "10.0.0.9:1", "DeleteStream", f"stream:{number}{'x' * 500_000}")

    assert len(events) == 30
    assert max(len(text) for event in events for text in event) < 300
    assert max(len(text) for what in audit._told for text in what) < 300


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_change_is_an_event_only_after_it_succeeded(later: bool, fails: bool) -> None:
    audit, events = audit_of(Now())
    door = Guard(authenticator(Now()), audit, name_of=STREAMS.get)
    door.apply(table(users=[user("bob")], rules=[rule("user:bob", "stream:*", Operation.DELETE)]), 1)

    def answer() -> Reply[Any]:
        if fails:
            raise Unavailable("not now")
        return Reply(coordinator_pb2.DeleteStreamResponse())

    async def answer_later() -> Reply[Any]:
        return answer()

    def delete(_: Call[Any]) -> Any:
        return answer_later() if later else answer()

    async def truncate(_: Call[Any]) -> Reply[Any]:
        return Reply(broker_pb2.TruncateStreamletsResponse())

    served = door.guarded({api.DELETE_STREAM: delete, api.TRUNCATE_STREAMLETS: truncate})
    bob = peer(Identity("bob"))
    request = coordinator_pb2.DeleteStreamRequest(name="orders")
    try:
        await served[api.DELETE_STREAM](Call(request, memoryview(b""), bob))  # type: ignore[misc]
    except Unavailable:
        assert fails
    by_id = broker_pb2.TruncateStreamletsRequest()
    by_id.cursors.add(stream_id=8)
    await served[api.TRUNCATE_STREAMLETS](Call(by_id, memoryview(b""), bob))  # type: ignore[misc]

    done = [AuditEvent("changed", "user:bob", bob.address, "", "DeleteStream", "stream:orders")]
    expected = AuditEvent("changed", "user:bob", bob.address, "", "TruncateStreamlets", "stream:payments")
    assert events == [*([] if fails else done), expected]


def test_all_audited_methods_are_for_identified_users() -> None:
    assert all(REQUIREMENTS[method].who is Who.IDENTIFIED for method in CHANGES)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"security": True, "audit_stream": "audit"}, "run with kera"),
        ({"security": False, "audit_stream": "audit"}, "needs security"),
        ({"security": True, "audit_stream": "audit/events"}, "a stream cannot be called 'audit/events'"),
        ({"security": True, "audit_stream": ".."}, "a stream cannot be called '..'"),
    ],
)
def test_a_daemon_that_cannot_write_its_events_does_not_start(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSettings, match=why):
        guard_of(DaemonAccessSettings(**settings), Runtime(), daemon="broker")
