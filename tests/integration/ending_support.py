"""Programs that end in some way with a client open, as processes of their own; and what they have stored."""

import asyncio
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from kera.client import Client
from kera.local.cluster import RunningCluster

TIMEOUT_S = 60.0
WARNING = "import warnings; warnings.simplefilter('default', ResourceWarning)\n"
"""The effect of an interpreter option; with the option itself, tests/forked_programs.py would not fork the program."""


class Ended(NamedTuple):
    """How a program has ended."""

    code: int
    said: str
    errors: str


async def run_program(program: str, cluster: RunningCluster, stream: str, *options: str, create: bool = True) -> Ended:
    """Run `program` with a stream, by default a new one: its arguments are the cluster's address and the stream's
    name.
    """
    if create:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream(stream)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *options,
        "-c",
        WARNING + textwrap.dedent(program),
        cluster.bootstrap,
        stream,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"NO_COLOR": "1"},
        cwd=Path(__file__).parents[2],
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            said, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        _, errors = await process.communicate()
        raise TimeoutError(f"the program does not end: {errors.decode()}") from None
    assert process.returncode is not None
    return Ended(process.returncode, said.decode(), re.sub(r"\x1b\[[0-9;]*m", "", errors.decode()))


async def stored(cluster: RunningCluster, stream: str) -> list[bytes | None]:
    """The values of a stream, in order."""
    async with (
        asyncio.timeout(TIMEOUT_S),
        await Client.connect(cluster.bootstrap) as client,
        client.consumer(stream, start="earliest", end="latest") as consumer,
    ):
        return [record.value async for record in consumer]
