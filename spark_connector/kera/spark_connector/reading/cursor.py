"""The named cursor: how far a query is, as the cluster knows it.

It makes Spark's lag visible (``kera group describe``) and holds retention back (``retention_consumer_groups``). Queries
do not begin there, the checkpoint says where; so a cursor that could not be stored is a warning, and never ends a
query. It is stored while the next micro-batch is being read: nobody waits for that but the one that stores next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kera.core.base.ids import EntryId
from kera.core.errors import KeraError
from kera.spark_connector.planning.offsets import Offsets, StreamOffsets

if TYPE_CHECKING:
    from kera.client import Client
    from kera.spark_connector.portal import Portal

SIGN_OF_LIFE_S = 600.0
"""So often the cursor of a query to which nothing comes is stored again."""
STORE_TIMEOUT_S = 10.0
"""A query waits no longer for it."""
PAUSE_S = 10.0
"""A cursor that could not be stored is not tried again before."""

log = logging.getLogger(__name__)


class QueryCursor:
    """The cursor of one query."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._stored: Offsets | None = None
        """The cursor as it was last stored, or tried to be."""
        self._store_again_s = 0.0
        """When that may be tried again."""
        self._storing: Callable[[], dict[str, str]] | None = None
        """The outcome of the storing that may still be going on."""
        self._group = ""
        """The name that is stored under."""

    def store(self, portal: Portal, group: str, done: Offsets, *, unnamed: bool) -> None:
        """Begin to store `done` under the name `group`, unless it was stored not long ago.

        `unnamed`: nobody has chosen the name, and the cluster forgets it when nothing was stored for long.
        """
        done = replace(done, since=None)
        if done == self._stored and self._now_s() < self._store_again_s:
            return
        self.finish()
        self._group, self._stored, self._store_again_s = group, done, self._now_s() + SIGN_OF_LIFE_S
        self._storing = portal.begin(lambda client: store(client, group, done, unnamed=unnamed))

    def finish(self) -> None:
        """Wait for what is being stored."""
        if self._storing is None:
            return
        storing, self._storing = self._storing, None
        try:
            failures = storing()
        except KeraError as error:
            failures = {"": error.message}
        if failures:
            self._store_again_s = self._now_s() + PAUSE_S
        for stream, reason in failures.items():
            log.warning("cursor '%s' of stream '%s' was not stored, the query goes on: %s", self._group, stream, reason)


async def store(
    client: Client, group: str, offsets: Offsets, *, unnamed: bool, timeout_s: float = STORE_TIMEOUT_S
) -> dict[str, str]:
    """Store `offsets` under the name `group`; gives the streams where that failed, with the reason."""

    async def commit(stream: str, of_stream: StreamOffsets) -> None:
        positions = {
            EntryId(of_stream.stream_id, streamlet, entry): offset.position
            for streamlet, entries in of_stream.streamlets.items()
            for entry, offset in enumerate(entries)
        }
        async with asyncio.timeout(timeout_s):
            await client.commit(group, stream, positions, unnamed=unnamed)

    outcomes = await asyncio.gather(*(commit(*item) for item in offsets.streams.items()), return_exceptions=True)
    failures = {}
    for stream, outcome in zip(offsets.streams, outcomes, strict=True):
        if isinstance(outcome, TimeoutError):
            failures[stream] = f"no answer within {timeout_s:.0f} s"
        elif isinstance(outcome, KeraError):
            failures[stream] = outcome.message
        elif outcome is not None:
            raise outcome
    return failures
