"""Gets the state of a cluster, for commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kera.cli._client import connected

if TYPE_CHECKING:
    from kera.client.diagnosis.asking import Picture


async def look(bootstrap: str) -> Picture:
    """Ask the coordinators at `bootstrap`. Raises `KeraError` when the leading one cannot be reached."""
    from kera.client.diagnosis.asking import look_with

    async with connected(bootstrap, patient=False) as client:
        streams = await client.admin.list_streams()
        return await look_with(client, streams, coordinator=bootstrap.partition(",")[0])
