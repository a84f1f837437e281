"""``kera cluster``: what the cluster consists of."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import typer

from kera.cli._client import BOOTSTRAP_OPTION, JSON_OPTION, connected
from kera.cli._run import run_async
from kera.cli._sizes import format_size
from kera.cli._table import table

if TYPE_CHECKING:
    from kera.client import BackupDescription

app = typer.Typer(help="Look at the cluster.", no_args_is_help=True)


@app.callback()
def _cluster() -> None:
    pass  # so that the only command keeps its name


@app.command()
def describe(bootstrap: str = BOOTSTRAP_OPTION, as_json: bool = JSON_OPTION) -> None:
    """Show the brokers and backups, and whether they are alive."""
    run_async(_describe(bootstrap, as_json))


async def _describe(bootstrap: str, as_json: bool) -> None:
    async with connected(bootstrap) as client:
        cluster = await client.admin.describe_cluster()
    if as_json:
        print(json.dumps(dataclasses.asdict(cluster), indent=2))
        return
    print(f"cluster {cluster.cluster_id} at {bootstrap}")
    print()
    heading = ("BROKER", "ALIVE", "GRPC", "FRAMES", "MEMORY", "SEGMENTS OF", "NODE")
    rows = [
        (
            broker.broker_id,
            "yes" if broker.alive else "no",
            broker.grpc_address,
            broker.frames_address,
            format_size(broker.arena_bytes),
            format_size(broker.segment_bytes),
            broker.node_id.partition("/")[0],
        )
        for broker in cluster.brokers
    ]
    print(table(heading, rows) if rows else "no broker has registered yet")
    if cluster.backups:
        print()
        print(table(BACKUP_HEADING, map(_backup_row, cluster.backups)))


BACKUP_HEADING = ("BACKUP", "ALIVE", "GRPC", "FRAMES", "MEMORY USED", "DISK USED", "SEGMENTS OF", "RACK", "NODE")


def _backup_row(backup: BackupDescription) -> tuple[object, ...]:
    """What is free is as of the last heartbeat: of a backup that is not alive, nobody knows."""
    memory = _used(backup.memory_bytes, backup.free_memory_bytes) if backup.alive else "?"
    disk = _used(backup.disk_bytes, backup.free_disk_bytes) if backup.alive else "?"
    return (
        backup.backup_id,
        "yes" if backup.alive else "no",
        backup.grpc_address,
        backup.frames_address,
        f"{memory} of {format_size(backup.memory_bytes)}",
        f"{disk} of {format_size(backup.disk_bytes)}",
        format_size(backup.segment_bytes),
        backup.rack,
        backup.node_id.partition("/")[0],
    )


def _used(total_bytes: int, free_bytes: int) -> str:
    return format_size(max(0, total_bytes - free_bytes))
