"""Helpers of the producer's tests: batches of values, and waiting in bounded time."""

import asyncio
from typing import Any

import pyarrow as pa

from tests.unit.client.support import WAIT_S


def batch(*values: bytes, **columns: Any) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary()), **columns})


async def give(awaitable: Any) -> Any:
    """The result of the awaitable, in bounded time."""
    async with asyncio.timeout(WAIT_S):
        return await awaitable
