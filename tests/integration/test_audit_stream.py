"""The audit stream: events about access from every daemon."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client
from kera.core.access.rights import Operation
from kera.core.errors import AuthenticationFailed, NotAllowed
from kera.core.rpc import api
from kera.v1 import daemon_pb2
from tests.integration.secured_cluster import PASSWORD, SECRET, Secured
from tests.integration.support import until_found

pytestmark = pytest.mark.timeout(180)
AUDIT = "audit"


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    with contextlib.ExitStack() as stack:
        secured = Secured(tmp_path, stack, {"audit_stream": AUDIT}, brokers=1)
        await secured.make_user("admin")
        await secured.make_user("alice")
        yield secured


async def events(client: Client) -> list[dict[str, Any]]:
    async with client.consumer(AUDIT, start="earliest", end="latest") as consumer:
        return [json.loads(value) async for each in consumer.batches() for value in each.batch["value"].to_pylist()]


async def write(client: Client) -> None:
    async with client.producer() as producer:
        await producer.prepare("orders")
        await producer.send("orders", b"no")


async def test_the_audit_stream_has_failures_denials_and_changes(secured: Secured) -> None:
    async with await secured.client("admin") as admin:
        await admin.admin.create_stream("orders", streamlets=1)
        rule_id = await secured.grant("user:alice", "stream:orders", Operation.DESCRIBE)
        async with await secured.client("alice") as alice:
            with pytest.raises(NotAllowed):
                await alice.admin.delete_stream("orders")
            with pytest.raises(NotAllowed):
                await write(alice)
        settings = secured.settings(user="alice", password="not the password", retry_timeout_ms=500)
        async with await Client.connect(secured.cluster.bootstrap, settings) as client:
            with pytest.raises(AuthenticationFailed):
                await client.admin.list_streams()
        await secured.revoke(rule_id)
        await admin.admin.delete_stream("orders")

        wanted = [
            {"daemon": "coordinator", "kind": "changed", "principal": "user:admin", "operation": "CreateStream"},
            {"daemon": "coordinator", "kind": "denied", "principal": "user:alice", "operation": "delete"},
            {"daemon": "broker", "kind": "denied", "principal": "user:alice", "operation": "write"},
            {"daemon": "coordinator", "kind": "authentication_failed", "principal": "user:alice"},
            {"daemon": "coordinator", "kind": "changed", "principal": "user:admin", "operation": "DeleteStream"},
            {"daemon": "coordinator", "kind": "changed", "principal": "daemons"},
        ]

        async def all_there() -> list[dict[str, Any]] | None:
            found = await events(admin)
            there = all(any(each.items() <= event.items() for event in found) for each in wanted)
            return found if there else None

        found = await until_found(all_there)
        assert all({"time", "daemon", "host", "kind"} <= event.keys() for event in found)
        assert not any(secret in json.dumps(found) for secret in (PASSWORD, SECRET, "not the password"))
        told = await secured.ask(api.DESCRIBE_DAEMON, daemon_pb2.DescribeDaemonRequest())
        assert "audit_stream" in {check.name for check in told.checks}
