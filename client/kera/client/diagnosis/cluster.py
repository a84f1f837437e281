"""Judges the answers of a cluster's daemons. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kera.client.diagnosis.findings import Finding, Severity, ok, problem, warning
from kera.core.base.sizes import format_size
from kera.core.base.spelling import plural
from kera.core.errors import AuthenticationFailed, KeraError, NotAllowed

if TYPE_CHECKING:
    from kera.client import BackupDescription, BrokerDescription
    from kera.client.admin.daemons import DaemonDescription
    from kera.client.diagnosis.asking import Picture

FREE_PART_MIN = 0.10
"""Free share of a file system below which it is nearly full."""
FREE_PART_LEAST = 0.02
"""Free share below which it is about to be full."""
CLOCK_MS_MAX = 500
"""Maximum difference of clocks: retention by age and reads by time are wrong by the difference."""
NAMED_MAX = 5
"""Number of streams that are named; the others are counted."""
ENDED = {"done", "cancelled"}
CREDENTIALS_ADVICE = (
    "say who you are: KERA_CLIENT_USER and KERA_CLIENT_PASSWORD_FILE, KERA_CLIENT_TOKEN_FILE or KERA_CLIENT_TLS_CERT;"
    " it takes the right to describe the cluster"
)


def health(picture: Picture) -> list[Finding]:
    """Return the findings about a cluster whose coordinator has answered."""
    return [
        *_coordinators(picture),
        *_members(picture),
        *_streamlets(picture),
        *_recoveries(picture),
        *_daemons(picture),
        *_disks(picture),
        *_security(picture),
        *_versions(picture),
    ]


def installed(picture: Picture) -> list[Finding]:
    """Return the findings after a cluster was set up: whether all daemons run and are reachable, versions, clocks."""
    absent = [each for each in _members(picture) if each.severity]
    return [*absent, *_reached(picture), *_security(picture), *_versions(picture), *_clocks(picture)]


def unreachable(bootstrap: str, error: KeraError) -> list[Finding]:
    """Return the findings about a cluster whose coordinator has not answered."""
    if isinstance(error, AuthenticationFailed | NotAllowed):
        return [problem("access", error.message, CREDENTIALS_ADVICE)]
    advice = (
        "see whether coordinators run, and whether --bootstrap (KERA_BOOTSTRAP) names them; then look at their logs"
    )
    return [problem("coordinator", f"none that leads answers at {bootstrap}: {error.message}", advice)]


def _described(picture: Picture) -> dict[str, DaemonDescription]:
    return {name: said for name, said in picture.daemons.items() if not isinstance(said, KeraError)}


def _coordinators(picture: Picture) -> Iterator[Finding]:
    cluster = picture.cluster
    others = len(cluster.coordinators) - 1
    leader = cluster.coordinators[0] if cluster.coordinators else "the one that was asked"
    yield ok("coordinator", f"{leader} leads" + (f", {plural(others, 'other')} can take over" if others > 0 else ""))
    if cluster.catching_up:
        yield warning(
            "metadata", cluster.catching_up, "start all brokers that have data; see restored metadata in docs"
        )
    if cluster.unknown_streams:
        count = plural(len(cluster.unknown_streams), "stream")
        yield warning("metadata", f"{count} that brokers hold are missing or older there", "kera cluster adopt")


def _members(picture: Picture) -> Iterator[Finding]:
    brokers, backups = picture.cluster.brokers, picture.cluster.backups
    if not any(each.alive for each in brokers):
        yield problem("brokers", f"none of {len(brokers)} is alive: nothing can be written or read", "start brokers")
    for broker in brokers:
        yield _member(f"broker {broker.broker_id}", f"broker-{broker.broker_id}", broker)
    for backup in backups:
        yield _member(f"backup {backup.backup_id}", f"backup-{backup.backup_id}", backup)
    needed = max((each.config.replication for each in picture.streams), default=0)
    lasting = [each for each in backups if each.alive and not each.draining]
    full = [each.backup_id for each in lasting if _takes_no_replicas(each, picture)]
    usable = len(lasting) - len(full)
    if usable < needed:
        told = f" ({', '.join(map(str, full))}: no room)" if full else ""
        more = f"start {plural(needed - usable, 'more backup')}"
        yield problem(
            "backups",
            f"{usable} can be used{told}, and there are streams with {plural(needed, 'replica')}: their writers wait",
            f"make room on the disks of those that have none, or {more}" if full else more,
        )


def _takes_no_replicas(backup: BackupDescription, picture: Picture) -> bool:
    """Return whether a backup refuses further replicas, by its last heartbeat or by its report on each disk."""
    said = picture.daemons.get(f"backup {backup.backup_id}")
    checks = () if said is None or isinstance(said, KeraError) else said.checks
    refuses = any(check.name == "disks" and check.state == "problem" for check in checks)
    return refuses or backup.free_disk_bytes < backup.segment_bytes


def _member(name: str, argument: str, member: BrokerDescription | BackupDescription) -> Finding:
    where = member.node_id.partition("/")[0]
    if member.alive and member.restarting:
        return warning(name, "is stopping, in order to start again", "wait until it is back")
    if member.alive and member.draining:
        return warning(name, "is being drained", f"kera cluster drain {argument} shows how far it is")
    if member.alive:
        return ok(name, "is alive")
    if member.restarting:
        left = f"{member.grace_left_ms / 1000:.0f} s"
        return warning(name, f"is restarting; counts as lost in {left}", f"start it on {where} with its data directory")
    return warning(
        name,
        "is lost",
        f"start it on {where} with its data directory; if it is gone for good: kera cluster forget {argument}",
    )


def _streamlets(picture: Picture) -> Iterator[Finding]:
    alive = {each.broker_id for each in picture.cluster.brokers if each.alive}
    expected = {each.broker_id for each in picture.cluster.brokers if each.restarting} - alive
    total, absent, away = 0, Counter[str](), Counter[str]()
    for stream in picture.streams:
        for assignment in stream.assignments.values():
            total += 1
            if assignment.broker_id in expected:
                away[stream.name] += 1
            elif assignment.broker_id not in alive:
                absent[stream.name] += 1
    if absent:
        yield problem(
            "streamlets",
            f"{absent.total()} of {plural(total, 'streamlet')} have no live broker: {_names(absent)}",
            "start the brokers that are lost; of replicated streams others take over, see kera cluster recoveries",
        )
    if away:
        text = f"{away.total()} of {plural(total, 'streamlet')} wait for a broker that restarts: {_names(away)}"
        yield warning("streamlets", text, "wait until it is back")
    if not absent and not away:
        yield ok("streamlets", _all_owned(total, len(picture.streams)))
    yield from _older_records(picture, alive, expected)


def _all_owned(streamlets: int, streams: int) -> str:
    if not streamlets:
        return "there are no streams"
    if streamlets == 1:
        return "the only streamlet has a live broker"
    return f"all {streamlets} streamlets of {plural(streams, 'stream')} have a live broker"


def _older_records(picture: Picture, alive: set[int], expected: set[int]) -> Iterator[Finding]:
    """Yield the findings about streamlets that have moved, and whose older groups are at a broker that is away."""
    at: dict[int, Counter[str]] = {}
    for stream in picture.streams:
        for assignment in stream.assignments.values():
            for broker_id in set(assignment.broker_ids) - alive - {assignment.broker_id}:
                at.setdefault(broker_id, Counter())[stream.name] += 1
    for broker_id, streams in sorted(at.items()):
        text = f"those of {plural(streams.total(), 'streamlet')} are at broker {broker_id}, which"
        if broker_id in expected:
            yield warning("older records", f"{text} restarts: {_names(streams)}", "wait until it is back")
        else:
            yield problem(
                "older records",
                f"{text} is lost, and cannot be read: {_names(streams)}",
                f"start broker {broker_id} with its data directory; those of replicated streams others take over, see"
                " kera cluster recoveries",
            )


def _names(streams: Counter[str]) -> str:
    shown = ", ".join(sorted(streams)[:NAMED_MAX])
    return shown + (f" and {plural(len(streams) - NAMED_MAX, 'other stream')}" if len(streams) > NAMED_MAX else "")


def _recoveries(picture: Picture) -> Iterator[Finding]:
    for each in picture.recoveries:
        if each.phase not in ENDED:
            waits = f"; waits for {', '.join(each.waits_for)}" if each.waits_for else ""
            text = (
                f"{each.phase.replace('_', ' ')}: {each.streamlets_readable} of"
                f" {plural(each.streamlets_total, 'streamlet')} can be read{waits}"
            )
            advice = (
                "start what it waits for; if a backup is gone for good: kera cluster drain backup-N"
                if each.waits_for
                else "wait; kera cluster recoveries shows how far it is"
            )
            yield warning(f"recovery of broker {each.broker_id}", text, advice)
        if each.records_lost:
            yield warning(
                f"recovery of broker {each.broker_id}",
                f"{plural(each.records_lost, 'record')} may be lost: no replica has them",
                "start the backups that are lost, and look at the brokers' logs",
            )


def _reached(picture: Picture) -> Iterator[Finding]:
    for name, said in picture.daemons.items():
        if isinstance(said, KeraError):
            yield _not_reached(name, said)
        else:
            yield ok(name, f"answers at {said.address}")


def _not_reached(name: str, error: KeraError) -> Finding:
    return warning(
        name,
        f"does not answer from here: {error.message}",
        "see whether its address can be reached from this machine (advertised_address, firewalls), and its version",
    )


def _daemons(picture: Picture) -> Iterator[Finding]:
    for name, said in picture.daemons.items():
        if isinstance(said, KeraError):
            yield _not_reached(name, said)
            continue
        for check in said.checks:
            if check.state in {"warning", "problem"}:
                # One unready daemon degrades the cluster; the findings about streamlets show whether it is worse.
                yield warning(name, f"{check.name}: {check.text}", f"look at the log of {name}, at {said.address}")


def _disks(picture: Picture) -> Iterator[Finding]:
    fullest = 1.0
    for name, said in _described(picture).items():
        for room in said.file_systems:
            part = room.free_bytes / room.size_bytes if room.size_bytes else 1.0
            fullest = min(fullest, part)
            if part < FREE_PART_MIN:
                severity = Severity.PROBLEM if part < FREE_PART_LEAST else Severity.WARNING
                yield Finding(
                    severity,
                    name,
                    f"{room.path}: {format_size(room.free_bytes)} of {format_size(room.size_bytes)} are free",
                    "add room, or set retention (kera stream alter), or delete streams",
                )
    if fullest >= FREE_PART_MIN:
        yield ok("disks", f"the fullest one has {fullest:.0%} free")


def _security(picture: Picture) -> Iterator[Finding]:
    """Yield the findings about security: all daemons must require authentication, or none."""
    is_on = {name: said.security for name, said in _described(picture).items()}
    if not (picture.cluster.security or any(is_on.values())):
        return  # security is off
    for name in (name for name, here in is_on.items() if not here):
        yield problem(
            "security",
            f"{name} serves whoever connects, and others ask who that is",
            "set security = true and cluster_secret_file there, as at the others, and start it again",
        )
    if all(is_on.values()):
        yield ok("security", "everybody has to authenticate, and may do what rules allow")


def _versions(picture: Picture) -> Iterator[Finding]:
    described = _described(picture)
    versions = Counter(said.version + (f" ({said.commit})" if said.commit else "") for said in described.values())
    if len(versions) > 1:
        text = ", ".join(f"{count} of {version}" for version, count in versions.most_common())
        yield warning("versions", text, "finish the rolling restart: all daemons should have the same")
    elif versions:
        yield ok("versions", f"all daemons are {next(iter(versions))}")
    yield _feature_level(picture)
    without = [name for name, said in described.items() if not said.native]
    if without:
        text = f"does not run at {', '.join(without[:NAMED_MAX])}, which are several times as slow"
        yield warning("native core", text, "install a package that was built with it; see docs/native.md")


def _feature_level(picture: Picture) -> Finding:
    cluster, described = picture.cluster, _described(picture)
    levels = {f"broker {each.broker_id}": each.feature_level for each in cluster.brokers}
    levels |= {f"backup {each.backup_id}": each.feature_level for each in cluster.backups}
    levels |= {name: said.feature_level for name, said in described.items() if said.role == "coordinator"}
    highest = max(levels.values(), default=0)
    text = f"the cluster has {cluster.feature_level}"
    if highest <= cluster.feature_level:
        return ok("feature level", text)
    behind = [name for name, level in levels.items() if level < highest]
    if not behind:
        advice = "wait a moment; if it stays, see the coordinator's feature_level_max"
        return warning("feature level", f"{text}, and all daemons have {highest}", advice)
    shown = ", ".join(behind[:NAMED_MAX]) + (f" and {len(behind) - NAMED_MAX} more" if len(behind) > NAMED_MAX else "")
    return warning(
        "feature level",
        f"{text}; it rises to {highest} when {shown} {'has' if len(behind) == 1 else 'have'} it",
        "finish the rolling restart; forget those that are gone for good (kera cluster forget)",
    )


def _clocks(picture: Picture) -> Iterator[Finding]:
    described = _described(picture)
    off = {
        name: said for name, said in described.items() if abs(said.clock_ahead_ms) - said.clock_unsure_ms > CLOCK_MS_MAX
    }
    for name, said in off.items():
        direction = "ahead of" if said.clock_ahead_ms > 0 else "behind"
        yield warning(
            name,
            f"its clock is {abs(said.clock_ahead_ms) / 1000:.2f} s {direction} this machine's",
            "synchronize clocks (chrony, systemd-timesyncd), here and there",
        )
    if described and not off:
        worst_ms = max(abs(said.clock_ahead_ms) for said in described.values())
        yield ok("clocks", f"within {worst_ms:.0f} ms of this machine's")
