"""A consumer of a consumer group, in a process of its own: it reports the records that it takes, commits them, and
reports that.

``python -m tests.integration.group_worker '{"bootstrap": …, "consumer_group": …, "stream": …}'``; each line that it
prints is an event. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from kera.client import Client, GroupConsumer, GroupConsumerSettings
from kera.core.base.process import die_with_parent
from kera.core.errors import LeaseLost

COMMIT_INTERVAL_S = 0.1


def say(**event: Any) -> None:
    """Print an event; flush it before anything else happens."""
    print(json.dumps(event), flush=True)  # noqa: T201 - it is what the test reads


async def consume(task: dict[str, Any]) -> None:
    """Take and commit until cancelled; then commit and leave."""
    settings = GroupConsumerSettings.load(**{"commit_interval_ms": 0, **task.get("settings", {})})
    async with (
        await Client.connect(task["bootstrap"]) as client,
        client.group_consumer(task["consumer_group"], [task["stream"]], settings=settings) as consumer,
    ):
        say(ready=True)
        committing = asyncio.create_task(commit(consumer))
        try:
            await take(consumer)
        finally:
            committing.cancel()
            await asyncio.wait([committing])
            await commit_once(consumer)


async def take(consumer: GroupConsumer) -> None:
    """Take chunks, for ever."""
    while True:
        try:
            async for chunk in consumer.batches():
                place = chunk.entry.streamlet_id, chunk.entry.entry, chunk.header.first_record
                say(taken=[*place, chunk.batch.num_rows])
        except LeaseLost:
            say(lost=True)


async def commit(consumer: GroupConsumer) -> None:
    """Commit what was taken, from time to time."""
    while True:
        await asyncio.sleep(COMMIT_INTERVAL_S)
        await commit_once(consumer)


async def commit_once(consumer: GroupConsumer) -> None:
    """The commit does not include records that are taken meanwhile."""
    say(committing=True)
    try:
        await consumer.commit()
    except LeaseLost:
        say(lost=True)
    else:
        say(committed=True)


async def work(task: dict[str, Any]) -> None:
    """Consume until standard input ends."""
    consuming = asyncio.create_task(consume(task))
    stopped = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait({consuming, stopped}, return_when=asyncio.FIRST_COMPLETED)
    consuming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await consuming


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(work(json.loads(sys.argv[1])))
