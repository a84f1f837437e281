"""The `kera` command against a real cluster: what a user types, and what comes out."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client
from kera.core.errors import UnknownStream
from kera.local.cluster import LocalCluster
from kera.server.feature_level import FEATURE_LEVEL
from tests.integration.command_line import run_kera
from tests.integration.unreadable import write_a_chunk_that_nobody_can_read

BOUND_S = 60


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with LocalCluster.running(brokers=2, arena_bytes=64 << 20, segment_bytes=1 << 20) as cluster:
        yield cluster.bootstrap


class Kera:
    """Runs `kera` for a test, which has a stream name for itself."""

    def __init__(self, bootstrap: str, stream: str) -> None:
        self.bootstrap = bootstrap
        self.stream = stream

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start the command as a process of its own."""
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        argv = [sys.executable, "-m", "kera.cli", *arguments]
        environment = {**os.environ, "KERA_BOOTSTRAP": self.bootstrap}
        return subprocess.Popen(argv, env=environment, **(pipes | options))

    def run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return run_kera(*arguments, stdin=stdin, env={"KERA_BOOTSTRAP": self.bootstrap})

    def __call__(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Standard output of a command that succeeds."""
        ended = self.run(*arguments, stdin=stdin)
        assert ended.returncode == 0, ended.stderr.decode()
        return ended.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def fails(self, code: int, *arguments: str, stdin: bytes = b"") -> str:
        """The one line that a command which fails with `code` writes."""
        ended = self.run(*arguments, stdin=stdin)
        assert ended.returncode == code, ended.stderr.decode()
        (line,) = ended.stderr.decode().splitlines()
        assert line.startswith("kera: error: ")
        return line.removeprefix("kera: error: ")


@pytest.fixture
def kera(bootstrap: str, request: pytest.FixtureRequest) -> Iterator[Kera]:
    stream = re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))[:60].strip("-")
    yield Kera(bootstrap, stream)

    async def delete() -> None:
        async with await Client.connect(bootstrap) as client:
            with contextlib.suppress(UnknownStream):
                await client.admin.delete_stream(stream)

    asyncio.run(delete())


@pytest.fixture
def stream(kera: Kera) -> str:
    """An untyped stream with one streamlet."""

    async def create() -> None:
        async with await Client.connect(kera.bootstrap) as client:
            await client.admin.create_stream(kera.stream)

    asyncio.run(create())
    return kera.stream


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {BOUND_S} s: {what}"
        time.sleep(0.02)


# --- streams and the cluster -------------------------------------------------------------------------------


def test_a_stream_is_created_listed_described_and_deleted(kera: Kera) -> None:
    name = kera.stream
    created = kera("stream", "create", name, "--streamlets", "3", "--entries", "2", "--codec", "lz4").decode()
    assert re.fullmatch(rf"created {name}: id \d+, 3 streamlets on brokers 1, 2\n", created)

    (listed,) = [item for item in kera.json("stream", "list") if item["name"] == name]
    assert listed["config"]["streamlets"] == 3
    assert re.search(rf"^{name} +\d+ +3 +2 +0 +leader +lz4 +bytes ", kera("stream", "list").decode(), re.MULTILINE)

    described = kera.json("stream", "describe", name)
    assert [(item["streamlet"], len(item["entries"])) for item in described["streamlets"]] == [
        (0, 2),
        (1, 2),
        (2, 2),
    ]
    assert [field["name"] for field in described["schema"]] == ["timestamp", "keys", "value", "headers"]

    assert kera("stream", "delete", name, "--yes") == f"deleted {name}\n".encode()
    assert name not in kera("stream", "list").decode()
    assert kera.fails(1, "stream", "describe", name) == f"there is no stream '{name}'"


def test_describing_a_stream_shows_its_records_and_offsets(kera: Kera, stream: str) -> None:
    kera("produce", stream, stdin=b"a\nb\nc\n")

    text = kera("stream", "describe", stream).decode()

    assert re.search(r"^ +0 +[12] +0 +3 +0 +3 +\d\S* [KMG]?i?B +1/1\+\d+$", text, re.MULTILINE), text
    (entry,) = kera.json("stream", "describe", stream)["streamlets"][0]["entries"]
    assert (entry["first_record"], entry["next_record"]) == (0, 3)
    assert entry["end"]["offset"] == entry["length_bytes"]


def test_an_existing_or_invalid_stream_is_not_created(kera: Kera, stream: str) -> None:
    assert stream in kera.fails(1, "stream", "create", stream)
    assert "durability" in kera.fails(1, "stream", "create", stream + "-2", "--durability", "eternal").lower()
    assert "Arrow has no type integer" in kera.fails(2, "stream", "create", stream + "-2", "--column", "a:integer")
    kera.fails(1, "stream", "delete", stream + "-2", "--yes")


@pytest.mark.slow
def test_creating_a_stream_without_enough_backups_says_what_is_missing(kera: Kera) -> None:
    error = kera.fails(1, "stream", "create", kera.stream, "--replication", "2")

    assert error == (
        f"stream {kera.stream!r} needs 2 live backups (its replication), there is none;"
        " start more, or ask for less replication"
    )
    unknown = kera.fails(1, "stream", "create", kera.stream, "--durability", "replicated")
    assert unknown.startswith('durability "replicated" needs replication of at least 1')


@pytest.mark.slow
def test_a_stream_has_at_most_one_virtual_log_for_each_entry(kera: Kera) -> None:
    kera("stream", "create", kera.stream, "--streamlets", "2", "--entries", "2", "--virtual-logs", "2")
    kera("stream", "alter", kera.stream, "--virtual-logs", "4")

    config = kera.json("stream", "describe", kera.stream)["config"]
    assert (config["replication"], config["virtual_logs"]) == (0, 4)
    error = kera.fails(1, "stream", "alter", kera.stream, "--virtual-logs", "5")
    assert error.startswith("virtual_logs must be between 1 and 4, not 5")


def test_deleting_a_stream_asks_for_confirmation_on_a_terminal(kera: Kera, stream: str) -> None:
    for answer, code in ((b"n\n", 1), (b"y\n", 0)):
        ours, theirs = os.openpty()
        with kera.start("stream", "delete", stream, stdin=theirs) as process:
            os.close(theirs)
            os.write(ours, answer)
            output, errors = process.communicate(timeout=BOUND_S)
        os.close(ours)
        assert f"Delete {stream} and all its records?".encode() in output
        assert process.returncode == code
        assert errors == (b"" if code == 0 else b"kera: error: not confirmed\n")


def test_describing_the_cluster_shows_its_brokers(kera: Kera) -> None:
    cluster = kera.json("cluster", "describe")
    assert [(broker["broker_id"], broker["alive"]) for broker in cluster["brokers"]] == [(1, True), (2, True)]

    text = kera("cluster", "describe").decode()
    assert text.startswith(
        f"cluster {cluster['cluster_id']} at {kera.bootstrap}, feature level {FEATURE_LEVEL}, security off\n"
    )
    assert re.search(r"^ +1 +yes +\d\S+ +127\.0\.0\.1:\d+ +127\.0\.0\.1:\d+ +64 MiB +1 MiB ", text, re.MULTILINE)


@pytest.mark.parametrize("group", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "in a group"])
def test_a_corrupt_chunk_ends_consume_unless_it_is_skipped_on_demand(kera: Kera, stream: str, group: bool) -> None:
    kera("produce", stream, stdin=b"before\n")
    asyncio.run(write_a_chunk_that_nobody_can_read(kera.bootstrap, stream))
    kera("produce", stream, stdin=b"behind\n")
    arguments = ["consume", stream, "--count", "2", *(["--group", "readers"] if group else [])]

    ended = kera.run(*arguments)
    assert ended.returncode == 1
    assert ended.stdout == b"before\n"
    (line,) = ended.stderr.decode().splitlines()
    assert line.startswith("kera: error: chunk at ")
    assert "--corrupt-chunks skip" in line
    assert 'corrupt_chunks="skip"' not in line
    if group:
        preview = kera.json("group", "reset", "readers", stream, "--to-offset", "0", "--dry-run")
        assert [(row["old_offset"], row["new_offset"], row["records_again"]) for row in preview] == [(1, 0, 1)]
        described = kera.json("group", "describe", "readers")
        assert [(entry["offset"], entry["end_offset"]) for entry in described["entries"]] == [(1, 3)]
        kera("group", "reset", "readers", stream, "--to", "earliest", "--yes", "--force")

    skipped = kera.run(*arguments, "--corrupt-chunks", "skip")
    assert (skipped.returncode, skipped.stdout) == (0, b"before\nbehind\n")
    (warning,) = skipped.stderr.decode().splitlines()
    assert warning.startswith("kera: warning: a chunk cannot be read")
    assert b"fail|skip" in kera("consume", "--help")


# --- records in and out ------------------------------------------------------------------------------------


def test_produced_lines_are_consumed_in_order(kera: Kera, stream: str) -> None:
    lines = b"".join(b"%d %d\n" % (number, number * number) for number in range(50_000))

    produced = kera.run("produce", stream, stdin=lines)

    assert produced.returncode == 0
    assert re.fullmatch(rb"50,000 records in [\d.]+ s: [\d,]+ records/s, [\d.]+ MB/s\n", produced.stderr)
    assert kera("consume", stream, "--until-end") == lines
    assert kera("consume", stream, "--count", "3") == b"".join(lines.splitlines(keepends=True)[:3])


def test_produce_takes_a_durability(kera: Kera, stream: str) -> None:
    kera("produce", stream, "--durability", "persisted", stdin=b"a\n")
    assert "durability" in kera.fails(2, "produce", stream, "--durability", "eternal", stdin=b"b\n")
    assert kera("consume", stream, "--from", "earliest", "--until-end") == b"a\n"


def test_produce_takes_a_latency_target(kera: Kera, stream: str) -> None:
    kera("produce", stream, "--latency-target", "50ms", stdin=b"a\nb\n")
    assert "--latency-target: 'soon' is not a duration" in kera.fails(
        2, "produce", stream, "--latency-target", "soon", stdin=b"c\n"
    )
    assert "latency_target_ms is 0" in kera.fails(2, "produce", stream, "--latency-target", "0ms", stdin=b"c\n")
    assert kera("consume", stream, "--from", "earliest", "--until-end") == b"a\nb\n"


@pytest.mark.slow
def test_a_kafka_partitioner_places_lines_as_kafkas_clients_do(kera: Kera, stream: str) -> None:
    placed = f"{stream}-placed"
    kera("stream", "create", placed, "--streamlets", "7")
    keys = [f"key-{number}" for number in range(50)]
    lines = "".join(f"{key}:value\n" for key in keys).encode()
    kera("produce", placed, "-K", ":", "--partitioner", "consistent_random", stdin=lines)
    consumed = kera("consume", placed, "--from", "earliest", "--until-end", "--json").splitlines()
    found = {record["key"]: record["streamlet"] for record in map(json.loads, consumed)}
    assert found == {key: zlib.crc32(key.encode()) % 7 for key in keys}
    kera("stream", "delete", placed, "--yes")
    refused = kera.run("produce", placed, "--partitioner", "murmur3", stdin=b"").stderr.decode()
    assert all(name in refused for name in ("murmur3", "crc32c", "murmur2_random", "consistent_random"))


def test_keys_are_parsed_and_consumed_records_are_formatted(kera: Kera, stream: str) -> None:
    kera("produce", stream, "--key-separator", ":", stdin=b"k1:v1\nv2\n")

    printed = kera("consume", stream, "--until-end", "--format", r"%t/%p/%e/%o %k=%s %T\n").decode()

    assert re.fullmatch(rf"{stream}/0/0/0 k1=v1 \d{{16}}\n{stream}/0/0/1 =v2 \d{{16}}\n", printed)


def test_produced_headers_are_consumed(kera: Kera, stream: str) -> None:
    kera("produce", stream, "-H", "trace=a=b", "--header", "n=1", stdin=b"one\ntwo\n")

    assert kera("consume", stream, "--until-end", "-f", r"%s %h\n") == b"one trace=a=b,n=1\ntwo trace=a=b,n=1\n"
    first = json.loads(kera("consume", stream, "--json", "--count", "1"))
    assert first["headers"] == [["trace", "a=b"], ["n", "1"]]
    assert "'trace' is not of the form name=value" in kera.fails(2, "produce", stream, "-H", "trace", stdin=b"x\n")
    assert "mutually exclusive" in kera.fails(2, "produce", stream, "--json", "-H", "a=b", stdin=b"{}\n")


def test_consume_starts_at_an_offset_or_with_the_last_records(kera: Kera) -> None:
    kera("stream", "create", kera.stream, "--streamlets", "2")
    for count, streamlet in ((30, 0), (5, 1)):
        fill(kera, range(count), streamlet)

    def consumed(*arguments: str) -> list[str]:
        printed = kera("consume", kera.stream, "--until-end", "-f", r"%p/%o\n", *arguments)
        return sorted(printed.decode().splitlines())

    assert consumed("--offset", "27") == ["0/27", "0/28", "0/29"]
    assert consumed("--offset", "3", "--streamlet", "1") == ["1/3", "1/4"]
    assert consumed("--last", "2") == ["0/28", "0/29", "1/3", "1/4"]
    assert consumed("--last", "100", "--streamlet", "1") == [f"1/{number}" for number in range(5)]
    assert consumed("--streamlet", "1") == [f"1/{number}" for number in range(5)]
    assert "has streamlets 0 to 1, not 2" in kera.fails(1, "consume", kera.stream, "--streamlet", "2")

    beyond = kera.fails(1, "consume", kera.stream, "--until-end", "--offset", "31")
    assert beyond == f"offset 31 is beyond the end of stream {kera.stream!r}: its next record has offset 30"
    assert consumed("--offset", "30") == []

    # An entry that has not reached the offset yet is read from there on.
    waiting = kera.start("consume", kera.stream, "--offset", "7", "--streamlet", "1", "-c", "2", "-f", r"%p/%o %s\n")
    fill(kera, range(5, 9), 1)
    assert waiting.communicate(timeout=BOUND_S)[0] == b"1/7 7\n1/8 8\n"


def fill(kera: Kera, numbers: range, streamlet: int) -> None:
    """A chunk of numbers in one streamlet."""

    async def send() -> None:
        async with await Client.connect(kera.bootstrap) as client, client.producer() as producer:
            values = pa.array([b"%d" % number for number in numbers], pa.binary())
            await producer.send_batch(kera.stream, pa.record_batch({"value": values}), streamlet=streamlet)

    asyncio.run(send())


def test_the_error_for_an_unknown_name_suggests_a_similar_one(kera: Kera, stream: str) -> None:
    assert kera.fails(1, "stream", "describe", stream[:-1] + "z").endswith(f"; did you mean {stream!r}?")
    reset = ("group", "reset", "name-meant", stream, "--to", "latest", "--yes")
    assert kera.fails(1, *reset) == "there is no consumer group 'name-meant' (--create creates one)"
    kera(*reset, "--create")
    assert kera.fails(1, "group", "reset", "name-meand", *reset[3:]).endswith("; did you mean 'name-meant'?")
    assert kera.fails(1, "group", "describe", "name-meand").endswith("; did you mean 'name-meant'?")


def test_internal_streams_are_hidden_and_deleted_with_their_streams(kera: Kera, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"value": "a"}\n')
    journal = f"_connect.{kera.stream}"
    kera("connect", "copy", str(tmp_path / "lines.jsonl"), f"kera:{kera.stream}", "--create", "--name", kera.stream)
    assert journal not in [each["name"] for each in kera.json("stream", "list")]
    assert journal in [each["name"] for each in kera.json("stream", "list", "--internal")]
    (streamlet,) = kera.json("stream", "describe", kera.stream)["streamlets"]
    assert [(entry["first_offset"], entry["end_offset"]) for entry in streamlet["entries"]] == [(0, 1)]

    deleted = kera("stream", "delete", kera.stream, "--yes").decode()

    assert deleted.splitlines() == [
        f"deleted {kera.stream}",
        f"deleted {journal}, the journal of copy {kera.stream} into {kera.stream}",
    ]
    assert journal not in kera("stream", "list", "--internal").decode()


def test_consumed_json_can_be_produced_to_another_stream(kera: Kera, stream: str) -> None:
    copy = stream + "-copy"
    kera("stream", "create", copy, "--codec", "zstd")
    record = {"key": "k", "value": "é", "headers": [["h", "x"]], "timestamp": "2026-01-02T03:04:05.000006Z"}
    kera("produce", stream, "--json", stdin=json.dumps(record).encode() + b'\n{"value_base64": "/w=="}\n')

    printed = kera("consume", stream, "--until-end", "--json")
    kera("produce", copy, "--json", stdin=printed)

    first, second = map(json.loads, printed.splitlines())
    assert first == record | {"stream": stream, "streamlet": 0, "entry": 0, "offset": 0}
    assert second["value_base64"] == "/w=="
    assert kera("consume", copy, "-e", "--json") == printed.replace(stream.encode() + b'"', copy.encode() + b'"')
    kera("stream", "delete", copy, "--yes")


def test_rows_of_a_typed_stream_are_produced_and_consumed(kera: Kera) -> None:
    columns = ("id:int64", "at:timestamp[us, UTC]", "fare:float64", "raw:binary", "took:duration[us]")
    flags = [word for column in columns for word in ("--column", column)]
    keyed = ("--key-column", "id", "--timestamp-column", "at")
    kera("stream", "create", kera.stream, "--streamlets", "4", *flags, *keyed)
    rows: list[dict[str, object]] = [
        {"id": n, "at": f"2026-01-02T03:04:0{n}.000000Z", "fare": n / 2, "raw": {"base64": "/w=="}, "took": -n}
        for n in range(10)
    ]
    rows[9] |= {"fare": "NaN", "raw": "text"}

    kera("produce", kera.stream, "--json", stdin="\n".join(map(json.dumps, rows)).encode())

    printed = [json.loads(line) for line in kera("consume", kera.stream, "--until-end").splitlines()]
    assert sorted(printed, key=lambda row: int(row["id"])) == rows
    with_keys = kera("consume", kera.stream, "-e", "-f", r"%k %T\n").splitlines()
    assert min(with_keys) == b"0 1767323040000000"
    describe = kera("stream", "describe", kera.stream).decode()
    assert "at: timestamp[us, tz=UTC]" in describe
    assert re.search(r"^key column +id$", describe, re.MULTILINE)


@pytest.mark.slow
def test_an_invalid_line_is_named_in_the_error(kera: Kera, stream: str) -> None:
    typed = stream + "-typed"
    kera("stream", "create", typed, "--column", "n:int64")

    assert "give its rows as JSON objects, with --json" in kera.fails(2, "produce", typed, stdin=b"1\n")
    for arguments, stdin, says in (
        ((typed, "--json"), b'{"n": "x"}\n', "line 1: column 'n' is the text \"x\", not an integer"),
        ((stream, "--json"), b'{"value": 1}\nx\n', "line 2: "),
    ):
        ended = kera.run("produce", *arguments, stdin=stdin)
        assert ended.returncode == 1
        summary, error = ended.stderr.decode().splitlines()
        assert summary.startswith("0 records in ")
        assert error.startswith("kera: error: " + says)
    kera("stream", "delete", typed, "--yes")


def test_consume_waits_for_new_records(kera: Kera, stream: str) -> None:
    with kera.start("produce", stream) as producer, kera.start("consume", stream) as consumer:
        assert producer.stdin is not None
        assert consumer.stdout is not None
        for line in (b"first\n", b"second\n"):
            producer.stdin.write(line)
            producer.stdin.flush()
            assert consumer.stdout.readline() == line, "while the producer's input is still open"
        producer.stdin.close()
        assert producer.wait(BOUND_S) == 0
        consumer.send_signal(signal.SIGINT)
        _, errors = consumer.communicate(timeout=BOUND_S)
    assert (consumer.returncode, errors) == (130, b"")


def test_from_latest_gives_only_new_records(kera: Kera, stream: str) -> None:
    kera("produce", stream, stdin=b"old\n")
    with kera.start("consume", stream, "--from", "latest", "--count", "1") as consumer:
        while consumer.poll() is None:
            kera("produce", stream, stdin=b"new\n")
        output, errors = consumer.communicate(timeout=BOUND_S)
    assert (consumer.returncode, output, errors) == (0, b"new\n", b"")


def test_since_gives_the_records_of_that_time_or_later(kera: Kera, stream: str) -> None:
    times = ["2026-01-02T03:04:05Z", "2026-01-02T03:04:07Z", "2026-01-02T03:04:06Z", "2026-01-02T03:04:08Z"]
    records = [json.dumps({"value": str(number), "timestamp": time}) for number, time in enumerate(times)]
    kera("produce", stream, "--json", stdin="\n".join(records).encode())
    kera("produce", stream, stdin=b"now\n")

    assert kera("consume", stream, "-e", "--since", "2026-01-02T03:04:06Z") == b"1\n2\n3\nnow\n"
    assert kera("consume", stream, "--since", "2026-01-02T03:04:06Z", "--count", "1", "-f", r"%o\n") == b"1\n"
    assert kera("consume", stream, "--until-end", "--since", "1h") == b"now\n"
    assert kera("consume", stream, "--until-end", "--since", "2099-01-01T00:00") == b""
    assert "neither a span" in kera.fails(2, "consume", stream, "--since", "soon")


def test_ctrl_c_ends_produce_after_the_lines_it_has_read(kera: Kera, stream: str) -> None:
    with kera.start("produce", stream) as producer:
        assert producer.stdin is not None
        producer.stdin.write(b"a\nb\n")
        producer.stdin.flush()
        wait_until(lambda: kera("consume", stream, "--until-end") == b"a\nb\n", "the records are there")
        producer.send_signal(signal.SIGINT)
        _, errors = producer.communicate(timeout=BOUND_S)
    assert producer.returncode == 130
    assert errors.startswith(b"2 records in ")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_consume_ends_when_the_reader_of_its_output_goes_away(kera: Kera, stream: str, ahead: bool) -> None:
    """`ahead`: more records exist, so that a write fails; otherwise the consumer waits for some."""
    kera("produce", stream, stdin=b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * (100_000 if ahead else 0))
    with kera.start("consume", stream) as consumer:
        assert consumer.stdout is not None
        assert consumer.stderr is not None
        assert consumer.stdout.readline() == b"x" * 99 + b"\n"
        consumer.stdout.close()
        assert consumer.wait(BOUND_S) == 0
        assert consumer.stderr.read() == b""


@pytest.mark.slow
def test_consume_leaves_its_output_pipe_blocking(kera: Kera, stream: str) -> None:
    kera("produce", stream, stdin=b"x\n")
    reading, writing = os.pipe()
    with kera.start("consume", stream, "--until-end", stdout=writing) as consumer:
        assert consumer.wait(BOUND_S) == 0
    assert os.get_blocking(writing)
    os.close(reading)
    os.close(writing)


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("consume", "absent"), ("produce", "absent"), ("stream", "describe", "absent")])
def test_the_error_names_a_missing_stream(kera: Kera, arguments: tuple[str, ...]) -> None:
    assert kera.fails(1, *arguments) == "there is no stream 'absent'"


def test_the_error_names_an_unreachable_cluster(kera: Kera, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_CLIENT_RETRY_TIMEOUT_MS", "100")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    message = kera.fails(1, "stream", "list", "--bootstrap", address)
    assert address in message


# --- kera bench --------------------------------------------------------------------------------------------

FIELDS = {
    "record_bytes",
    "chunk_bytes",
    "request_bytes",
    "mb_per_s",
    "m_records_per_s",
    "latency_us",
    "cores",
    "versions",
}


def bench(kera: Kera, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Results and the table."""
    ended = kera.run("bench", *arguments, "--bootstrap", kera.bootstrap)
    assert ended.returncode == 0, ended.stderr.decode()
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert all(result.keys() >= FIELDS for result in results)
    assert not any(item["name"].startswith("kera-bench") for item in kera.json("stream", "list"))
    return results, ended.stderr.decode()


@pytest.mark.parametrize("record_bytes", [[500], pytest.param([100, 500], marks=pytest.mark.slow)], ids=str)
def test_bench_produce_measures_acknowledgements(kera: Kera, record_bytes: list[int]) -> None:
    flags = ("--records", "20000", "--rounds", "2", "--producers", "2", "--streamlets", "2")
    results, shown = bench(kera, "produce", *flags, *(f"--record-bytes={each}" for each in record_bytes))

    assert [result["record_bytes"] for result in results] == record_bytes
    for result in results:
        assert result["records"] == {"median": 20000, "min": 20000, "max": 20000}
        assert 0 < result["mb_per_s"]["min"] <= result["mb_per_s"]["median"] <= result["mb_per_s"]["max"]
        assert result["latency_of"] == "acknowledgement"
        assert 0 < result["latency_us"]["p50"] <= result["latency_us"]["p99"] <= result["latency_us"]["max"]
        assert result["producers_cpu_s"]["median"] > 0
        assert result["brokers_cpu_s"] is None, "the brokers are not the benchmark's own"
    assert "kera bench produce: median of 2 rounds; time to acknowledgement" in shown
    assert re.search(r"^500 B +256 KiB +[\d.]+ ", shown, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("read", ["batches", "records"])
def test_bench_consume_reads_all_records_sent(kera: Kera, read: str) -> None:
    (result,), _ = bench(kera, "consume", "--records", "20000", "--rounds", "1", "--read", read)
    assert result["records"]["median"] == 20000
    assert result["read"] == read
    assert result["latency_us"] is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["send", "send_batch"])
def test_bench_e2e_keeps_its_rate_and_measures_availability(kera: Kera, mode: str) -> None:
    flags = ("--rate", "2000", "--seconds", "0.5", "--rounds", "1", "--mode", mode)
    (result,), _ = bench(kera, "e2e", *flags)
    assert result["records"]["median"] == 1000
    assert result["seconds"]["median"] >= 0.45
    assert result["latency_of"] == "availability"
    assert result["latency_us"]["samples"] == 1000


def test_bench_without_a_cluster_starts_its_own_and_says_so(kera: Kera) -> None:
    ended = kera.run("bench", "produce", "--records", "1000", "--rounds", "1", "--mode", "send", "--seconds", "20")

    assert ended.returncode == 0, ended.stderr.decode()
    assert re.match(r"starting 1 broker with [\d.]+ MiB of shared memory each\n", ended.stderr.decode())
    (result,) = map(json.loads, ended.stdout.splitlines())
    assert result["brokers"] == 1
    assert result["brokers_cpu_s"] is not None
    assert (result["backups"], result["replication"], result["backups_cpu_s"]) == (0, 0, None)


@pytest.mark.slow
def test_bench_measures_replication_on_a_cluster_of_its_own(kera: Kera) -> None:
    flags = ("--backups", "2", "--replication", "2", "--backup-memory-bytes", "128MiB")
    ended = kera.run("bench", "produce", "--records", "20000", "--rounds", "1", *flags)

    assert ended.returncode == 0, ended.stderr.decode()
    (result,) = map(json.loads, ended.stdout.splitlines())
    assert (result["backups"], result["replication"], result["durability"]) == (2, 2, "replicated")
    assert result["backups_cpu_s"]["median"] >= 0
    shown = ended.stderr.decode()
    assert ", 2 backups with 128 MiB each\n" in shown
    assert "; level replicated, replication on 2 backups (of 2) through 1 virtual log\n" in shown


@pytest.mark.slow
def test_bench_reports_why_a_worker_failed(kera: Kera) -> None:
    ended = kera.run("bench", "produce", "--records", "10", "--record-bytes", "2MB", "--bootstrap", kera.bootstrap)

    assert ended.returncode == 1
    assert ended.stderr.decode().splitlines()[-1].startswith("kera: error: record of ")
