"""The named cursor: how far a query is, as the cluster knows it.

It makes Spark's lag visible (``kera group describe``) and holds retention back (``retention_consumer_groups``). Queries
do not begin there, the checkpoint says where; so a cursor that could not be stored is a warning, and never ends a
query.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kera.core.errors import KeraError
from kera.core.ids import EntryId
from kera.spark_connector.offsets import Offsets, StreamOffsets

if TYPE_CHECKING:
    from kera.client import Client

SIGN_OF_LIFE_S = 600.0
"""So often the cursor of a query to which nothing comes is stored again."""
STORE_TIMEOUT_S = 10.0
"""A query waits no longer for it."""


async def store(client: Client, group: str, offsets: Offsets, *, unnamed: bool) -> dict[str, str]:
    """Store `offsets` under the name `group`; gives the streams where that failed, with the reason.

    `unnamed`: nobody has chosen the name, and the cluster forgets it when nothing was stored for long.
    """

    async def commit(stream: str, of_stream: StreamOffsets) -> None:
        positions = {
            EntryId(of_stream.stream_id, streamlet, entry): offset.position
            for streamlet, entries in of_stream.streamlets.items()
            for entry, offset in enumerate(entries)
        }
        async with asyncio.timeout(STORE_TIMEOUT_S):
            await client.commit(group, stream, positions, unnamed=unnamed)

    outcomes = await asyncio.gather(*(commit(*item) for item in offsets.streams.items()), return_exceptions=True)
    failures = {}
    for stream, outcome in zip(offsets.streams, outcomes, strict=True):
        if isinstance(outcome, TimeoutError):
            failures[stream] = f"no answer within {STORE_TIMEOUT_S:.0f} s"
        elif isinstance(outcome, KeraError):
            failures[stream] = outcome.message
        elif outcome is not None:
            raise outcome
    return failures
