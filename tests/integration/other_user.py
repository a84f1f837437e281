"""A program that tests start as root, and that continues as another user once it has loaded its modules.

It reads a stream, and searches all the memory of brokers that it has mapped. Each request is a line of JSON: ``{"read":
records}``, ``{"find": [texts]}`` in arenas that are mapped, ``{"open_arenas": true}``.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from kera.client import Client, ClientSettings
from kera.core.errors import KeraError

Answer = dict[str, Any]
OTHER_USER = 65_534


async def read(client: Client, stream: str, wanted: int, shared_memory: Any, kept: list[Any]) -> Answer:
    """Read `wanted` records; those read in place stay mapped."""
    records, in_place = 0, True
    try:
        async for chunk in client.consumer(stream, start="earliest", shared_memory=shared_memory).batches():
            kept.append(chunk)
            records += chunk.batch.num_rows
            in_place = in_place and chunk.pushed
            if records >= wanted:
                break
    except KeraError as error:
        return {"records": records, "in_place": False, "error": error.message}
    return {"records": records, "in_place": in_place, "error": ""}


def _arenas() -> list[tuple[int, int]]:
    """The first and last address of each mapped arena."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if ".arena" in line:
            start, _, end = line.split()[0].partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def find(texts: list[str]) -> Answer:
    """Whether each text is anywhere in the mapped memory."""
    arenas = _arenas()
    mapped = [ctypes.string_at(start, end - start) for start, end in arenas]
    return {"files": len(arenas), "found": [any(text.encode() in memory for memory in mapped) for text in texts]}


def open_arenas() -> Answer:
    """The number of arenas that can be opened by their names."""
    return {"opened": sum(os.access(path, os.R_OK) for path in Path("/dev/shm").glob("*.arena"))}


async def main() -> None:
    """Answer questions."""
    bootstrap, ca, stream, shared_memory = sys.argv[1:]
    settings = ClientSettings(tls_ca=Path(ca), user="alice", password=os.environ["KERA_TEST_PASSWORD"])
    kept: list[Any] = []
    async with await Client.connect(bootstrap, settings) as client:
        loaded = await read(client, stream, 1, "never", [])  # so that everything that only root can load is loaded
        assert not loaded["error"], loaded
        await asyncio.to_thread(find, [])
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    async with await Client.connect(bootstrap, settings) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            question = json.loads(line)
            if "read" in question:
                answer = await read(client, stream, question["read"], shared_memory, kept)
            elif "find" in question:
                answer = find(question["find"])
            else:
                answer = open_arenas()
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


asyncio.run(main())
