"""The journal of a copy into a stream: a separate stream with a record for each round (`kera.connect.planning`).

Its name is ``_connect.`` and the name of the copy, so that users can see it, protect it by rules, and delete it. A copy
continues from the last round. The other rounds show where records of the source are in the stream, to translate offsets
of consumer groups, until retention removes them. Each round is appended under its own number, and the broker takes each
number once: this decides between two processes that run the same copy.

The journal is always persisted, whatever the durability level of the target stream. If a broker loses acknowledged
chunks of the target, the next chunk is out of sequence, and the copy ends with an error. A journal that loses rounds
could not detect that.
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
"""Retention of the journal. Its rounds cover at least a hundred times as many bytes of the target."""
CHUNK_BYTES_MAX = 8 << 20
EPOCH = 1


class Journal(Protocol):
    """The store of rounds."""

    async def last(self) -> Round | None:
        """Return the last round; None: there is none yet."""
        ...

    async def add(self, added: Round) -> None:
        """Store a round. Raises `CopyElsewhere` if another process has stored one with the same number."""
        ...


def journal_stream(name: str) -> str:
    """Return the name of the stream with the journal of the copy `name`."""
    return PREFIX + name


def producer_id(name: str, journal_id: int) -> int:
    """Return the producer id of a copy. It differs for a journal that was deleted and created again.

    The numbers of such a journal restart.
    """
    digest = hashlib.blake2b(f"{journal_id} {name}".encode(), digest_size=8).digest()
    return PRODUCER_IDS.start | int.from_bytes(digest, "big")


class StreamJournal:
    """A journal in a stream; see above. `open_journal` makes it."""

    def __init__(self, client: Client, appender: Appender) -> None:
        self._client = client
        self._appender = appender

    @property
    def stream(self) -> StreamDescription:
        """The stream that has the journal."""
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
        if result.duplicate:  # it may be our own round, if the answer to the first attempt was lost
            stored = await self.last()
            if stored is None or (stored.number, stored.run) != (added.number, added.run):
                raise CopyElsewhere(
                    f"another process runs this copy: it has written round {added.number} into stream"
                    f" {self.stream.name!r}. One of them is enough; or give this one another --name"
                )


async def last_round(client: Client, stream: str) -> Round | None:
    """Return the last round in a journal; None: it has no round yet. Raises `UnknownStream`, `CopyMismatch`."""
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
    """Yield the rounds that a journal still has, in order. Raises `UnknownStream`, `CopyMismatch`."""
    async for chunk in client.read_range(stream, 0, 0, EARLIEST, None):
        for value in chunk.batch.column("value"):
            yield Round.decode(value.as_py())


async def journals_of(client: Client, stream_id: int) -> dict[str, Round]:
    """Return the copies into a stream: the last round of each, by the name of the copy.

    A journal that cannot be read is left out, because its target is unknown.
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
    """Open the journal of a copy into `target`; create it if it does not exist."""
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
