"""Copies by ``kera connect`` into a stream with ``--value avro`` and ``--value json``, beside one with columns.

* ``columns``: a Parquet file of `--records` rows becomes a stream with the same columns;
* ``rows to avro``, ``rows to json``: its rows become values, with a schema that is derived from the columns;
* ``json to avro``, ``json to json``: a stream of JSON becomes one of encoded values, with the schemas of the former.

Each copy is a process of its own, timed from its first event to its last, so without its start. ``cpu`` is the
processor time of the whole process, which does not depend on other load of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.common import directory, parser, say
from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster

START_US = 1_767_225_600_000_000


def table(records: int) -> pa.Table:
    """Orders: five nullable columns."""
    numbers = range(records)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "at": pa.array([START_US + number for number in numbers], pa.timestamp("us", "UTC")),
            "name": pa.array([f"customer {number}" for number in numbers], pa.string()),
            "price": pa.array([Decimal(number) / 100 for number in numbers], pa.decimal128(12, 2)),
            "count": pa.array([number % 7 for number in numbers], pa.int32()),
        }
    )


def write_json(records: int, path: Path) -> None:
    """Write records without columns, whose values are these orders as JSON."""
    values = [
        json.dumps(
            {
                "id": number,
                "at": "2026-01-01T00:00:00Z",
                "name": f"customer {number}",
                "price": f"{number / 100:.2f}",
                "count": number % 7,
            }
        ).encode()
        for number in range(records)
    ]
    pq.write_table(pa.table({"value": pa.array(values, pa.binary())}), path)


def copy(bootstrap: str, records: int, what: str, *arguments: str) -> None:
    """Run a copy to its end, and report its speed."""
    command = [sys.executable, "-m", "kera.cli", "connect", "copy", "--json", "--create", "-b", bootstrap, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if process.stdout is None:
        raise AssertionError("no pipe")
    process.stdout.readline()
    begun_s = time.monotonic()
    *_, last = process.stdout
    seconds = time.monotonic() - begun_s
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or json.loads(last)["records"] != records:
        raise AssertionError(f"the copy {what} failed: {last}")
    cpu_s = used.ru_utime + used.ru_stime
    say(f"{what:>14}: {seconds:7.1f} s  {records / seconds:10,.0f} records/s  cpu {cpu_s:6.1f} s")


async def measure(records: int, folder: Path) -> None:
    """Run each copy once."""
    rows, values = folder / "rows.parquet", folder / "json.parquet"
    pq.write_table(table(records), rows)
    write_json(records, values)
    async with LocalCluster(data_dir=folder / "kera", arena_bytes=512 * MIB) as cluster:
        for what, *arguments in (
            ("columns", str(rows), "kera:columns"),
            ("rows to avro", str(rows), "kera:avro", "--value", "avro"),
            ("rows to json", str(rows), "kera:json", "--value", "json"),
            ("(json)", str(values), "kera:raw"),
            ("json to avro", "kera:raw", "kera:avro-2", "--value", "avro", "--subject", "avro-value"),
            ("json to json", "kera:raw", "kera:json-2", "--value", "json", "--subject", "json-value"),
        ):
            await asyncio.to_thread(copy, cluster.bootstrap, records, what, *arguments)


def main() -> int:
    """Run the requested copies."""
    arguments = parser(__doc__)
    arguments.add_argument("--records", type=int, default=1_000_000)
    given = arguments.parse_args()
    with directory(given) as folder:
        say(f"{given.records:,} records")
        asyncio.run(measure(given.records, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
