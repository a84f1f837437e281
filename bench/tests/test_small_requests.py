"""The load generator for small requests, against a broker that only inspects its requests."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.common import Figures, parser
from bench.small_requests import Load, NoCompiler, chunk_of, compile_load, frames_of, table
from kera.client.types import StreamDescription
from kera.core.base.settings import KIB, MIB
from kera.core.format.chunk import ChunkHeader, verify_chunk
from kera.core.rpc import api
from kera.core.rpc.frames import HEADER_BYTES, FrameHeader, FrameKind, decode_header, encode_error, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.v1 import broker_pb2, common_pb2
from tests.unit.client.support import description

TIMEOUT_S = 30
Answer = Callable[[int], bytes]
"""From a request id to the frame of the answer."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return compile_load(tmp_path_factory.mktemp("load"))
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def stream() -> StreamDescription:
    return description(streamlets=2)


def accepted(request_id: int) -> bytes:
    reply = broker_pb2.MultiWriteChunksResponse(statuses=[broker_pb2.ChunkStatus(entry=0, group_id=1)])
    return b"".join(encode_frame(FrameKind.REPLY, api.MULTI_WRITE_CHUNKS, request_id, reply, (), BULK_BYTES_MAX))


class Peer:
    """Takes requests over any number of connections, and answers those that arrive together, the last one first."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.chunks: list[ChunkHeader] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        received = b""
        with connection, contextlib.suppress(OSError):  # a refused client has gone
            while data := connection.recv(MIB):
                received += data
                ids = []
                while frame := self._frame(received):
                    ids.append(frame.request_id)
                    received = received[HEADER_BYTES + frame.head_bytes + frame.bulk_bytes :]
                connection.sendall(b"".join(map(self._answer, reversed(ids))))

    def _frame(self, received: bytes) -> FrameHeader | None:
        """The first frame, if it is complete; its chunk is noted."""
        if len(received) < HEADER_BYTES:
            return None
        frame = decode_header(memoryview(received), 0, BULK_BYTES_MAX)
        bulk_at = HEADER_BYTES + frame.head_bytes
        if len(received) < bulk_at + frame.bulk_bytes:
            return None
        self.chunks.append(verify_chunk(memoryview(received)[bulk_at : bulk_at + frame.bulk_bytes], 0))
        return frame

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)


@contextmanager
def serving(path: Path, answer: Answer) -> Iterator[Peer]:
    peer = Peer(path, answer)
    try:
        yield peer
    finally:
        peer.close()


def sent(
    program: Path, folder: Path, frames: bytes, count: int, in_flight: int = 4, rate: float = 0, seconds: float = 0.2
) -> subprocess.CompletedProcess[str]:
    (folder / "frames").write_bytes(frames)
    numbers: Sequence[Any] = (len(frames) // count, in_flight, rate, 0, seconds)
    command = [str(program), str(folder / "socket"), str(folder / "frames"), *map(str, numbers)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def requests(stream: StreamDescription, *producers: int) -> bytes:
    return frames_of([chunk_of(stream, KIB, producer, lean=True) for producer in producers])


def test_each_request_is_a_valid_chunk_with_its_producers_next_sequence(
    program: Path, stream: StreamDescription, tmp_path: Path
) -> None:
    with serving(tmp_path / "socket", accepted) as peer:
        ran = sent(program, tmp_path, requests(stream, 10, 11), count=2)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["sent"] == len(peer.chunks) >= 8
    assert found["answered"] <= found["sent"]
    for producer in (10, 11):
        chunks = [chunk for chunk in peer.chunks if chunk.producer_id == producer]
        assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
        assert {chunk.streamlet_id for chunk in chunks} == {producer % 2}


def test_a_refusal_ends_the_program_with_the_brokers_message(
    program: Path, stream: StreamDescription, tmp_path: Path
) -> None:
    def refused(request_id: int) -> bytes:
        return encode_error(api.MULTI_WRITE_CHUNKS.number, request_id, common_pb2.Error(message="no such stream"))

    def refused_chunk(request_id: int) -> bytes:
        status = broker_pb2.ChunkStatus(error=common_pb2.Error(message="out of sequence"))
        reply = broker_pb2.MultiWriteChunksResponse(statuses=[status])
        return b"".join(encode_frame(FrameKind.REPLY, api.MULTI_WRITE_CHUNKS, request_id, reply, (), BULK_BYTES_MAX))

    for answer, words in ((refused, "no such stream"), (refused_chunk, "out of sequence")):
        with serving(tmp_path / "socket", answer):
            ran = sent(program, tmp_path, requests(stream, 1), count=1)
        (tmp_path / "socket").unlink()
        assert ran.returncode == 1
        assert words in ran.stderr


def test_a_rate_limits_the_requests_sent(program: Path, stream: StreamDescription, tmp_path: Path) -> None:
    with serving(tmp_path / "socket", accepted) as peer:
        ran = sent(program, tmp_path, requests(stream, 1, 2), count=2, rate=200, seconds=0.1)
    assert ran.returncode == 0, ran.stderr
    assert 0 < json.loads(ran.stdout)["sent"] <= 21
    assert {chunk.producer_id for chunk in peer.chunks} == {1}


@pytest.mark.parametrize("request_bytes", [KIB, 16 * KIB])
@pytest.mark.parametrize("lean", [True, False])
def test_a_chunk_is_as_large_as_the_request_allows(
    stream: StreamDescription, request_bytes: int, *, lean: bool
) -> None:
    chunk = chunk_of(stream, request_bytes, 1, lean=lean)
    assert request_bytes - 128 < chunk.chunk_bytes <= request_bytes
    assert verify_chunk(memoryview(chunk.to_bytes()), 0).version == (2 if lean else 1)


def test_a_load_is_a_line_of_the_table(tmp_path: Path) -> None:
    figures, load = Figures("small_requests", parser(None).parse_args([]), tmp_path), Load("native", 1, KIB)
    figures.add(f"{load}: requests", 1000, "1/s")
    figures.add(f"{load}: throughput", 1, "MB/s")
    assert table(figures, [load]).splitlines()[-1] == "| native | 1 | 1 KiB | 1,000 | 1 |"
