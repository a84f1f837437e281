"""Decides where a task of the columnar engine continues to read after an error of its broker.

Such a task reads from brokers itself. It asks here after each failure and each move of its entry, and if it does not
know the broker. The answers follow the Python client (`kera.client`): how long to wait, which broker to ask next, and
when to give up.

    failed ─► decide ─► Again(pause) ─(wait, ask the coordinator)─► broker
                  └───► Skip(to)     ─(records are lost, which is allowed)─► broker, with the losses
                  └───► End          ─(no records are left, which is allowed)
                  └───► the error

The wait happens before the answer. This process also contacts a broker that the task cannot reach, so that its client
reports the broker to the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kera.core.base.ids import Position
from kera.core.errors import KeraError, Unavailable, Uncertain, error_from_wire
from kera.spark_connector.reading.chunks import GONE, available_from, recreated
from kera.spark_connector.service.pieces import broker_as_json

if TYPE_CHECKING:
    from kera.client import Client, StreamDescription
    from kera.client.cluster.retry import RetryTime

READERS_MAX = 10_000
"""Maximum number of readers whose retry time is remembered. A forgotten reader starts with its full retry time."""
DESCRIBE_TIMEOUT_S = 2.0
"""After this time the last known description is used; if it is stale, brokers reply with an error."""
LOOK_TIMEOUT_S = 5.0
"""Maximum time for contacting a broker that does not answer."""


@dataclass(frozen=True)
class Asked:
    """A task's question."""

    reader: str
    stream: str
    stream_id: int
    streamlet: int
    entry: int
    position: Position
    end: Position | None
    fail_on_data_loss: bool
    progressed: bool
    """Whether the task received data since its last question."""
    error: KeraError | None
    """The error of the task's read; None: there was no error."""

    @staticmethod
    def of(params: Mapping[str, Any]) -> Asked:
        """Parse the question from its JSON."""
        failed, end = params.get("failed"), params.get("end")
        return Asked(
            reader=str(params["reader"]),
            stream=str(params["stream"]),
            stream_id=int(params["stream_id"]),
            streamlet=int(params["streamlet"]),
            entry=int(params["entry"]),
            position=Position(*params["position"]),
            end=None if end is None else Position(*end),
            fail_on_data_loss=bool(params["fail_on_data_loss"]),
            progressed=bool(params.get("progressed")),
            error=None if failed is None else _error(failed["error"]),
        )


def _error(document: Mapping[str, Any]) -> KeraError:
    return error_from_wire(
        str(document["code"]), str(document.get("message", "")), dict(document.get("attributes") or {})
    )


@dataclass(frozen=True)
class Again:
    """Ask the broker of the entry again after a pause."""

    pause_s: float


@dataclass(frozen=True)
class Skip:
    """Continue at a later place, because the records before it are lost."""

    to: Position
    reason: str


@dataclass(frozen=True)
class End:
    """Stop, because no more records can be read."""

    reason: str


def decide(asked: Asked, error: KeraError, patience: RetryTime, now_s: float) -> Again | Skip | End:
    """Return the next step after `error`; raises the error if it ends the task."""
    pause_s = patience.failed(error, now_s)
    if pause_s is not None:
        return Again(pause_s)
    if asked.fail_on_data_loss or not isinstance(error, GONE):
        raise error
    to = available_from(error)
    if to is None or to <= asked.position or (asked.end is not None and to >= asked.end):
        return End(error.message)
    return Skip(to, error.message)


async def pause_about(pause_s: float) -> None:
    """Wait for about `pause_s`, with jitter so that tasks do not retry all at once."""
    from kera.client.cluster.retry import jittered

    await asyncio.sleep(jittered(pause_s))


class Router:
    """Answers tasks about the streams of one cluster. Belongs to the event loop of its client."""

    def __init__(
        self, *, readers_max: int = READERS_MAX, pause: Callable[[float], Awaitable[None]] = pause_about
    ) -> None:
        self._readers_max = readers_max
        self._pause = pause
        self._patience: OrderedDict[str, RetryTime] = OrderedDict()
        """The retry time of each reader, the one that asked last at the end."""
        self._seen: dict[str, StreamDescription] = {}
        """The last known description of each stream."""
        self._looking: set[asyncio.Task[None]] = set()

    async def route(self, client: Client, asked: Asked) -> dict[str, Any]:
        """Return where the task continues, after the pause that is due; raises the error that ends the task."""
        from kera.client.cluster.asking import of_broker

        patience = self._patience_of(asked)
        if asked.progressed:
            patience.succeeded()
        reasons: list[str] = []
        error = None if asked.error is None else of_broker(asked.error)
        while True:
            try:
                if error is not None:
                    step = decide(asked, error, patience, asyncio.get_running_loop().time())
                    if isinstance(step, End):
                        return {"end": True, "lost": "; ".join([*reasons, step.reason])}
                    if isinstance(step, Skip):
                        asked = replace(asked, position=step.to)
                        reasons.append(step.reason)
                        patience.succeeded()
                    else:
                        if isinstance(error, (Unavailable, Uncertain)) and patience.attempt == 1:
                            self._look_for(client, asked)
                        await self._pause(step.pause_s)
                stream = await self._stream(client, asked, anew=error is not None)
                broker = stream.broker_of(asked.streamlet, asked.position)
                if broker is None:
                    raise Unavailable(f"the broker of stream {asked.stream!r} is not known", stream=asked.stream)
            except KeraError as failure:
                if failure is error:
                    raise
                error = failure
                continue
            answer = {"broker": broker_as_json(broker), "position": list(asked.position)}
            return answer | ({"lost": "; ".join(reasons)} if reasons else {})

    def _patience_of(self, asked: Asked) -> RetryTime:
        known = self._patience.pop(asked.reader, None)
        if known is None:
            from kera.client import ClientSettings
            from kera.client.cluster.retry import RetryTime

            known = RetryTime(ClientSettings.load())
        self._patience[asked.reader] = known
        if len(self._patience) > self._readers_max:
            self._patience.popitem(last=False)
        return known

    async def _stream(self, client: Client, asked: Asked, *, anew: bool) -> StreamDescription:
        """Return the stream, in exactly the incarnation of the question. Raises `StreamRecreated`, `UnknownStream`.

        Raises `Unavailable` if the coordinator does not answer, and the stream is not known from before.
        """
        name = asked.stream
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                known = await (client.admin.describe_stream(name) if anew else client.describe(name))
                if known.stream_id != asked.stream_id and not anew:  # the client's cache may be stale
                    known = await client.admin.describe_stream(name)
        except (TimeoutError, Unavailable, Uncertain):
            seen = self._seen.get(name)
            if seen is None or seen.stream_id != asked.stream_id:
                raise Unavailable(f"the coordinator does not say where stream {name!r} is", stream=name) from None
            return seen
        if known.stream_id != asked.stream_id:
            raise recreated(name, asked.stream_id, known.stream_id)
        self._seen[name] = known
        return known

    def _look_for(self, client: Client, asked: Asked) -> None:
        """Let the client contact the broker in the background, so that it reports a dead broker to the coordinator."""
        from kera.client import ChunkQuery

        async def look() -> None:
            query = ChunkQuery(asked.streamlet, asked.entry, asked.position, asked.position, bytes_max=0)
            with contextlib.suppress(KeraError, TimeoutError):
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    await client.locate(asked.stream, [query])

        task = asyncio.get_running_loop().create_task(look())
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)
