"""The driver's survey of the streams: one request each, a bounded concurrency, and errors in the user's terms."""

import asyncio
import json
from typing import Any

import pytest

from kera.client import ChunkPlace, ChunkQuery, EntryBounds
from kera.core.errors import InvalidArgument, InvalidCursor, SchemaMismatch, UnknownStream
from kera.spark_connector.columns import RECORD_COLUMNS, columns_of
from kera.spark_connector.options.reading import ReadOptions, parse_read_options
from kera.spark_connector.planning import next_ends, resolve
from kera.spark_connector.planning.admission import EntryShare
from kera.spark_connector.planning.offsets import EntryName, EntryOffset
from kera.spark_connector.planning.places import Where
from kera.spark_connector.reading.survey import (
    SIDE_BY_SIDE_MAX,
    boundaries,
    resolve_places,
    survey,
    tell_skipped,
    with_columns,
)
from tests.unit.spark_connector.fakes import SCHEMA, FakeClient, FakeStream, at


def options(**given: str) -> ReadOptions:
    return parse_read_options({"kera.bootstrap.servers": "h:1", **given})


class CountingClient(FakeClient):
    """Counts the requests, and how many of them run at the same time."""

    def __init__(self) -> None:
        super().__init__({0: [[1]]})
        self.asked: list[str] = []
        self.at_once = self.at_once_max = 0

    async def list_streams(self) -> list[Any]:
        self.asked.append("list")
        return await super().list_streams()

    async def bounds(self, stream: str, *, promise: bool = False) -> dict[int, list[EntryBounds]]:
        self.asked.append(f"bounds of {stream}")
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        try:
            await asyncio.sleep(0)  # sleep: lets the others begin
            return await super().bounds(stream, promise=promise)
        finally:
            self.at_once -= 1

    async def locate(self, stream: str, queries: Any) -> list[ChunkPlace]:
        self.asked.append(f"locate in {stream}")
        return await super().locate(stream, queries)


async def test_streams_are_surveyed_concurrently_up_to_a_limit() -> None:
    client = CountingClient()
    client.streams = {f"s{number}": FakeStream(number, {0: [[1]]}) for number in range(3 * SIDE_BY_SIDE_MAX)}

    now = await survey(client, options(subscribePattern="s.*").subscription)  # type: ignore[arg-type]

    assert list(now) == sorted(client.streams)
    assert client.at_once_max == SIDE_BY_SIDE_MAX
    assert len(client.asked) == 1 + len(client.streams)


async def test_named_streams_are_not_listed_unless_one_is_missing() -> None:
    client = CountingClient()
    client.streams["other"] = FakeStream(8, {0: [[1]]})
    await survey(client, options(subscribe="numbers").subscription, begins=True)  # type: ignore[arg-type]
    assert client.asked == ["bounds of numbers"]

    named = options(subscribe="numbers,ohter").subscription
    assert list(await survey(client, named)) == ["numbers"]  # type: ignore[arg-type]
    with pytest.raises(UnknownStream, match=r"ohter.*other"):
        await survey(client, named, begins=True)  # type: ignore[arg-type]


async def test_only_assigned_streamlets_are_surveyed() -> None:
    client = FakeClient({0: [[1]], 1: [[2]], 2: [[3]]})

    now = await survey(client, options(assign='{"numbers": [2, 0]}').subscription)  # type: ignore[arg-type]

    assert {streamlet: entries[0].next_record for streamlet, entries in now["numbers"].bounds.items()} == {0: 1, 2: 3}


async def test_all_boundaries_of_a_stream_are_one_request_and_the_smaller_share_applies() -> None:
    client = CountingClient()
    client.chunks = {0: [[2] * 10], 1: [[2] * 10]}
    subscription = options(subscribe="numbers").subscription
    now = await survey(client, subscription)  # type: ignore[arg-type]
    start = resolve(Where("startingOffsets", "earliest"), now, {}, now_us=0, fail_on_data_loss=True)
    advance = next_ends(start, now, fail_on_data_loss=True)
    client.asked.clear()
    shares = {EntryName("numbers", 0, 0): EntryShare(8, 64 * 3), EntryName("numbers", 1, 0): EntryShare(5, None)}

    found = await boundaries(client, advance, shares)  # type: ignore[arg-type]

    assert found == {
        EntryName("numbers", 0, 0): EntryOffset(at(3), 6),
        EntryName("numbers", 1, 0): EntryOffset(at(2), 4),
    }
    assert client.asked == ["locate in numbers"]


async def test_the_error_for_an_invalid_position_names_its_option() -> None:
    class Strict(FakeClient):
        async def locate(self, stream: str, queries: Any) -> list[ChunkPlace]:  # noqa: ARG002
            query: ChunkQuery
            for query in queries:
                raise InvalidCursor(f"{tuple(query.start)} is not a start of a chunk")
            return []

    client = Strict({0: [[2, 2]]})
    given = options(subscribe="numbers", startingOffsets=json.dumps({"numbers": {"0": [[1, 1, 7]]}}))
    now = await survey(client, given.subscription)  # type: ignore[arg-type]

    with pytest.raises(InvalidArgument, match=r"option startingOffsets: .*\(1, 1, 7\)"):
        await resolve_places(client, given.batch_starting, now, now_us=0, fail_on_data_loss=True)  # type: ignore[arg-type]


async def test_streams_without_the_columns_are_an_error_or_skipped_or_read_as_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeClient({0: [[1]]})
    client.streams["others"] = FakeStream(8, {0: [[1]]}, typed=False)
    now = await survey(client, options(subscribePattern=".*").subscription)  # type: ignore[arg-type]
    wanted = columns_of(SCHEMA, typed=True)

    with pytest.raises(SchemaMismatch, match=r"stream 'others' has no column 'n'.*onSchemaMismatch"):
        with_columns(wanted, now, "fail")
    found, skipped = with_columns(wanted, now, "skip")
    assert (list(found), list(skipped)) == (["numbers"], ["others"])
    found, skipped = with_columns(RECORD_COLUMNS, now, "bytes")
    assert (list(found), skipped) == (["numbers", "others"], {})

    told: set[str] = set()
    for _ in range(2):
        tell_skipped({"others": "it has no column 'n'"}, told)
    (warning,) = caplog.records
    assert warning.getMessage() == "onSchemaMismatch=skip: stream 'others' is not read: it has no column 'n'"
