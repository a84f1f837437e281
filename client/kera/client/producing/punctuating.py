"""Punctuations: a producer declares that no record older than a time will follow; brokers write it into all entries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kera.client.cluster.asking import ask_broker, broker_failed, same_stream
from kera.client.cluster.batches import CURSORS_MAX, batched
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.retry import retrying
from kera.client.types import StreamDescription
from kera.core.errors import KeraError, ProtocolError
from kera.core.rpc import api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2, common_pb2

TIMESTAMP_US_MAX = (1 << 63) - 1


class Punctuated(NamedTuple):
    """The result of a punctuation."""

    entries: int
    """Number of entries that have reached the time by now: nothing was ever written to the others."""
    written: int
    """Number of entries with a new punctuation, as far as brokers have answered; the other entries had got so far."""


async def punctuate(
    cluster: Cluster,
    known: StreamDescription,
    timestamp_us: int,
    durability: common_pb2.Durability.ValueType = common_pb2.DURABILITY_UNSPECIFIED,
) -> Punctuated:
    """Have a punctuation written in all streamlets of a stream. Repeats failed requests: a repeat does no harm.

    Raises the errors of `Producer.punctuate`.
    """
    left = set(range(known.config.streamlets))
    entries = written = 0

    async def ask(stream: StreamDescription, broker_id: int, streamlets: Sequence[int]) -> None:
        nonlocal entries, written
        request = broker_pb2.PunctuateRequest(
            stream_id=stream.stream_id, streamlet_ids=streamlets, timestamp_us=timestamp_us, durability=durability
        )
        answer = await ask_broker(cluster, stream, broker_id, api.PUNCTUATE, request)
        if len(answer.streamlets) != len(streamlets):
            raise ProtocolError(f"{len(answer.streamlets)} answers for {len(streamlets)} streamlets")
        done = [each for each in answer.streamlets if not each.HasField("error")]
        entries, written = entries + sum(each.entries for each in done), written + sum(each.written for each in done)
        errors = [error_from_message(each.error) if each.HasField("error") else None for each in answer.streamlets]
        left.difference_update(each for each, error in zip(streamlets, errors, strict=True) if error is None)
        _raise_worst(errors)

    async def attempt() -> None:
        stream = same_stream(await cluster.stream(known.name), known.stream_id)
        of_brokers: dict[int, list[int]] = {}
        for streamlet in sorted(left):
            of_brokers.setdefault(stream.assignments[streamlet].broker_id, []).append(streamlet)
        asked = [
            ask(stream, broker_id, some)
            for broker_id, streamlets in of_brokers.items()
            for some in batched(streamlets, max(1, CURSORS_MAX // stream.config.entries))
        ]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        try:
            _raise_worst(errors)
        except KeraError as error:
            raise broker_failed(cluster, known.name, error) from error

    while left:
        await retrying(attempt, cluster.settings)
    return Punctuated(entries, written)


def _raise_worst(errors: Sequence[BaseException | None]) -> None:
    """Raise the first error that is final, or else the first one that can be retried, if there is any."""
    found = [error for error in errors if error is not None]
    final = (error for error in found if not (isinstance(error, KeraError) and error.retriable))
    worst = next(final, found[0] if found else None)
    if worst is not None:
        raise worst
