"""The patterns of docs/patterns.md, run as they are written."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kera.client import Client, Headers, Record
from kera.local.cluster import RunningCluster
from tests.docs_examples import ROOT, examples

TIMEOUT_S = 60


def defined(bootstrap: str) -> dict[str, Any]:
    """The names that the page defines, for this cluster."""
    names: dict[str, Any] = {}
    for example in examples(ROOT / "docs" / "patterns.md", "python"):
        text = example.text.replace("127.0.0.1:7400", bootstrap)
        exec(compile(text, str(example), "exec", dont_inherit=True), names)
    return names


async def post(app: Any, path: str, body: bytes) -> int:
    """The status of the response to a request, made as a server makes it."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "app": app}
    await app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_the_patterns_of_a_web_endpoint_and_a_worker_work(cluster: RunningCluster) -> None:
    names = defined(cluster.bootstrap)
    async with asyncio.timeout(TIMEOUT_S), await Client.connect(cluster.bootstrap) as client:
        for stream in ("clicks", "clicks-failed"):
            await client.admin.create_stream(stream)
        app = names["app"]
        async with app.router.lifespan_context(app):
            assert [await post(app, "/clicks", b"%d" % number) for number in range(5)] == [201] * 5

        stop, seen, failing = asyncio.Event(), list[bytes](), 0
        async with client.producer() as producer:
            await producer.prepare("clicks-failed")

            async def handle(record: Any) -> None:
                nonlocal failing
                if record.value == b"3":
                    failing += 1
                    raise ValueError(record.value)
                seen.append(record.value)

            async def handle_all(record: Any) -> None:
                await names["handle_or_put_aside"](producer, handle, record)
                if len(seen) == 4 and failing:
                    stop.set()

            await names["work"](client, handle_all, stop)
        assert sorted(seen) == [b"0", b"1", b"2", b"4"]
        assert failing == 3
        async with client.consumer("clicks-failed", start="earliest", end="latest") as consumer:
            (failed,) = [record async for record in consumer]
        assert (failed.value, failed.headers["from"]) == (b"3", b"clicks/0/3")
        lag = await client.admin.describe_consumer_group("workers")
        assert not lag.members, "the worker has left"


async def test_a_postponed_record_is_retried_when_it_is_due(cluster: RunningCluster) -> None:
    names = defined(cluster.bootstrap)
    async with asyncio.timeout(TIMEOUT_S), await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("clicks-retry")
        stop, early = asyncio.Event(), list[bool]()
        async with client.producer() as producer:
            await producer.prepare("clicks-retry")

            async def handle(record: Any) -> None:
                early.append(names["time"].time() * 1000 < int(record.headers["due-ms"]))
                stop.set()

            failed = Record("clicks", 0, 0, 0, 0, b"user-1", (b"user-1",), b"home", Headers({"trace": b"7"}), None)
            await names["put_off"](producer, failed, 0.2)
            await names["retry"](client, handle, stop)
        assert early == [False]
        async with client.consumer("clicks-retry", start="earliest", end="latest") as consumer:
            (retried,) = [record async for record in consumer]
        assert (retried.value, retried.key, retried.headers["trace"]) == (b"home", b"user-1", b"7")


async def test_a_table_is_rebuilt_from_its_changes(cluster: RunningCluster) -> None:
    names = defined(cluster.bootstrap)
    changes: list[tuple[str, str, Any]] = [
        ("r", "1", {"id": 1, "amount": 10}),
        ("t", "", None),
        *(("c", f"{key}", {"id": key, "amount": 20}) for key in range(2, 8)),
        ("u", "3", {"id": 3, "amount": 30}),
        ("d", "2", None),
    ]
    async with asyncio.timeout(TIMEOUT_S), await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("orders", streamlets=2)
        async with client.producer() as producer:
            await producer.prepare("orders")
            for op, key, after in changes:
                value = json.dumps({"op": op, "before": None, "after": after}).encode()
                # A truncation has no key, and is in every streamlet.
                for where in ({"streamlet": 0}, {"streamlet": 1}) if op == "t" else ({"keys": key.encode()},):
                    await producer.send("orders", value, **where)
            await producer.send("orders", None, keys=b"2")  # a tombstone

        assert await names["table_now"](client) == {
            b"3": {"id": 3, "amount": 30},
            **{b"%d" % key: {"id": key, "amount": 20} for key in range(4, 8)},
        }
