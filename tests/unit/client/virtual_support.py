"""A producer and its broker on a loop with virtual time."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from kera.core.base.clock import Clock
from tests.unit.client.support import FakeCluster, Fault, stream_info
from tests.virtual_loop import run_virtually


class Ways:
    """A broker that answers after a while, and the times when requests were sent to it."""

    def __init__(self, directory: Path, streamlets: int, answers_after_s: float) -> None:
        self.cluster = FakeCluster(directory, stream_info(streamlets=streamlets), slots=max(64, streamlets + 16))
        self._loop = asyncio.get_running_loop()
        self.sent_s: list[float] = []
        loopback = self.cluster.loopback
        loopback.default_fault = Fault.HELD
        submit = loopback.submit

        def submitted(*arguments: Any, **options: Any) -> Any:
            writes = len(loopback.writes)
            future = submit(*arguments, **options)
            if len(loopback.writes) > writes:
                self.sent_s.append(self._loop.time())
                self._loop.call_later(answers_after_s, self._answer)
            return future

        loopback.submit = submitted  # type: ignore[method-assign]

    def _answer(self) -> None:
        self.cluster.loopback.held.pop(0)()


def virtually(
    streamlets: int,
    answers_after_s: float,
    main: Callable[[Ways, Producer], Any],
    *,
    clock: Clock | None = None,
    **options: Any,
) -> tuple[Ways, Any]:
    """The result of `main`. `clock` is the producer's, None the machine's; `options` are settings of the producer."""

    async def run(directory: str) -> tuple[Ways, Any]:
        ways = Ways(Path(directory), streamlets, answers_after_s)
        try:
            async with Producer(ways.cluster, ProducerSettings(**options), clock) as producer:  # type: ignore[arg-type]
                await producer.prepare("s")
                for value in (b"the first one connects", b"the second one says how long an answer takes"):
                    await producer.send("s", value, streamlet=0)
                return ways, await main(ways, producer)
        finally:
            ways.cluster.arena.close()

    with tempfile.TemporaryDirectory() as directory:
        return run_virtually(run(directory))
