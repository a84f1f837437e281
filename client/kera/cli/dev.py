"""``kera dev``: a whole cluster on this machine, for as long as the command runs."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_DEFAULT, current_context
from kera.cli._contexts import BOOTSTRAP_VARIABLE, CONTEXT_VARIABLE
from kera.cli._paths import expanded_path, path_of
from kera.cli._run import UsageError, check_insecure, extra, run_async
from kera.cli._sizes import parse_size
from kera.cli._streams import EXIT_ERROR, fail, warn
from kera.cli._table import fields
from kera.core.base.sizes import format_size
from kera.core.base.spelling import plural

if TYPE_CHECKING:
    import asyncio

    from kera.local.cluster import ChildDeath, LocalCluster

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

BACKUP_MEMORY = "256MiB"


def dev(
    brokers: int = typer.Option(1, min=1, metavar="N", help="Number of brokers."),
    backups: int = typer.Option(0, min=0, metavar="N", help="Number of backups."),
    coordinators: int = typer.Option(1, min=1, metavar="N", help="Number of coordinators; several need --zookeeper."),
    zookeeper: str | None = typer.Option(
        None,
        metavar="ADDRESS",
        help="ZooKeeper ensemble for the metadata: host:port, comma-separated, with an optional path.",
    ),
    replication: int | None = typer.Option(
        None, min=0, metavar="R", help="Default replication factor: backups that hold a copy of each record."
    ),
    data_dir: Path | None = typer.Option(
        None,
        metavar="DIR",
        parser=path_of("--data-dir"),
        help="Directory of the cluster's data. Default: a temporary one.",
    ),
    port: int = typer.Option(
        7400, min=0, max=65535, metavar="PORT", help="Port of the (first) coordinator; 0 for any free one."
    ),
    host: str = typer.Option("127.0.0.1", metavar="HOST", help="Address to listen on."),
    insecure: bool = typer.Option(
        False, "--insecure", help="Listen at a --host that others reach: every client gets all rights."
    ),
    arena_bytes: str = typer.Option("256MiB", metavar="SIZE", help="Shared memory of each broker."),
    backup_memory_bytes: str | None = typer.Option(
        None, metavar="SIZE", help=f"Memory of each backup. Default: {BACKUP_MEMORY}."
    ),
    segment_bytes: str = typer.Option("8MiB", metavar="SIZE", help="Size of a segment."),
    log_dir: Path | None = typer.Option(
        None,
        metavar="DIR",
        parser=path_of("--log-dir"),
        help="Directory of the daemons' logs. Default: with the data.",
    ),
) -> int:
    """Run a whole cluster on this machine until Ctrl-C.

    Set any other setting of a daemon through its environment variable (see kera broker --help).
    """
    with extra("server"):
        from kera.local.cluster import LocalCluster
    if (replication or 0) > backups:
        raise UsageError(f"--replication {replication} needs --backups {replication}, or more")
    if backup_memory_bytes is None:
        backup_memory_bytes = BACKUP_MEMORY
    elif not backups:
        raise UsageError("--backup-memory-bytes needs --backups: without, there is no backup")
    if coordinators > 1 and not zookeeper:
        raise UsageError(f"--coordinators {coordinators} needs --zookeeper, which stores their shared metadata")
    check_insecure("--host", host, insecure=insecure)
    exposed = {"insecure": True} if insecure else {}
    cluster = LocalCluster(
        brokers=brokers,
        backups=backups,
        replication=replication,
        coordinators=coordinators,
        zookeeper=zookeeper,
        data_dir=None if data_dir is None else expanded_path("--data-dir", data_dir),
        arena_bytes=parse_size(arena_bytes, name="--arena-bytes"),
        backup_memory_bytes=parse_size(backup_memory_bytes, name="--backup-memory-bytes"),
        segment_bytes=parse_size(segment_bytes, name="--segment-bytes"),
        host=host,
        port=port,
        log_dir=None if log_dir is None else expanded_path("--log-dir", log_dir),
        coordinator_settings=exposed,
        broker_settings=exposed,
        backup_settings=exposed,
    )
    return run_async(_run(cluster))


async def _run(cluster: LocalCluster) -> int:
    import asyncio

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        starting = asyncio.ensure_future(cluster.start())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return 0
        await starting
        print(welcome(cluster), flush=True)
        return await _watch(cluster, stopping)
    finally:
        stopping.cancel()
        for name in await cluster.stop():
            warn(f"{name} did not stop in time and was killed")


async def _watch(cluster: LocalCluster, stopping: asyncio.Future[Any]) -> int:
    """Wait until the user stops the cluster, or a daemon dies that no other can replace; return the exit code."""
    import asyncio

    while True:
        death = asyncio.ensure_future(cluster.wait())
        await asyncio.wait([death, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not death.done():
            death.cancel()
            return 0
        if not _can_go_on(cluster, death.result()):
            return _report_death(death.result())
        warn(f"{death.result().name} {death.result().what}; the others keep running")


def _can_go_on(cluster: LocalCluster, death: ChildDeath) -> bool:
    """Whether another daemon of its kind is left and, for a broker, backups to recover its data from."""
    kind = death.name.partition("-")[0]
    others = any(name != death.name and name.partition("-")[0] == kind for name in cluster.processes)
    return others and (kind != "broker" or cluster.backup_count > 0)


def _report_death(death: ChildDeath) -> int:
    code = fail(f"{death.name} {death.what}; stopping the others. The end of its log:", EXIT_ERROR)
    print(textwrap.indent(death.log_tail or "(nothing)", "  "), file=sys.stderr)
    return code


def welcome(cluster: LocalCluster) -> str:
    """Describe a running cluster: its addresses and directories, and the commands to try first."""
    from importlib.metadata import version

    segments = format_size(cluster.segment_bytes)
    pairs: list[tuple[str, object]] = [("bootstrap", cluster.bootstrap)]
    for name, ready in cluster.ready.items():
        if ready["ready"] in {"broker", "backup"}:
            pairs.append((name.replace("-", " "), f"grpc {ready['grpc_address']}, frames {ready['frames_address']}"))
    memory = f"{format_size(cluster.arena_bytes)} per broker"
    if cluster.backup_count:
        memory += f", {format_size(cluster.backup_memory_bytes)} per backup"
        copies = plural(cluster.replication, "backup") if cluster.replication else "none by default"
        pairs.append(("replication", copies))
    pairs += [
        ("memory", f"{memory}, segments of {segments}"),
        ("data", f"{cluster.directory}{' (temporary)' if cluster.ephemeral else ''}"),
        ("logs", cluster.log_dir),
    ]
    commands = [
        "kera stream create demo",
        "echo hello | kera produce demo",
        "kera consume demo",
    ]
    if cluster.bootstrap != BOOTSTRAP_DEFAULT or _elsewhere():
        commands.insert(0, f"export {BOOTSTRAP_VARIABLE}={cluster.bootstrap}")
    members = plural(cluster.broker_count, "broker")
    if cluster.backup_count:
        members += f" and {plural(cluster.backup_count, 'backup')}"
    return "\n".join(
        (
            f"KerA {version('kera')}: a cluster of {members} on this machine",
            "",
            fields(pairs, indent="  "),
            "",
            "Try:",
            textwrap.indent("\n".join(commands), "  "),
            "",
            "Ctrl-C stops it.",
        )
    )


def _elsewhere() -> bool:
    """Whether commands would use another cluster by default."""
    try:
        variables = any(os.environ.get(each) for each in (BOOTSTRAP_VARIABLE, CONTEXT_VARIABLE))
        return variables or current_context()[1] is not None
    except UsageError:
        return True
