"""The journal of a copy into a stream: a stream of its own, with a record for each round (`kera.connect.planning`).

It is called ``_connect.`` and the name of the copy, so that it can be seen, protected by rules, and deleted. It has a
record for each round. A copy goes on from the last one; the others tell where records of the source are in the stream,
for offsets of consumer groups, until retention takes them. Each round is appended under its own
number, and the broker takes each number once: that is what decides between two processes that run the same copy.

It is always persisted, whatever the level of the stream it is about: should a broker lose acknowledged chunks of that,
the next one is out of sequence, and the copy ends with an error. A journal that forgets could not tell.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Protocol

import pyarrow as pa

from kera.client import EARLIEST, PRODUCER_IDS, Appender, ChunkQuery, Client, StreamDescription
from kera.connect.errors import CopyElsewhere, CopyMismatch
from kera.connect.planning.rounds import Round
from kera.core.errors import OutOfSequence, StreamExists, UnknownStream

PREFIX = "_connect."
RETENTION_BYTES = 64 << 20
"""Retention of rounds: they say where records of at least hundred times as many bytes are."""
CHUNK_BYTES_MAX = 8 << 20
EPOCH = 1


class Journal(Protocol):
    """Where rounds are kept."""

    async def last(self) -> Round | None:
        """The last one; None: there is none yet."""
        ...

    async def add(self, added: Round) -> None:
        """Keep a round. Raises `CopyElsewhere` when there is one with its number, of another process."""
        ...


def journal_stream(name: str) -> str:
    """The stream that has the journal of the copy called `name`."""
    return PREFIX + name


def producer_id(name: str, journal_id: int) -> int:
    """Under which a copy appends. A journal that was deleted and made anew has another one: its numbers begin anew."""
    digest = hashlib.blake2b(f"{journal_id} {name}".encode(), digest_size=8).digest()
    return PRODUCER_IDS.start | int.from_bytes(digest, "big")


class StreamJournal:
    """See above. Made by `open_journal`."""

    def __init__(self, client: Client, appender: Appender) -> None:
        self._client = client
        self._appender = appender

    @property
    def stream(self) -> StreamDescription:
        """That has it."""
        return self._appender.stream

    async def last(self) -> Round | None:
        """See `Journal`."""
        return await last_round(self._client, self.stream.name)

    async def add(self, added: Round) -> None:
        """See `Journal`."""
        rows = self._appender.conform(pa.record_batch({"value": pa.array([added.encode()], pa.binary())}))
        try:
            result = await self._appender.append(0, rows, added.number)
        except OutOfSequence as error:
            raise CopyElsewhere(
                f"the journal of the copy, stream {self.stream.name!r}, has lost rounds: it expects number"
                f" {error.attributes.get('expected_sequence')}, and this is {added.number}"
            ) from error
        if result.duplicate:  # our own, if the answer to a first attempt was lost
            stored = await self.last()
            if stored is None or (stored.number, stored.run) != (added.number, added.run):
                raise CopyElsewhere(
                    f"another process runs this copy: it has written round {added.number} into stream"
                    f" {self.stream.name!r}. One of them is enough; or give this one another --name"
                )


async def last_round(client: Client, stream: str) -> Round | None:
    """The last round in a journal; None: it has none yet. Raises `UnknownStream`, `CopyMismatch`."""
    bounds = (await client.bounds(stream))[0][0]
    if bounds.next_record == bounds.first_record:
        return None
    before = bounds.next_record - bounds.first_record - 1
    start = EARLIEST
    if before:
        query = ChunkQuery(0, 0, EARLIEST, bounds.end, records_max=before)
        (place,) = await client.locate(stream, [query])
        start = place.position
    last = None
    async for chunk in client.read_range(stream, 0, 0, start, bounds.end):
        last = chunk.batch.column("value")[-1].as_py()
    return None if last is None else Round.decode(last)


async def all_rounds(client: Client, stream: str) -> AsyncIterator[Round]:
    """The rounds that a journal still has, in their order. Raises `UnknownStream`, `CopyMismatch`."""
    async for chunk in client.read_range(stream, 0, 0, EARLIEST, None):
        for value in chunk.batch.column("value"):
            yield Round.decode(value.as_py())


async def journals_of(client: Client, stream_id: int) -> dict[str, Round]:
    """The copies into a stream: the last round of each, by the name of the copy.

    A journal that cannot be read is left out: nobody can tell which stream it is about.
    """
    found: dict[str, Round] = {}
    for journal in await client.admin.list_streams():
        if journal.name.startswith(PREFIX):
            with contextlib.suppress(CopyMismatch, UnknownStream):
                last = await last_round(client, journal.name)
                if last is not None and last.stream_id == stream_id:
                    found[journal.name.removeprefix(PREFIX)] = last
    return found


async def open_journal(client: Client, name: str, target: StreamDescription) -> StreamJournal:
    """The journal of a copy into `target`; it is made if there is none."""
    stream = journal_stream(name)
    try:
        found = await client.describe(stream)
    except UnknownStream:
        with contextlib.suppress(StreamExists):  # another process was faster
            await client.admin.create_stream(
                stream,
                durability="persisted",
                replication=target.config.replication,
                retention_bytes=RETENTION_BYTES,
            )
        found = await client.describe(stream)
    appender = await client.appender(
        stream,
        producer_id=producer_id(name, found.stream_id),
        producer_epoch=EPOCH,
        chunk_bytes_max=CHUNK_BYTES_MAX,
        compares=True,
    )
    return StreamJournal(client, appender)
