"""``kera cluster``: what the cluster consists of."""

from __future__ import annotations

import dataclasses
import json

import typer

from kera.cli._client import BOOTSTRAP_OPTION, JSON_OPTION, connected
from kera.cli._run import run_async
from kera.cli._sizes import format_size
from kera.cli._table import table

app = typer.Typer(help="Look at the cluster.", no_args_is_help=True)


@app.callback()
def _cluster() -> None:
    pass  # so that the only command keeps its name


@app.command()
def describe(bootstrap: str = BOOTSTRAP_OPTION, as_json: bool = JSON_OPTION) -> None:
    """Show the brokers and whether they are alive."""
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
