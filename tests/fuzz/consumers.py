"""Chunks with valid checksums and wrong records in the log of a real broker, and consumers that read them.

Each consumer is a process with bounded memory: one uses the SDK, one reads as a Python worker of Spark does, and one is
``kera consume``. Checks: no consumer ends, hangs or takes much memory; a chunk is read, or refused with an error of
KerA's that names its stream and its place there. The broker accepts every chunk (`UncheckedCluster`), as an older
broker may have done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kera.client import Client
from kera.core.base.ids import PRODUCER_IDS
from kera.core.format.chunk import HEADER_BYTES, read_header
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2
from tests.chaos.chunk_uses import spark_has
from tests.chaos.unchecked import UncheckedCluster
from tests.fuzz.payloads import framed, sources, spoilt_payload
from tests.fuzz.poisoned_reader import MEMORY_BYTES_MAX
from tests.fuzz.running import Report
from tests.fuzz.target import random_of
from tests.integration.field_mutants import with_field

KINDS = ("sdk", "spark")
SEGMENT_BYTES = 1 << 20
ARENA_BYTES = 128 << 20
PAYLOAD_BYTES_MAX = SEGMENT_BYTES - 4 * HEADER_BYTES
ANSWER_S = 30.0
PER_STREAM = 16
COMMAND_S = 60.0
PLACE = ("stream", "streamlet_id", "entry", "position")


class Poisoned(NamedTuple):
    """A chunk in a log."""

    number: int
    """The number of the input."""
    stream: str
    start: list[int]
    end: list[int]
    first_record: int
    records: int
    is_for_spark: bool

    @property
    def asked(self) -> str:
        """The line that asks a reader to read it."""
        fields = {"stream": self.stream, "start": self.start, "end": self.end}
        return json.dumps({**fields, "first_record": self.first_record, "records": self.records}) + "\n"


class Poisoning:
    """A writer of poisoned chunks."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._seed = seed
        self._channels: dict[str, Channel] = {}

    async def close(self) -> None:
        """Close what is open."""
        for channel in self._channels.values():
            await channel.close()

    async def write(self, first: int) -> list[Poisoned]:
        """Write some chunks with one kind of payload to a new stream."""
        source = sources()[first // PER_STREAM * 7 % len(sources())]
        typed = not source.batch.schema.equals(DEFAULT_SCHEMA)
        name = f"poisoned-{first}"
        schema: dict[str, Any] = {"schema": source.batch.schema} if typed else {}
        stream = await self._client.admin.create_stream(name, streamlets=1, **schema)
        chunks = []
        for number in range(first, first + PER_STREAM):
            payload = spoilt_payload(source, random_of("consumers", self._seed, number))
            chunk = framed(source, payload[:PAYLOAD_BYTES_MAX], sequence=number - first)
            ids = {
                "stream_id": stream.stream_id,
                "schema_id": stream.schema_id,
                "producer_id": PRODUCER_IDS.start + first,
            }
            for field, value in ids.items():
                chunk = with_field(chunk, field, value)
            chunks.append(chunk)
        broker = stream.brokers[stream.assignments[0].broker_id]
        channel = await self._to(broker.frames_address)
        found, ordinal = [], 0
        for number, chunk in enumerate(chunks, first):
            request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
            reply = await channel.submit(api.MULTI_WRITE_CHUNKS, request, [chunk], timeout_s=ANSWER_S)
            (status,) = reply.message.statuses
            if status.HasField("error"):
                raise AssertionError(f"not taken: {status.error}")
            at, header = [status.group_id, status.segment_id, status.position], read_header(chunk)
            end = [*at[:2], at[2] + header.chunk_bytes]
            found.append(Poisoned(number, name, at, end, ordinal, header.record_count, spark_has(source.batch.schema)))
            ordinal += header.record_count
        return found

    async def _to(self, address: str) -> Channel:
        if address not in self._channels:
            self._channels[address] = await FrameChannel.connect_tcp(address, timeout_s=ANSWER_S)
        return self._channels[address]


class Consumer:
    """One of the reader processes, started anew when it has ended."""

    def __init__(self, kind: str, bootstrap: str) -> None:
        self.kind = kind
        self._command = [sys.executable, "-m", "tests.fuzz.poisoned_reader", kind, bootstrap]
        self._process: asyncio.subprocess.Process | None = None

    async def read(self, chunk: Poisoned) -> dict[str, Any] | str:
        """The outcome of a chunk, or a text if the process has ended or hangs."""
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, limit=1 << 24)
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise AssertionError("there is no pipe")
        process.stdin.write(chunk.asked.encode())
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await process.stdout.readline()
        except TimeoutError:
            await self.close()
            return f"no answer within {ANSWER_S:g} s"
        if not line:
            code = await process.wait()
            self._process = None
            return f"the process ended with {code}"
        told: dict[str, Any] = json.loads(line)
        return told

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


def defect_of(chunk: Poisoned, told: dict[str, Any] | str) -> str | None:
    """The defect in the outcome of a chunk, if there is one."""
    if isinstance(told, str):
        return told
    outcome, attributes, text = told["outcome"], told.get("attributes", {}), str(told.get("message"))
    place = [attributes.get(name) for name in PLACE]
    if outcome == "corrupt_chunk":
        is_named = (
            place == [chunk.stream, 0, 0, chunk.start] and chunk.stream in text and str(tuple(chunk.start)) in text
        )
    else:  # `schema_mismatch` of a column: Spark lacks such values
        is_named = outcome == "read" or (
            outcome == "schema_mismatch" and place[0] == chunk.stream and "record" in attributes
        )
    return None if is_named else f"{outcome}, or it does not say where: {text} {attributes}"


def command_defects(bootstrap: str, stream: str) -> Iterator[str]:
    """The defects of ``kera consume`` with a stream."""
    # A shell sets the limit: this process has gRPC in it, so a forked child that runs Python may end before `exec`.
    limit = ["sh", "-c", f'ulimit -v {MEMORY_BYTES_MAX >> 10} && exec "$@"', "sh"]
    for corrupt_chunks, codes in (("fail", (0, 1)), ("skip", (0,))):
        command = [
            sys.executable,
            "-m",
            "kera.cli",
            "consume",
            stream,
            "--bootstrap",
            bootstrap,
            "--until-end",
            "--json",
        ]
        done = subprocess.run(
            [*limit, *command, "--corrupt-chunks", corrupt_chunks], capture_output=True, timeout=COMMAND_S, check=False
        )
        said = done.stderr.decode("utf-8", "replace")
        if done.returncode not in codes or "Traceback" in said:
            yield f"kera consume {stream} --corrupt-chunks {corrupt_chunks} ended with {done.returncode}: {said[-800:]}"
        elif done.returncode and f"of stream {stream!r}" not in said:
            yield f"kera consume {stream} does not say where: {said[-400:]}"


@contextlib.asynccontextmanager
async def poisoned(directory: Path, seed: int) -> AsyncIterator[tuple[LocalCluster, Poisoning]]:
    """Start a cluster that accepts such chunks, and a writer."""
    settings = {"metrics_port": 0}
    async with (
        UncheckedCluster(
            data_dir=directory,
            brokers=1,
            arena_bytes=ARENA_BYTES,
            segment_bytes=SEGMENT_BYTES,
            broker_settings=settings,
        ) as cluster,
        await Client.connect(cluster.bootstrap) as client,
    ):
        writing = Poisoning(client, seed)
        try:
            yield cluster, writing
        finally:
            await writing.close()


async def run(directory: Path, seed: int, seconds: float, *, commands: int = 3) -> list[Report]:
    """Write such chunks for `seconds`, and have them read. ``kera consume`` reads the first few streams."""
    reports = {kind: Report(f"consumers-{kind}", seed) for kind in (*KINDS, "command")}
    async with poisoned(directory, seed) as (cluster, writing):
        consumers = [Consumer(kind, cluster.bootstrap) for kind in KINDS]
        begun_s, first = time.monotonic(), 0
        while time.monotonic() < begun_s + seconds or not first:
            chunks = await writing.write(first)
            await asyncio.gather(*(_read_all(each, chunks, reports[each.kind]) for each in consumers))
            if first // PER_STREAM < commands:
                report = reports["command"]
                found = await asyncio.to_thread(
                    lambda name: list(command_defects(cluster.bootstrap, name)), chunks[0].stream
                )
                report.inputs += 1
                report.outcomes["as it should be" if not found else "wrong"] += 1
                report.defects += found
            await writing._client.admin.delete_stream(chunks[0].stream)
            first += PER_STREAM
        for each in consumers:
            await each.close()
    for report in reports.values():
        report.taken_s = time.monotonic() - begun_s
    return list(reports.values())


async def _read_all(consumer: Consumer, chunks: list[Poisoned], report: Report) -> None:
    for chunk in chunks:
        if consumer.kind == "spark" and not chunk.is_for_spark:
            continue
        begun_s = time.monotonic()
        told = await consumer.read(chunk)
        report.inputs += 1
        report.slowest_s = max(report.slowest_s, time.monotonic() - begun_s)
        report.outcomes[told if isinstance(told, str) else told["outcome"]] += 1
        defect = defect_of(chunk, told)
        if defect is not None:
            report.defects.append(f"consumers seed {report.seed} input {chunk.number} ({consumer.kind}): {defect}")
