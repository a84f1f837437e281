"""Targets in Java: decoders of the columnar engine in Spark's executors. One JVM gets thousands of inputs.

The program is ``kera.wire.Decoding`` in ``tests/spark/jvm``. An exception that is neither an `IOException` nor an error
of KerA's is a defect, and so is the end of the JVM.
"""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.push import RUN, PushKind, encode
from kera.core.rpc import api
from kera.core.rpc.frames import HEADER_BYTES, FrameKind
from kera.spark_connector.columns import HEADERS_COLUMN, RECORD_COLUMNS, columns_of
from kera.v1 import broker_pb2, common_pb2, push_pb2
from tests.chaos.chunk_uses import spark_has
from tests.fuzz.chunk_targets import numbered
from tests.fuzz.client_targets import ARENA_BYTES, broker_hello, log_chunks, some_run
from tests.fuzz.exchanges import Frame, conversation, filled, theirs
from tests.fuzz.mutating import mutated
from tests.fuzz.payloads import framed, placed, sources, spoilt_chunk, spoilt_payload, with_payload
from tests.fuzz.protobuf import spoilt
from tests.fuzz.running import KEPT, Report
from tests.fuzz.target import random_of
from tests.fuzz.wire_targets import spoilt_error
from tests.spark.jvm_harness import compiled
from tests.spark.test_jvm_columns import text

HEAD = struct.Struct(">BI")
SCHEMA_KIND = 255
AT_ONCE = 200
STILL_S_MAX = 30.0
OUTCOMES = ("read", "refused", "defect")


class JavaTarget(NamedTuple):
    """A decoder in Java."""

    name: str
    kind: int
    """The number that names it to the program."""
    make: Callable[[Random], bytes]


def _of(message: Any) -> Callable[[Random], bytes]:
    return lambda random_: spoilt(message, random_)


def _frame_header(random_: Random) -> bytes:
    data = bytearray(Frame(random_.choice((1, 2, 3)), 2, 1, b"").data)
    return bytes(mutated(bytes(data), random_)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))


def _chunks(random_: Random) -> bytes:
    chunks = [spoilt_chunk(each, random_) if random_.random() < 0.4 else each for each in log_chunks()]
    return b"".join(chunks[: random_.randrange(1, 4)])


@cache
def _columnar() -> list[int]:
    """Numbers of the sources for which the engine has columns."""
    return [number for number, source in enumerate(sources()) if spark_has(source.batch.schema)]


def _columns(random_: Random) -> bytes:
    at = random_.randrange(len(_columnar()))
    source = sources()[_columnar()[at]]
    payload = spoilt_payload(source, random_)
    chunk = placed(with_payload(framed(source, b"x"), payload))
    return numbered(at, chunk)


def _schemas() -> Iterator[bytes]:
    for number in _columnar():
        schema = sources()[number].batch.schema
        typed = not schema.equals(DEFAULT_SCHEMA)
        columns = columns_of(schema, typed=True) if typed else type(RECORD_COLUMNS)([*RECORD_COLUMNS, HEADERS_COLUMN])
        told = {"schema": text(schema_to_bytes(schema)), "typed": typed, "wanted": columns.jsonValue()}
        yield json.dumps(told).encode()


def _answers(random_: Random) -> bytes:
    """A broker's answers to requests 1, 2, … for copies."""
    frames, position = [], 0
    for number in range(1, random_.randrange(2, 5)):
        chunks = _chunks(random_)
        message = broker_pb2.MultiReadChunksResponse()
        row = message.results.add(length_bytes=len(chunks))
        position += len(chunks)
        row.next.CopyFrom(common_pb2.Cursor(stream_id=7, group_id=1, segment_id=1, position=position))
        head = spoilt(message, random_) if random_.random() < 0.3 else message.SerializeToString()
        kind, bulk = FrameKind.REPLY, chunks
        if random_.random() < 0.1:
            kind, head, bulk = FrameKind.ERROR, spoilt_error(random_), b""
        frames.append(Frame(kind, api.MULTI_READ_CHUNKS.number, number, head, bulk))
    return conversation(frames, random_) if random_.random() < 0.5 else b"".join(frame.data for frame in frames)


def _pushed(random_: Random) -> bytes:
    """A greeting, followed by pushed messages."""
    hello = broker_hello(arena_path="arena")
    messages = [encode(PushKind.HELLO, spoilt(hello, random_) if random_.random() < 0.2 else hello.SerializeToString())]
    for _ in range(random_.randrange(1, 5)):
        if random_.random() < 0.2:
            end = push_pb2.PushEnd(lane=1, reason=random_.randrange(1, 6))  # type: ignore[arg-type]  # a number of it
            end.next.CopyFrom(theirs().cursors[0])
            messages.append(encode(PushKind.END, spoilt(end, random_)))
        else:
            runs = [some_run(random_)._replace(lane=1) for _ in range(random_.choice((1, 2)))]
            messages.append(encode(PushKind.RUNS, b"".join(RUN.pack(*run) for run in runs)))
    data = b"".join(messages)
    return mutated(data, random_, messages) if random_.random() < 0.2 else data


JAVA_TARGETS = (
    JavaTarget("java-greetings", 0, _of(broker_hello())),
    JavaTarget("java-lane-ends", 1, _of(filled(push_pb2.PushEnd))),
    JavaTarget("java-read-answers", 2, _of(filled(broker_pb2.MultiReadChunksResponse))),
    JavaTarget("java-write-answers", 3, _of(filled(broker_pb2.MultiWriteChunksResponse))),
    JavaTarget("java-errors", 4, spoilt_error),
    JavaTarget("java-frame-header", 5, _frame_header),
    JavaTarget("java-chunks", 6, _chunks),
    JavaTarget("java-columns", 7, _columns),
    JavaTarget("java-frames", 8, _answers),
    JavaTarget("java-push", 9, _pushed),
)


class Decoding:
    """The running program."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._answers: queue.Queue[tuple[int, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        for each in _schemas():
            self.give(SCHEMA_KIND, [each])

    def _read(self) -> None:
        out = self._process.stdout
        while out is not None and (head := out.read(HEAD.size)):
            outcome, size = HEAD.unpack(head)
            self._answers.put((outcome, out.read(size).decode("utf-8", "replace")))

    def give(self, kind: int, inputs: Sequence[bytes]) -> list[tuple[int, str]]:
        """The outcome of each input, and the text of its exception. Returns fewer if the program ends or hangs."""
        given = self._process.stdin
        if given is None:
            raise AssertionError("there is no pipe")
        with contextlib.suppress(BrokenPipeError):
            given.write(b"".join(HEAD.pack(kind, len(data)) + data for data in inputs))
            given.flush()
        found: list[tuple[int, str]] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < len(inputs):
                found.append(self._answers.get(timeout=STILL_S_MAX))
        return found


@contextlib.contextmanager
def decoding(folder: Path) -> Iterator[Decoding]:
    """Run the program in `folder`."""
    command = compiled("kera.wire.Decoding")
    folder.mkdir(exist_ok=True)
    (folder / "arena").write_bytes(bytes(ARENA_BYTES))
    with (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        with process:
            try:
                yield Decoding(process)
            finally:
                process.kill()


def run(target: JavaTarget, java: Decoding, seed: int, seconds: float, *, inputs_max: int = 1 << 40) -> Report:
    """Give inputs to a target for `seconds`."""
    report, begun_s, number = Report(target.name, seed), time.monotonic(), 0
    while time.monotonic() < begun_s + seconds and number < inputs_max and len(report.defects) < KEPT:
        count = min(AT_ONCE, inputs_max - number)
        inputs = [target.make(random_of(target.name, seed, number + at)) for at in range(count)]
        found = java.give(target.kind, inputs)
        for at, (outcome, told) in enumerate(found):
            report.outcomes[OUTCOMES[outcome]] += 1
            if told and len(report.defects) < KEPT:
                report.defects.append(f"{target.name} seed {seed} input {number + at}: {told}")
        number += len(found)
        if len(found) < count:
            report.defects.append(f"{target.name} seed {seed} input {number}: the JVM has ended, or stands still")
            break
    report.inputs, report.taken_s = number, time.monotonic() - begun_s
    return report
