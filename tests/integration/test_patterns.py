"""The patterns of docs/patterns.md, run as they are written."""

from __future__ import annotations

import asyncio
from typing import Any

from kera.client import Client
from kera.local.cluster import RunningCluster
from tests.docs_examples import ROOT, examples

TIMEOUT_S = 60


def defined(bootstrap: str) -> dict[str, Any]:
    """What the page defines, for this cluster."""
    names: dict[str, Any] = {}
    for example in examples(ROOT / "docs" / "patterns.md", "python"):
        text = example.text.replace("127.0.0.1:7400", bootstrap)
        exec(compile(text, str(example), "exec", dont_inherit=True), names)
    return names


async def post(app: Any, path: str, body: bytes) -> int:
    """The status of the answer to a request, asked as a server asks."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "app": app}
    await app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_the_patterns_do_what_they_say(cluster: RunningCluster) -> None:
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
