"""Readers of poisoned chunks, in a process with bounded memory.

    python -m tests.fuzz.poisoned_reader sdk|spark BOOTSTRAP

A line of JSON names the range of an entry to read. The answer is a line of JSON with the outcome.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import traceback
from collections.abc import Callable
from typing import Any

from kera.client import Client, Position, StreamDescription
from kera.client.consuming.delivering.records import records_of
from kera.core.base.ids import EntryId
from kera.core.base.telemetry import configure_logging
from kera.core.errors import KeraError
from kera.spark_connector.columns import HEADERS_COLUMN, RECORD_COLUMNS, columns_of
from kera.spark_connector.options.reading import parse_read_options
from kera.spark_connector.planning import Piece
from kera.spark_connector.portal import close_shared, shared
from kera.spark_connector.reading.partition import KeraPartition
from kera.spark_connector.reading.worker import read_partition
from tests.fuzz.chunk_targets import has_many_values

MEMORY_BYTES_MAX = 3 << 30
"""Address space of the process. A chunk that takes more is a defect."""


def read_as_sdk(bootstrap: str) -> Callable[[dict[str, Any]], int]:
    """A function that reads records one by one from the chunks of `Client.read_range`."""
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(Client.connect(bootstrap))

    async def read(asked: dict[str, Any]) -> int:
        stream, count = await client.describe(asked["stream"]), 0
        start, end = Position(*asked["start"]), Position(*asked["end"])
        async for chunk in client.read_range(stream.name, 0, 0, start, end):
            many = has_many_values(chunk.batch)
            count += chunk.batch.num_rows if many else sum(1 for _ in records_of(chunk, stream))
        return count

    return lambda asked: loop.run_until_complete(read(asked))


def read_as_spark(bootstrap: str) -> Callable[[dict[str, Any]], int]:
    """A function that reads batches as a Python worker of Spark hands them on."""
    options = {"kera.bootstrap.servers": bootstrap, "subscribe": "any"}

    def read(asked: dict[str, Any]) -> int:
        with shared(parse_read_options(options).connection) as portal:
            described: StreamDescription = portal.call(lambda client: client.describe(asked["stream"]))
        piece = Piece(
            stream=described.name,
            entry=EntryId(described.stream_id, 0, 0),
            start=Position(*asked["start"]),
            end=Position(*asked["end"]),
            first_record=asked["first_record"],
            records=asked["records"],
            length_bytes=0,
            typed=described.typed,
            broker_id=0,
            node_id="",
            fail_on_data_loss=True,
        )
        records = type(RECORD_COLUMNS)([*RECORD_COLUMNS, HEADERS_COLUMN])
        wanted = columns_of(described.schema, typed=True) if described.typed else records
        found = read_partition(parse_read_options(options), KeraPartition(piece), wanted)
        return sum(len(batch.serialize()) and batch.num_rows for batch in found)

    return read


def answer(read: Callable[[dict[str, Any]], int], asked: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a read, in words."""
    try:
        return {"outcome": "read", "records": read(asked)}
    except KeraError as error:
        return {"outcome": error.code, "message": error.message, "attributes": error.attributes}
    except Exception as error:  # noqa: BLE001 - it is reported
        return {"outcome": type(error).__name__, "message": "".join(traceback.format_exception(error))[-2_000:]}


def main(kind: str, bootstrap: str) -> None:
    """Answer each line of standard input, as the SDK or as Spark reads."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    configure_logging("critical")
    read = {"sdk": read_as_sdk, "spark": read_as_spark}[kind](bootstrap)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(read, json.loads(line)), default=str) + "\n")
        sys.stdout.flush()
    if kind == "spark":
        close_shared()


if __name__ == "__main__":
    main(*sys.argv[1:])
