"""The Go client of clients/go, which was written from docs/writing-a-client.md, against real daemons.

Both clients read the records that it writes while streamlets move and brokers are killed: each record once, and in
order for each key. It reads the SDK's records, in either version and with either codec.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client
from kera.client.producing.encoding.partitioner import streamlet_of
from tests.chaos import go_chunks
from tests.integration.control_support import broker_id_of, broker_name, broker_names, connect, now_us, until_recovered
from tests.integration.go_client import TIMEOUT_S, GoClient, GoRecord, records_in
from tests.integration.shared_cluster import SharedCluster
from tests.integration.support import until
from tests.integration.unreadable import write_a_chunk_that_nobody_can_read

pytestmark = pytest.mark.timeout(300)  # the first test compiles all dependencies of the client
KEYS = 20
STREAMLETS = 4


@pytest.fixture
async def client(members: SharedCluster) -> AsyncIterator[Client]:
    async with await connect(members) as connected:
        yield connected


@pytest.mark.slow
def test_the_go_client_is_formatted_and_vetted_and_its_own_tests_pass(go: GoClient) -> None:
    assert go.unformatted() == ""
    vetted = go.tool("vet", "./...")
    assert vetted.returncode == 0, vetted.stderr
    tested = go.tool("test", "./...")
    assert tested.returncode == 0, tested.stdout + tested.stderr


MISBUILT = (*range(1, 300), 332, 335, 526, 721, 909, 1353, 15_815, 17_043)
"""Seeds of chunks. Go once differed from Python for the named seeds, and for a tenth of the others."""


def test_the_go_client_reads_and_refuses_the_same_chunks_as_python(
    go: GoClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, file = go_chunks.vectors(MISBUILT), tmp_path / "vectors.json"
    assert all(len(each) > len(MISBUILT) // 4 for each in made.values())
    file.write_text(json.dumps(made), encoding="utf-8")
    monkeypatch.setenv("KERA_VECTORS", str(file))
    tested = go.tool("test", "-run", go_chunks.TESTS, "./kera")
    assert tested.returncode == 0, (tested.stdout + tested.stderr)[-4_000:]


class Lines:
    """Sends numbered records with a cycle of keys into kera-produce until it is stopped."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.sent = 0
        self.stopping = False

    async def run(self) -> None:
        assert self._process.stdin is not None
        while not self.stopping:
            numbers = range(self.sent, self.sent + 20)
            self._process.stdin.write(b"".join(b"key-%d\t%d\n" % (number % KEYS, number) for number in numbers))
            await self._process.stdin.drain()
            self.sent = numbers.stop
            await asyncio.sleep(0.005)
        self._process.stdin.close()


@contextlib.asynccontextmanager
async def running(go: GoClient, command: str, bootstrap: str, *arguments: str) -> AsyncIterator[Any]:
    """A command that is killed if it has not ended before."""
    process = await go.start(command, bootstrap, *arguments)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        _, errors = await process.communicate()
        print(f"{command} {process.returncode}: {errors.decode()}")  # noqa: T201 - pytest shows it


def check_all_are_there_once(records: Sequence[GoRecord], count: int) -> None:
    assert Counter(int(each.value or b"") for each in records) == Counter(range(count))
    of_key = defaultdict(list)
    for each in records:
        assert each.key is not None
        assert each.streamlet == streamlet_of(each.key, STREAMLETS), "keys are divided as the SDK does it"
        of_key[each.key].append(int(each.value or b""))
    assert all(numbers == sorted(numbers) for numbers in of_key.values()), "records of a key are out of order"
    ordinals = defaultdict(list)
    for each in records:
        ordinals[each.streamlet, each.entry].append(each.ordinal)
    assert all(numbers == list(range(len(numbers))) for numbers in ordinals.values())


async def read_with_the_sdk(client: Client, stream: str) -> list[GoRecord]:
    async with client.consumer(stream, start="earliest", end="latest") as consumer:
        return [
            GoRecord(record.streamlet, record.entry, record.offset, record.key, record.value)
            async for record in consumer.records()
        ]


async def test_the_go_client_writes_each_record_once_and_resumes_through_moves_and_crashes(
    go: GoClient, members: SharedCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s", streamlets=STREAMLETS, entries=2, group_segments=2, replication=1)
    output, positions = tmp_path / "output", tmp_path / "positions"
    follow = ("kera-consume", members.bootstrap, "-stream", "s", "-positions", str(positions), "-output", str(output),
              "-save-every", "50ms")  # fmt: skip

    def has_come(count: int) -> Callable[[], bool]:
        return lambda: output.exists() and output.read_bytes().count(b"\n") >= count

    async with running(go, "kera-produce", members.bootstrap, "-stream", "s") as producer:
        lines = Lines(producer)
        sending = asyncio.create_task(lines.run())
        async with running(go, *follow) as consumer:
            await until(has_come(500))
            await move_all(client, members)
            await until(has_come(lines.sent + 500))
            consumer.kill()
        async with running(go, *follow):
            begun_us = now_us()
            killed = (await client.admin.describe_stream("s")).assignments[0].broker_id
            await members.kill(broker_name(members, killed))
            await until_recovered(client, [killed], begun_us)
            await move_all(client, members)
            await until(has_come(lines.sent + 500))
        lines.stopping = True
        await sending
        async with asyncio.timeout(TIMEOUT_S):
            assert await producer.wait() == 0
    await go.read(members.bootstrap, "s", *follow[4:])
    followed = records_in(output.read_bytes())
    check_all_are_there_once(followed, lines.sent)
    assert sorted(await go.read(members.bootstrap, "s")) == sorted(followed)
    assert sorted(await read_with_the_sdk(client, "s")) == sorted(followed)


async def move_all(client: Client, members: SharedCluster) -> None:
    """Move each streamlet to another live broker."""
    alive = [broker_id_of(members, name) for name in broker_names(members) if name in members.processes]
    for number, assignment in (await client.admin.describe_stream("s")).assignments.items():
        await client.admin.move_streamlet("s", number, next(each for each in alive if each != assignment.broker_id))


ROWS: list[dict[str, Any]] = [
    {"timestamp": 1_700_000_000_000_000, "keys": [b"a", b"b"], "value": b"abc" * 200},
    {"timestamp": 1_700_000_000_000_500, "keys": None, "value": None, "headers": [("trace", b"\x01"), ("", None)]},
    {"timestamp": -1, "keys": [], "value": b"", "headers": []},
    *({"timestamp": number << 33, "keys": [b"%d" % number], "value": b"x" * number * 7} for number in range(300)),
]


@pytest.mark.parametrize(
    ("payload", "codec"),
    [
        ("lean", "lz4"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("lean", "none"), ("lean", "zstd"), ("arrow", "none"), ("arrow", "lz4"), ("arrow", "zstd"))
        ),
    ],
)
async def test_the_go_client_and_the_sdk_read_each_others_records(
    go: GoClient, members: SharedCluster, client: Client, payload: str, codec: str
) -> None:
    await client.admin.create_stream("s", streamlets=STREAMLETS, codec=codec)
    schema = (await client.describe("s")).schema
    async with client.producer(payload=payload) as producer:
        await producer.send_batch("s", pa.RecordBatch.from_pylist(ROWS, schema))
    code, _, errors = await go.run(
        "kera-produce",
        members.bootstrap,
        "-stream",
        "s",
        stdin=b"".join(b"%d\t%s\n" % (number, b"z" * number) for number in range(300)) + b"no key\n",
    )
    assert code == 0, errors
    mine = sorted(await go.read(members.bootstrap, "s"), key=repr)
    assert len(mine) == len(ROWS) + 301
    assert mine == sorted(await read_with_the_sdk(client, "s"), key=repr)


async def error_of(go: GoClient, command: str, bootstrap: str, *arguments: str, stdin: bytes = b"") -> str:
    """The error of a failing command: one line, without a traceback."""
    code, _, errors = await go.run(command, bootstrap, *arguments, stdin=stdin)
    assert code == 1, errors
    lines = [line for line in errors.splitlines() if "are stored" not in line]
    assert len(lines) == 1, errors
    assert lines[0].startswith(f"{command}: error: ")
    return lines[0]


@pytest.mark.slow
async def test_the_discovery_calls_of_the_thesis_suffice_to_read_a_moved_stream(
    go: GoClient, members: SharedCluster, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.admin.create_stream("s", streamlets=STREAMLETS, entries=2, group_segments=2)
    values = [b"%d" % number for number in range(4_000)]
    async with client.producer() as producer:
        await producer.prepare("s")
        for moves, begin in enumerate(range(0, len(values), 1_000)):
            if moves:
                await move_all(client, members)
            for value in values[begin : begin + 1_000]:
                producer.send("s", value)
            await producer.flush()
        await move_all(client, members)  # the owner has no group of its own yet
    output = tmp_path / "values"
    monkeypatch.setenv("KERA_DISCOVERY", f"{members.bootstrap} s {output}")
    tested = go.tool("test", "-count=1", "-v", "-run", "TestDiscovery", "./kera")
    assert "--- PASS: TestDiscovery" in tested.stdout, tested.stdout + tested.stderr
    assert sorted(base64.b64decode(line) for line in output.read_text().split("\n")) == sorted(values)


@pytest.mark.parametrize("command", ["kera-consume", pytest.param("kera-produce", marks=pytest.mark.slow)])
async def test_the_go_client_names_a_missing_stream_and_a_typed_stream(
    go: GoClient, members: SharedCluster, client: Client, command: str
) -> None:
    await client.admin.create_stream("typed", schema=pa.schema([pa.field("number", pa.int64())]))
    assert '"none": there is no stream' in await error_of(go, command, members.bootstrap, "-stream", "none")
    assert '"typed" has a schema of its own' in await error_of(go, command, members.bootstrap, "-stream", "typed")


@pytest.mark.slow
async def test_the_go_client_says_what_is_wrong_with_an_address(go: GoClient, members: SharedCluster) -> None:
    def error(address: str) -> Awaitable[str]:
        return error_of(go, "kera-consume", address, "-stream", "s", "-timeout", "300ms")

    assert '"nonsense" is not a coordinator address' in await error("nonsense")
    assert "connection refused" in await error("127.0.0.1:1")
    broker = members.ready[broker_names(members)[0]]
    assert "not a KerA daemon, or not the intended one" in await error(broker["grpc_address"])
    assert "server preface" in await error(broker["frames_address"])


async def test_a_corrupt_chunk_ends_the_go_consumer_unless_it_is_skipped_on_demand(
    go: GoClient, members: SharedCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s")
    produce = ("kera-produce", members.bootstrap, "-stream", "s")
    await go.run(*produce, stdin=b"before\n")
    await write_a_chunk_that_nobody_can_read(members.bootstrap, "s")
    await go.run(*produce, stdin=b"behind\n")
    files = ("-positions", str(tmp_path / "positions"), "-output", str(tmp_path / "output"))
    for _ in range(2):
        error = await error_of(go, "kera-consume", members.bootstrap, "-stream", "s", "-until-end", *files)
        assert 'stream "s", streamlet 0, entry ' in error
        assert "cannot be read" in error
        assert [each.value for each in records_in((tmp_path / "output").read_bytes())] == [b"before"]
    await go.read(members.bootstrap, "s", "-skip", *files)
    assert [each.value for each in records_in((tmp_path / "output").read_bytes())] == [b"before", b"behind"]


@pytest.mark.slow
async def test_lost_records_end_the_go_consumer_unless_they_are_skipped_on_demand(
    go: GoClient, members: SharedCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s")
    files = ("-positions", str(tmp_path / "positions"))
    await go.run("kera-produce", members.bootstrap, "-stream", "s", stdin=b"read\n")
    assert [each.value for each in await go.read(members.bootstrap, "s", *files)] == [b"read"]
    await go.run("kera-produce", members.bootstrap, "-stream", "s", stdin=b"lost\n")
    await client.admin.truncate_stream("s", "latest")
    await go.run("kera-produce", members.bootstrap, "-stream", "s", stdin=b"behind\n")
    error = await error_of(go, "kera-consume", members.bootstrap, "-stream", "s", "-until-end", *files)
    assert "(data_lost)" in error
    assert [each.value for each in await go.read(members.bootstrap, "s", "-skip", *files)] == [b"behind"]


@pytest.mark.slow
async def test_the_go_consumer_refuses_positions_of_a_recreated_stream_and_damaged_ones(
    go: GoClient, members: SharedCluster, client: Client, tmp_path: Path
) -> None:
    files = ("-positions", str(tmp_path / "positions"))
    await client.admin.create_stream("s")
    await go.read(members.bootstrap, "s", *files)
    await client.admin.delete_stream("s")
    await client.admin.create_stream("s")
    error = await error_of(go, "kera-consume", members.bootstrap, "-stream", "s", *files)
    assert "deleted and created again" in error
    (tmp_path / "positions").write_text("[]")
    error = await error_of(go, "kera-consume", members.bootstrap, "-stream", "s", *files)
    assert "damaged, or something else than positions" in error


@pytest.mark.slow
async def test_the_go_producer_names_the_line_of_a_record_that_is_too_large(
    go: GoClient, members: SharedCluster, client: Client
) -> None:
    await client.admin.create_stream("s")
    error = await error_of(
        go, "kera-produce", members.bootstrap, "-stream", "s", stdin=b"small\n" + b"x" * (65 << 10) + b"\n"
    )
    assert "line 2: a record of " in error
    assert [each.value for each in await go.read(members.bootstrap, "s")] == [b"small"]


@pytest.mark.slow
async def test_a_signal_ends_a_waiting_go_producer_and_a_waiting_go_consumer(
    go: GoClient, members: SharedCluster, client: Client, tmp_path: Path
) -> None:
    await client.admin.create_stream("s")
    output, positions = tmp_path / "output", tmp_path / "positions"
    files = ("-positions", str(positions), "-output", str(output))
    async with (
        running(go, "kera-consume", members.bootstrap, "-stream", "s", *files, "-save-every", "50ms") as consumer,
        running(go, "kera-produce", members.bootstrap, "-stream", "s") as producer,
        asyncio.timeout(TIMEOUT_S),
    ):
        producer.stdin.write(b"one\ntwo\n")
        await read_to(client, "s", 2)
        producer.terminate()
        said = (await producer.stderr.read()).decode()
        assert "2 records are stored" in said
        assert "error: interrupted" in said
        assert await producer.wait() == 1
        await until(positions.exists)
        consumer.terminate()
        assert await consumer.wait() == 0
    await go.read(members.bootstrap, "s", *files)
    assert [each.value for each in records_in(output.read_bytes())] == [b"one", b"two"]


async def read_to(client: Client, stream: str, count: int) -> None:
    """Wait until a stream has `count` records."""
    async with client.consumer(stream, start="earliest") as consumer:
        async for _ in consumer.records():
            count -= 1
            if not count:
                return
