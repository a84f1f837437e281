"""Fuzzes all ports of real daemons with the inputs of `ports`, while well-behaved clients use the same daemons.

Checks after each batch: every daemon lives and answers, none has logged a defect, and no answer reports one. Checks at
the end: memory has not grown, and all records that others wrote meanwhile are there (`kera check`). It measures how
long a well-behaved client waits, with and without the fuzzing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from kera.cli.check._options import Options
from kera.client import Client
from kera.core.errors import KeraError
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_words import MARK
from kera.core.rpc.method import call
from kera.local.cluster import LocalCluster
from kera.v1 import backup_pb2, coordinator_pb2, daemon_pb2
from tests.chaos.checked import Load, loaded
from tests.fuzz import greedy
from tests.fuzz.ports import NO_PORTS, PROTOCOLS, UNENCRYPTED, Sent, World, frames
from tests.fuzz.ports import call as call_of
from tests.fuzz.probe import Probing, probing
from tests.fuzz.running import GROWTH_BYTES_MAX
from tests.fuzz.secured import STRANGER, Door, secured_cluster
from tests.fuzz.secured import UNENCRYPTED as NOT_TLS
from tests.fuzz.talking import Defect, Port, Talk
from tests.integration.control_support import HEARTBEAT_MS, SEGMENT_BYTES, control_cluster
from tests.integration.test_fields import leading_epoch, theirs_of

FOREIGN, PROBED = "foreign", "probed"
STREAMLETS = 2
PRODUCERS = 256
AT_ONCE = 8
"""Simultaneous connections to a port."""
BATCH = 200
"""Inputs for each port and protocol, except the slow ones."""
BATCH_SLOW = 40
"""Inputs for metrics, which a daemon makes one at a time with rests, and for strangers, whom it refuses slowly."""
ANSWER_S_MAX = 10.0
WARM_BATCHES = 3
FOREIGN_BYTES = 1 << 20
"""Retention of the foreign stream."""
BACKUP_BYTES = 256 << 20
"""Memory of a backup, with room for the data that is sent between two batches."""
VALID_PROTOCOLS = {"frames_address": (frames,), "frames_unix_path": (frames,), "grpc_address": (call_of,)}
"""Protocols that can send valid requests."""
OWN_BYTES = 24 << 20
"""Memory that a daemon may take for well-behaved clients and give back."""
EPOCH_MAX = (1 << 64) - 1
KEPT = 5
RATE = 200.0
"""Records a second of the well-behaved load."""
_LOUD = ("error", "critical", "exception")
_OF_GRPC = re.compile(r"[IWE]\d{4} \d\d:\d\d:.*$")
"""gRPC's own messages about its input, which may begin in the middle of a line; fatal ones begin with F."""
_TEXTS = ("Traceback", "unexpected", "handler failed", "invariant broken", "never retrieved", "Segmentation", "Fatal")


@dataclass
class Report:
    """The counts, measurements and defects of a run."""

    seed: int
    inputs: Counter[str] = field(default_factory=Counter)
    """Connections and calls by port."""
    requests: Counter[str] = field(default_factory=Counter)
    """Requests by port."""
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    seconds: float = 0.0
    warm_bytes: dict[str, int] = field(default_factory=dict)
    """Memory of each daemon after the first batches."""
    resident_bytes: dict[str, int] = field(default_factory=dict)
    """Memory of each daemon now."""
    idle: dict[str, Any] = field(default_factory=dict)
    """Times of the well-behaved client while nothing else is sent."""
    valid: dict[str, Any] = field(default_factory=dict)
    """Its times beside valid requests."""
    busy: dict[str, Any] = field(default_factory=dict)
    taken_bytes: dict[str, int] = field(default_factory=dict)
    """By port: the daemon's memory for each of the strangers' connections."""
    acknowledged: int = 0
    verdict: str = ""

    def grown_bytes(self) -> dict[str, int]:
        """Memory that each daemon has taken since the first batches."""
        return {name: now - self.warm_bytes[name] for name, now in self.resident_bytes.items()}

    def lines(self) -> Iterator[str]:
        """The report as lines of text."""
        for port, count in sorted(self.inputs.items()):
            most = ", ".join(f"{word} {number}" for word, number in self.outcomes[port].most_common(5))
            rate = self.requests[port] / self.seconds
            yield f"{port:<26}{count:>7} connections or calls, {self.requests[port]:>7} requests {rate:>5.0f}/s  {most}"
        for name, grown in self.grown_bytes().items():
            now = self.resident_bytes[name]
            yield f"{name}: {now / (1 << 20):.1f} MiB, {grown / (1 << 20):+.1f} since batch {WARM_BATCHES}"
        for port, taken in self.taken_bytes.items():
            yield f"{port}: at most {taken >> 10} KiB taken for each connection"
        for when, found in (("alone", self.idle), ("beside good requests", self.valid), ("beside these", self.busy)):
            yield f"a client that behaves well, {when}: write {found.get('write')}, read {found.get('read')} ms"
        yield f"kera check: {self.verdict}, {self.acknowledged} records"
        yield from self.defects


class Logs:
    """The logs of the daemons."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def defects(self) -> list[str]:
        """Lines since the last look that report a defect of a daemon."""
        found: list[str] = []
        for path in sorted(self._folder.glob("*.log")):
            data = path.read_bytes()
            begin = self._read.get(path, 0)
            end = data.rfind(b"\n") + 1
            self._read[path] = end
            lines = data[begin:end].decode("utf-8", "replace").splitlines()
            found += [f"{path.name}: {line[:1500]}" for line in lines if self._is_wrong(line)]
        return found

    @staticmethod
    def _is_wrong(line: str) -> bool:
        line = _OF_GRPC.sub("", line).strip()
        if line.startswith(MARK.strip()):  # gRPC's own messages about its input
            return False
        if not line.startswith("{"):
            return bool(line)
        try:
            level = json.loads(line).get("level")
        except ValueError:
            return True
        return level in _LOUD or any(text in line for text in _TEXTS)


def ports_of(cluster: LocalCluster, whos: Iterable[str] = ("",)) -> list[Port]:
    """All ports of all daemons, once for each kind of client. Fails for a kind of port without a protocol."""
    found = []
    for daemon, ready in cluster.ready.items():
        role = daemon.partition("-")[0]
        for kind, address in ready.items():
            if kind.endswith(("_address", "_path", "_port")) and kind not in NO_PORTS and address:
                if kind not in PROTOCOLS:
                    raise AssertionError(f"nobody fuzzes the {kind} of {daemon}")
                here = whos if kind.endswith("_address") else [who for who in whos if not who]
                found += [Port(daemon, role, kind, str(address), who) for who in here]
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, without shared memory such as an arena."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


class Field:
    """A cluster that is fuzzed."""

    def __init__(self, cluster: LocalCluster, client: Client, seed: int, door: Door) -> None:
        self.cluster = cluster
        self._door = door
        self.client = client
        self.report = Report(seed)
        self._logs = Logs(cluster.log_dir)
        self._world: World | None = None
        self._coordinator = door.channel(cluster.bootstrap)
        self._ports = ports_of(cluster, door.access)
        self._talks = {port: Talk(port, door.access[port.who]) for port in self._ports}
        self._numbers: Counter[str] = Counter()
        self._batches = 0

    async def prepare(self) -> None:
        """Make the world: all resources belong to somebody else, except the foreign stream."""
        admin = self.client.admin
        await admin.create_stream(
            FOREIGN, streamlets=STREAMLETS, entries=2, replication=1, retention_bytes=FOREIGN_BYTES
        )
        request = coordinator_pb2.DescribeStreamRequest(name=FOREIGN)
        described = await call(self._coordinator, api.DESCRIBE_STREAM, request, timeout_s=ANSWER_S_MAX)
        members = await admin.describe_cluster()
        others = [stream for stream in await admin.list_streams() if stream.name != FOREIGN]
        groups = [group.consumer_group for group in await admin.consumer_groups()]
        ids = [await self._new_producer() for _ in range(PRODUCERS)]
        known = {each.broker_id: each for each in described.brokers}
        self._world = World(
            foreign=theirs_of(described.stream, known, FOREIGN, leading_epoch(self.cluster)),
            names=frozenset([*(stream.name for stream in others), *groups]),
            stream_ids=frozenset(stream.stream_id for stream in others),
            member_ids=frozenset(
                [*(each.broker_id for each in members.brokers), *(each.backup_id for each in members.backups)]
            ),
            producer_ids=tuple(ids),
        )

    async def _new_producer(self) -> int:
        request = coordinator_pb2.InitProducerRequest()
        return int((await call(self._coordinator, api.INIT_PRODUCER, request, timeout_s=ANSWER_S_MAX)).producer_id)

    async def close(self) -> None:
        """Close what is open."""
        for talk in self._talks.values():
            await talk.close()
        await self._coordinator.close()

    # -- batches -----------------------------------------------------------------------------------------------

    async def run(self, seconds: float) -> None:
        """Run one batch after the other."""
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + seconds and len(self.report.defects) < KEPT:
            await self.batch()
        self.report.seconds += time.monotonic() - begun_s

    async def run_valid(self, seconds: float) -> None:
        """Run batches of valid requests, to measure how long others wait then. They do not count in the report."""
        if self._world is None:
            raise AssertionError("there is no world yet")
        spoiling, self._world, counted = self._world, replace(self._world, valid=1.0), self.report
        self.report = Report(counted.seed, defects=counted.defects)
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + seconds and len(self.report.defects) < KEPT:
            await self.batch(VALID_PROTOCOLS)
        self._world, self.report = spoiling, counted
        self._batches = 0
        for talk in self._talks.values():
            talk.outcomes.clear()

    async def batch(self, protocols: Mapping[str, Sequence[Callable[..., Any]]] = PROTOCOLS) -> None:
        """Send some inputs to each port, then check all daemons."""
        async with asyncio.TaskGroup() as tasks:
            for port in self._ports:
                for protocol in (UNENCRYPTED if port.who == NOT_TLS else protocols).get(port.kind, ()):
                    count = BATCH_SLOW if port.kind == "metrics_address" or port.who else BATCH
                    source = iter(self._inputs(port, protocol, count))
                    for _ in range(AT_ONCE):
                        tasks.create_task(self._talk(port, source))
        self._batches += 1
        await self._clean()
        await self._check()

    def _inputs(self, port: Port, protocol: Callable[..., Any], count: int) -> Iterator[tuple[str, Any]]:
        if self._world is None:
            raise AssertionError("there is no world yet")
        name = f"{port} {protocol.__name__}"
        world = replace(self._world, asks=port.who == STRANGER)
        for _ in range(count):
            number = self._numbers[name]
            self._numbers[name] += 1
            yield f"{name} {number}", protocol(port.role, world, Random(f"{self.report.seed} {name} {number}"))

    async def _talk(self, port: Port, source: Iterator[tuple[str, Any]]) -> None:
        talk = self._talks[port]
        for name, what in source:
            self.report.inputs[str(port)] += 1
            self.report.requests[str(port)] += max(1, what.requests if isinstance(what, Sent) else len(what.messages))
            try:
                await talk.say(what)
            except Defect as defect:
                self._defect(f"seed {self.report.seed} {name}: {defect}")
        self.report.outcomes[str(port)] = talk.outcomes

    def _defect(self, text: str) -> None:
        if len(self.report.defects) < 4 * KEPT:
            self.report.defects.append(text)

    async def ask_for_memory(self) -> None:
        """Have strangers make daemons use memory, see `greedy`."""
        for port in self._ports:
            if port.who != STRANGER:
                continue
            pid = self.cluster.processes[port.daemon]
            found = await greedy.taken(port, self._door.access[STRANGER], pid, own_bytes=OWN_BYTES)
            self.report.taken_bytes[str(port)] = max(found.values())
            for what, most in found.items():
                if most > greedy.limit(port):
                    self._defect(f"{port} takes {most >> 10} KiB for each connection of strangers, by {what}")
        await self._check()

    # -- after a batch -----------------------------------------------------------------------------------------

    async def _check(self) -> None:
        gone = sorted(self.cluster.ready.keys() - self.cluster.processes.keys())
        if gone:
            self._defect(f"batch {self._batches}: ended: {gone}")
        for text in self._logs.defects():
            self._defect(f"batch {self._batches}: {text}")
        for name, ready in self.cluster.ready.items():
            if name not in gone:
                await self._require_answer(name, str(ready["grpc_address"]))
        for name, pid in self.cluster.processes.items():
            now = resident_bytes(pid)
            if self._batches == WARM_BATCHES:
                self.report.warm_bytes[name] = now
            if name in self.report.warm_bytes:
                self.report.resident_bytes[name] = now

    async def _require_answer(self, daemon: str, address: str) -> None:
        channel = self._door.channel(address)
        try:
            await call(channel, api.DESCRIBE_DAEMON, daemon_pb2.DescribeDaemonRequest(), timeout_s=ANSWER_S_MAX)
        except KeraError as error:
            self._defect(f"batch {self._batches}: {daemon} does not answer: {error!r}")
        finally:
            await channel.close()

    async def _clean(self) -> None:
        """Remove the resources that requests have made, so that daemons do not run out of room."""
        admin, world = self.client.admin, self._world
        if world is None:
            return
        for stream in await admin.list_streams():
            if stream.stream_id not in world.stream_ids and stream.name != FOREIGN:
                await admin.delete_stream(stream.name)
        for group in await admin.consumer_groups():
            if group.consumer_group not in world.names:
                with contextlib.suppress(KeraError):  # it still has members
                    await admin.delete_consumer_group(group.consumer_group)
        await self._forget_members(world)
        for port in self._ports:
            if port.role == "backup" and port.kind == "frames_address" and self._door.tls is None:
                await self._free_replicas(port, world.strangers)
        world.strangers.clear()

    async def _free_replicas(self, port: Port, broker_ids: set[int]) -> None:
        channel = await FrameChannel.connect_tcp(port.address, timeout_s=ANSWER_S_MAX)
        requests = [
            backup_pb2.FreeReplicasRequest(broker_id=each, broker_epoch=EPOCH_MAX, before_epoch=EPOCH_MAX)
            for each in sorted(broker_ids)
        ]
        answers = [channel.submit(api.FREE_REPLICAS, each, timeout_s=ANSWER_S_MAX) for each in requests]
        await asyncio.gather(*answers, return_exceptions=True)
        await channel.close()

    async def _forget_members(self, world: World) -> None:
        members = await self.client.admin.describe_cluster()
        requests = [
            *(coordinator_pb2.ForgetMemberRequest(broker_id=each.broker_id) for each in members.brokers),
            *(coordinator_pb2.ForgetMemberRequest(backup_id=each.backup_id) for each in members.backups),
        ]
        for request in requests:
            if (request.broker_id or request.backup_id) not in world.member_ids:
                with contextlib.suppress(KeraError):
                    await call(self._coordinator, api.FORGET_MEMBER, request, timeout_s=ANSWER_S_MAX)


@contextlib.asynccontextmanager
async def clusters(directory: Path, *, security: bool) -> AsyncIterator[tuple[LocalCluster, Door]]:
    """A cluster with two brokers and two backups."""
    sizes: dict[str, Any] = {"brokers": 2, "backups": 2, "backup_memory_bytes": BACKUP_BYTES}
    settings = {"heartbeats_missed_max": 25, "metrics_port": 0}  # two shared cores are slow
    if not security:
        others: dict[str, Any] = {"coordinator_settings": settings, "backup_settings": {"metrics_port": 0}}
        async with control_cluster(directory, **sizes, **others) as cluster:
            yield cluster, Door()
        return
    settings["heartbeat_interval_ms"] = HEARTBEAT_MS
    sizes |= {"arena_bytes": 32 << 20, "segment_bytes": SEGMENT_BYTES, "replication": 1}
    async with secured_cluster(directory, **sizes, coordinator_settings=settings) as (cluster, door):
        yield cluster, door


@contextlib.asynccontextmanager
async def fuzzed(directory: Path, seed: int, *, security: bool) -> AsyncIterator[tuple[Field, Load, Probing]]:
    """Start a cluster, a load and a probe. Yields what fuzzes it, the load and the probe."""
    async with (
        clusters(directory, security=security) as (cluster, door),
        await Client.connect(cluster.bootstrap) as client,
    ):
        await client.admin.create_stream(PROBED, streamlets=STREAMLETS, replication=1)
        options = Options(seconds=6 * 3600.0, rate=RATE, streamlets=STREAMLETS, replication=1, seed=seed)
        async with probing(cluster.bootstrap, PROBED) as probe, loaded(cluster.bootstrap, options) as load:
            await load.until_acknowledged(10)
            made = Field(cluster, client, seed, door)
            try:
                await made.prepare()
                yield made, load, probe
            finally:
                await made.close()
        outcome = load.outcome
        made.report.verdict, made.report.acknowledged = outcome.verdict, outcome.acknowledged
        if outcome.verdict != "kept":
            made.report.defects += [f"kera check: {outcome.verdict} {outcome.impossible or ''}", *outcome.lines]


async def run(
    directory: Path, seed: int, seconds: float, *, idle_s: float | None = None, security: bool = False
) -> Report:
    """Fuzz for `seconds`. Measuring alone and beside valid requests takes a tenth of it each, or `idle_s`."""
    idle_s = seconds / 10 if idle_s is None else idle_s
    async with fuzzed(directory, seed, security=security) as (made, _, probe):
        await probe.report()
        await asyncio.sleep(idle_s)  # sleep: measures the client while nothing else is sent
        made.report.idle = await probe.report()
        await made.run_valid(idle_s)
        made.report.valid = await probe.report()
        await made.run(seconds - 2 * idle_s)
        made.report.busy = await probe.report()
        if security:
            await made.ask_for_memory()
    report = made.report
    for when, found in (("alone", report.idle), ("beside good requests", report.valid), ("beside these", report.busy)):
        report.defects += [f"a client that behaves well, {when}: {text}" for text in found["errors"][:KEPT]]
    report.defects += [
        f"{name} has grown by {grown >> 20} MiB"
        for name, grown in report.grown_bytes().items()
        if grown > GROWTH_BYTES_MAX
    ]
    return report
