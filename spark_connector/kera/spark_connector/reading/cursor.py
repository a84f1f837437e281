"""The named cursor, which stores the progress of a query in the cluster.

It makes Spark's lag visible (``kera group describe``) and holds retention back (``retention_consumer_groups``). A query
begins at its checkpoint and not at the cursor, so a failure to store the cursor is only a warning, and never ends a
query. The cursor is stored while the next micro-batch is being read; only the next attempt to store it waits for that.
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
"""Interval at which a query without new records stores its cursor again."""
STORE_TIMEOUT_S = 10.0
"""Maximum time that a query waits for its cursor to be stored."""
PAUSE_S = 10.0
"""Pause before the same cursor is stored again after a failure."""

log = logging.getLogger(__name__)


class QueryCursor:
    """The cursor of one query."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._stored: Offsets | None = None
        """The offsets of the last attempt to store the cursor."""
        self._store_again_s = 0.0
        """When the same offsets may be stored again."""
        self._storing: Callable[[], dict[str, str]] | None = None
        """Waits for the outcome of the last attempt, which may still be under way."""
        self._group = ""
        """The cursor's name in the last attempt."""

    def store(self, portal: Portal, group: str, done: Offsets, *, unnamed: bool) -> None:
        """Begin to store `done` under the name `group`, unless it was stored not long ago.

        `unnamed`: the name was generated, so the cluster forgets it when nothing was stored for long.
        """
        done = replace(done, since=None)
        if done == self._stored and self._now_s() < self._store_again_s:
            return
        self.finish()
        self._group, self._stored, self._store_again_s = group, done, self._now_s() + SIGN_OF_LIFE_S
        self._storing = portal.begin(lambda client: store(client, group, done, unnamed=unnamed))

    def finish(self) -> None:
        """Wait until the cursor is stored, and log failures as warnings."""
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
    """Store `offsets` under the name `group`. Return the streams for which that failed, with the reasons."""

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
