"""Pushed records are not copied: the short form of ``python -m bench.push_loop``."""

import asyncio
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
async def test_pushed_records_are_neither_copied_nor_kept_leased() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.push_loop", "--bytes", "1GB", "--stream-bytes", "32MiB"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    figures, said = await process.communicate()
    assert process.returncode == 0, said.decode()  # it fails when a byte was copied, or slots stay leased
    assert "copied for reads, says the broker | 0 | 0-0" in figures.decode()
    assert "in the mapped arena, at the consumer | 1 | 1-1" in figures.decode()
