"""``kera cluster``: members, moves, drains, recoveries, and backups of the metadata."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._output import OUTPUT_OPTION, Output, show_document, show_result
from kera.cli._paths import file_to_replace, path_of, written_for_owner
from kera.cli._run import UsageError, extra, run_async
from kera.cli._table import fields, format_time, table
from kera.core.base.sizes import format_size
from kera.core.base.spelling import plural
from kera.core.errors import InvalidArgument, KeraError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kera.client import BackupDescription, BrokerDescription, DrainStatus, RecoveryDescription, UnlistedStream

app = Commands(help="Inspect the cluster, move streamlets, drain members, back up the metadata.", no_args_is_help=True)

HEALTH_WORDS = ("healthy", "degraded", "broken")
"""The health of the cluster, indexed by the severity of the worst finding."""
POLL_INTERVAL_S = 0.5
"""Time between two polls of the progress."""


@app.command()
async def describe(bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> None:
    """Show the brokers and backups, and which are alive."""
    async with connected(bootstrap) as client:
        cluster = await client.admin.describe_cluster()
    if output.is_document:
        show_document(dataclasses.asdict(cluster), output)
        return
    security = "on" if cluster.security else "off"
    print(f"cluster {cluster.cluster_id} at {bootstrap}, feature level {cluster.feature_level}, security {security}")
    if len(cluster.coordinators) > 1:
        leader, *others = cluster.coordinators
        print(f"coordinators: {leader} leads, {', '.join(others)}")
    if cluster.catching_up:
        print(cluster.catching_up)
    print()
    heading = ("BROKER", "ALIVE", "VERSION", "GRPC", "FRAMES", "MEMORY", "SEGMENT SIZE", "NODE", "CPUS")
    rows = [
        (
            broker.broker_id,
            _life(broker),
            broker.version or "?",
            broker.grpc_address,
            broker.frames_address,
            format_size(broker.arena_bytes),
            format_size(broker.segment_bytes),
            broker.node_id.partition("/")[0],
            broker.cpus or "all",
        )
        for broker in cluster.brokers
    ]
    print(table(heading, rows) if rows else "no broker has registered yet")
    if cluster.backups:
        print()
        print(table(BACKUP_HEADING, map(_backup_row, cluster.backups)))
    unknown = [one for one in cluster.unknown_streams if not one.problem]
    if unknown:
        print()
        print("brokers hold streams that are missing from the metadata; add them with kera cluster adopt:")
        print(_unknown_table(unknown))
    for one in cluster.unknown_streams:
        if one.problem:
            print()
            print(f"the metadata of stream {one.name} (id {one.stream_id}) are older than what brokers know:")
            print(f"  {one.problem}")


def _unknown_table(streams: Iterable[UnlistedStream]) -> str:
    rows = [
        (one.name or "?", one.stream_id, format_size(one.bytes), one.records, ", ".join(map(str, one.broker_ids)))
        for one in streams
    ]
    return table(("STREAM", "ID", "SIZE", "RECORDS", "AT BROKERS"), rows)


BACKUP_HEADING = (
    *("BACKUP", "ALIVE", "VERSION", "GRPC", "FRAMES", "MEMORY USED", "DISK USED"),
    *("SEGMENT SIZE", "RACK", "NODE"),
)


def _backup_row(backup: BackupDescription) -> tuple[object, ...]:
    """Return the row of a backup; its usage is as of the last heartbeat, and unknown if the backup is not alive."""
    memory = _used(backup.memory_bytes, backup.free_memory_bytes) if backup.alive else "?"
    disk = _used(backup.disk_bytes, backup.free_disk_bytes) if backup.alive else "?"
    return (
        backup.backup_id,
        _life(backup),
        backup.version or "?",
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


def _life(member: BrokerDescription | BackupDescription) -> str:
    life = ["yes" if member.alive else "no"]
    if member.restarting:
        life.append("stopping" if member.alive else f"restarting, lost in {member.grace_left_ms / 1000:.0f} s")
    if member.draining:
        life.append("draining")
    return ", ".join(life)


@app.command()
async def health(bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> int:
    """Check the cluster: exit code 0 if it is healthy, 1 if it is degraded, 2 if it is broken or cannot be reached.

    Asks the coordinator and all daemons, and says what to do.
    """
    from kera.cli.diagnosis.asking import look
    from kera.client.diagnosis import cluster, findings

    try:
        found = cluster.health(await look(bootstrap))
    except StartError:
        raise  # our own settings are wrong, not the cluster
    except KeraError as error:
        found = cluster.unreachable(bootstrap, error)
    severity = findings.worst(found)
    word = HEALTH_WORDS[severity]
    show_result(
        {"health": word, "findings": findings.document(found)}, "\n".join((word, *findings.lines(found))), output
    )
    return int(severity)


@app.command()
async def move(
    stream: str = typer.Argument(..., metavar="STREAM", help="Name of the stream."),
    streamlet: int = typer.Argument(..., min=0, metavar="STREAMLET", help="Number of the streamlet."),
    broker_id: int = typer.Argument(..., min=1, metavar="BROKER_ID", help="Target broker."),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Move a streamlet to another broker.

    Producers and consumers keep running; existing records stay where they are.
    """
    async with connected(bootstrap) as client:
        moved = await client.admin.move_streamlet(stream, streamlet, broker_id)
    stall = f"appends paused for {moved.stall_us / 1000:.1f} ms" if moved.stall_us else "it was already there"
    document = {"stream": stream, "streamlet": streamlet, "broker": broker_id, "stall_us": moved.stall_us}
    show_result(document, f"broker {broker_id} owns streamlet {streamlet} of {stream}; {stall}", output, indent=None)


@app.command()
async def rebalance(
    dry_run: bool = typer.Option(False, "--dry-run", help="Only show the moves and their reasons."),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Move streamlets to balance the load of the brokers."""
    async with connected(bootstrap) as client:
        done = await client.admin.rebalance(dry_run=dry_run)
    if output.is_document:
        show_document(dataclasses.asdict(done), output)
        return
    if done.moves:
        heading = ("STREAM", "STREAMLET", "FROM", "TO", "REASON")
        rows = [
            (one.stream, one.streamlet_id, one.from_broker_id, one.to_broker_id, _why(one.reason, one.error))
            for one in done.moves
        ]
        print(table(heading, rows))
    else:
        print("nothing to move: the brokers have about the same load")
    print()
    loads = [
        (
            one.broker_id,
            f"{format_size(one.bytes_per_s)}/s",
            f"{format_size(one.bytes_per_s_after)}/s",
            f"{one.busy:.0%}",
            f"{one.busy_after:.0%}",
            one.streamlets,
            one.streamlets_after,
        )
        for one in done.loads
    ]
    print(table(("BROKER", "LOAD", "LOAD AFTER", "LOOP", "LOOP AFTER", "STREAMLETS", "STREAMLETS AFTER"), loads))


def _why(reason: str, error: str | None) -> str:
    return reason if error is None else f"not moved: {error}"


@app.command()
async def drain(
    member: str = typer.Argument(..., metavar="broker-ID|backup-ID", help="Broker or backup to drain."),
    undo: bool = typer.Option(False, "--undo", help="Cancel the drain and return it to service."),
    wait: bool = typer.Option(
        False,
        "--wait",
        help="Wait until it is empty, and show the obstacles; otherwise show the progress.",
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Drain a broker or a backup, so that it can be stopped without loss.

    Draining continues in the background; run the command again to see its progress.
    """
    if undo and wait:
        raise UsageError("--undo and --wait are mutually exclusive")
    kind, member_id = _member(member)
    import asyncio

    async with connected(bootstrap) as client:
        ask = client.admin.drain_broker if kind == "broker" else client.admin.drain_backup
        status, told = await ask(member_id, undo=undo), list[str]()
        while wait and not status.done:
            if not status.draining:
                raise InvalidArgument(f"the drain of {kind} {member_id} was cancelled; it is back in service")
            reasons = [re.sub(r" \(\d+\)$", "", reason) for reason in status.reasons]  # numbers change at every poll
            if reasons and reasons != told:
                print(
                    f"remaining: {_remaining(status)}",
                    *(f"  {reason}" for reason in status.reasons),
                    sep="\n",
                    file=sys.stderr,
                )
                told = reasons
            await asyncio.sleep(POLL_INTERVAL_S)
            status = await ask(member_id, ask=True)
    if output.is_document:
        show_document(dataclasses.asdict(status), output)
    elif undo:
        print(f"{kind} {member_id} is back in service")
    elif status.done:
        print(f"{kind} {member_id} is drained and can be stopped")
    else:
        print(f"{kind} {member_id} is draining; remaining: {_remaining(status)}")
        for reason in status.reasons:
            print(f"  {reason}")


def _member(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(broker|backup)-([0-9]{1,19})", text)
    if match is None:
        raise UsageError(f"{text!r} is neither broker-ID nor backup-ID; see kera cluster describe")
    return match[1], int(match[2])


def _remaining(status: DrainStatus) -> str:
    left = []
    if status.streamlets_owned:
        left.append(plural(status.streamlets_owned, "streamlet"))
    if status.streamlets_held:
        left.append(f"older records of {plural(status.streamlets_held, 'streamlet')}")
    if status.replicas:
        left.append(plural(status.replicas, "replica"))
    return ", ".join(left) or "other brokers have yet to be notified"


@app.command()
async def forget(
    member: str = typer.Argument(..., metavar="broker-ID|backup-ID", help="Broker or backup to remove."),
    force: bool = typer.Option(
        False, "--force", help="Remove it even if that loses records or replicas; otherwise list them and do nothing."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Remove a broker or a backup that is gone for good from the metadata.

    The cluster stops waiting for it, and it cannot rejoin. Refused while it is alive, or its data are being recovered.
    """
    kind, member_id = _member(member)
    async with connected(bootstrap) as client:
        ask = client.admin.forget_broker if kind == "broker" else client.admin.forget_backup
        lost = await ask(member_id, force=force)
    text = "\n".join((f"forgot {kind} {member_id}", *(f"  lost: {what}" for what in lost)))
    show_result({kind: member_id, "lost": lost}, text, output)


@app.command()
async def adopt(
    stream: str = typer.Argument(
        "", metavar="[STREAM]", help="Name or id of the stream; if omitted, list such streams."
    ),
    name: str = typer.Option("", "--name", help="New name, if the old one is taken."),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Adopt a stream that brokers hold, but the metadata lack or know only in an older state.

    Needed after the metadata were restored from an older backup. The stream keeps all its records, but if the metadata
    know it, it loses the records that other brokers have taken for it since the restore.
    """
    async with connected(bootstrap) as client:
        if not stream:
            unknown = (await client.admin.describe_cluster()).unknown_streams
            text = _unknown_table(unknown) if unknown else "the metadata have all streams that brokers hold"
            show_result([dataclasses.asdict(one) for one in unknown], text, output)
            return
        adopted = await client.admin.adopt_stream(stream, name)
    document = {"stream": adopted.name, "stream_id": adopted.stream_id}
    show_result(document, f"adopted stream {adopted.name}, id {adopted.stream_id}", output, indent=None)


@app.command()
async def backup(
    file: Path = typer.Argument(
        ..., metavar="FILE", parser=path_of("FILE"), help="File to write; replaced once the copy is complete."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Back up the metadata to a file: streams, members, consumer groups, producers; not the records."""
    target = file_to_replace(file)  # fails before the cluster is asked
    async with connected(bootstrap) as client:
        copy = await client.admin.backup_metadata()
    try:
        with written_for_owner(target) as written:  # the copy has what proves passwords and tokens
            written.write(copy)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    print(f"backed up the metadata to {file}, {format_size(len(copy))}")


@app.command()
def restore(
    file: Path = typer.Argument(..., metavar="FILE", parser=path_of("FILE"), help="File made by kera cluster backup."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", metavar="PATH", parser=path_of("--data-dir"), help="The coordinator's data directory."
    ),
    zookeeper: str = typer.Option(
        "", "--zookeeper", help="ZooKeeper ensemble of the coordinators, instead of a directory."
    ),
    force: bool = typer.Option(
        False, "--force", help="Overwrite existing metadata; records that the backup lacks are lost."
    ),
) -> None:
    """Restore the metadata from a backup. Stop all coordinators first; brokers keep streams that the backup lacks."""
    if (data_dir is None) == (not zookeeper):
        raise UsageError("give --data-dir or --zookeeper, the place of the metadata")
    run_async(_restore(file, {"data_dir": data_dir, "zookeeper": zookeeper}, force))


async def _restore(file: Path, where: dict[str, object], force: bool) -> None:
    import asyncio

    with extra("server"):
        from kera.coordinator.application import restore as put_back
        from kera.coordinator.settings import CoordinatorSettings
        from kera.coordinator.store.metadata_copy import unpack
    try:
        data = await asyncio.to_thread(file.read_bytes)
        unpack(data)  # checks the file before any metadata are opened or made
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except InvalidArgument as error:
        raise UsageError(f"{file}: {error.message}") from error
    copy = await put_back(CoordinatorSettings.load(None, **where), data, force=force)
    print(
        f"restored {plural(len(copy.records), 'record')} of cluster {copy.cluster_id}, as of"
        f" {format_time(copy.created_us)}; start the coordinator, and use kera cluster adopt for newer streams"
    )


@app.command()
async def recoveries(bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> None:
    """Show the progress and duration of recoveries of lost brokers."""
    async with connected(bootstrap) as client:
        found = await client.admin.recoveries()
    text = "\n\n".join(map(_recovery, found)) or "no recent recoveries"
    show_result([dataclasses.asdict(one) for one in found], text, output)


def _recovery(one: RecoveryDescription) -> str:
    """Describe a recovery, with a timeline in seconds since detection."""
    rows: list[tuple[str, object]] = [
        ("cause", one.cause),
        ("detected", format_time(one.detected_us)),
        ("phase", one.phase.replace("_", " ")),
        ("backups fenced", _since(one, one.fenced_us)),
        ("writable", f"{_since(one, one.opened_us)}{_of(one.streamlets_opened, one.streamlets_total)}"),
        ("readable", f"{_since(one, one.readable_us)}{_of(one.streamlets_readable, one.streamlets_total)}"),
        ("restored", f"{_since(one, one.restored_us)}{_of(one.streamlets_restored, one.streamlets_total)}"),
        ("recovered", f"{format_size(one.bytes_recovered)} of {format_size(one.bytes_total)}{_speed(one)}"),
        ("replicated", f"{format_size(one.bytes_restored)} of {format_size(one.bytes_total)}"),
        ("new owners", ", ".join(map(str, one.owner_ids))),
    ]
    if one.records_lost:
        rows.append(("records lost", one.records_lost))
    if one.waits_for:
        rows.append(("waiting for", "\n".join(one.waits_for)))
    return f"broker {one.broker_id}, incarnations before epoch {one.before_epoch}\n{fields(rows, indent='  ')}"


def _since(one: RecoveryDescription, when_us: int) -> str:
    return f"after {(when_us - one.detected_us) / 1e6:.3f} s" if when_us else "not yet"


def _of(count: int, total: int) -> str:
    return f", {count} of {plural(total, 'streamlet')}"


def _speed(one: RecoveryDescription) -> str:
    if one.readable_us <= one.opened_us or not one.opened_us:
        return ""
    return f", {one.bytes_recovered / (one.readable_us - one.opened_us):.1f} MB/s"
