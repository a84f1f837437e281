"""Clients whose peers lie: some answers of real daemons are corrupted before the SDK sees them.

    python -m tests.fuzz.sessions BOOTSTRAP SEED SECONDS     # a child, which prints its outcomes as JSON

The message of one answer in `SPOILT` is corrupted where it is parsed, below all other code of the SDK. Checks: each
operation of a client then ends with a value, an error of KerA's or its timeout, and no background task fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from kera.client import Client, ClientSettings
from kera.client.cluster import push, push_connect
from kera.core.base.telemetry import configure_logging
from kera.core.errors import InternalError, KeraError
from kera.core.rpc import frame_client, grpc_client, wire
from kera.local.cluster import LocalCluster
from tests.fuzz.protobuf import spoilt
from tests.fuzz.running import MEMORY_BYTES_MAX, Report
from tests.fuzz.target import random_of

SPOILT = 4
"""One answer in this number is corrupted."""
STREAM, TYPED, GROUP = "some", "typed", "some-group"
OPERATION_S = 3.0
"""Timeout of each operation, because a client waits for data that an answer denies."""
CLOSED_S_MAX = 20.0
DEFECTS_MAX = 20
RECORDS = 5
SETTINGS: dict[str, Any] = {
    "request_timeout_ms": 500,
    "retry_timeout_ms": 300,
    "connect_timeout_ms": 1_000,
    "recovery_timeout_ms": 500,
}


class Spoiling:
    """Replaces `parse` in all modules that take answers."""

    def __init__(self) -> None:
        self.random: Random | None = None
        """None leaves answers as they are."""

    def parse(self, kind: Any, data: Any) -> Any:
        """Parse as `kera.core.rpc.wire.parse` does, some messages with changes."""
        return wire.parse(kind, self._spoilt(wire.parse(kind, data)) if self._is_due() else data)

    def parse_with_bulk(self, kind: Any, data: bytes, head_bytes_max: int | None = None) -> Any:
        """Parse as `kera.core.rpc.wire.parse_with_bulk` does, some messages with changes."""
        message, bulk = wire.parse_with_bulk(kind, data, head_bytes_max)
        return (wire.parse(kind, self._spoilt(message)) if self._is_due() else message), bulk

    def _is_due(self) -> bool:
        return self.random is not None and self.random.randrange(SPOILT) == 0

    def _spoilt(self, message: Any) -> bytes:
        return spoilt(message, self.random or Random(0))

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Replace the functions until the block ends."""
        modules: tuple[Any, ...] = (frame_client, grpc_client, push, push_connect)
        functions = {"parse": self.parse, "parse_with_bulk": self.parse_with_bulk}
        with contextlib.ExitStack() as stack:
            for module in modules:
                for name in functions.keys() & vars(module).keys():
                    stack.callback(setattr, module, name, vars(module)[name])
                    setattr(module, name, functions[name])
            yield


_numbers = count(1)


# -- operations of clients ---------------------------------------------------------------------------------------------


async def _produce(client: Client) -> None:
    async with client.producer(delivery_timeout_ms=800) as producer:
        await producer.prepare(STREAM)
        waiting = [producer.send(STREAM, b"%d" % number) for number in range(RECORDS)]
        await producer.send_batch(STREAM, pa.record_batch({"value": [b"a", b"b"]}))
        for each in waiting:
            await each


async def _consume(client: Client, **settings: Any) -> None:
    async with client.consumer(STREAM, start="earliest", end="latest", **settings) as consumer:
        async for record in consumer:
            repr(record)


async def _consume_as_group(client: Client) -> None:
    async with client.group_consumer(GROUP, STREAM, start="earliest") as consumer:
        async for chunk in consumer.batches():
            repr(chunk.header)
            await consumer.commit()


async def _read_typed(client: Client) -> None:
    async with client.consumer(TYPED, start="earliest", end="latest") as consumer:
        async for record in consumer:
            repr(record.row)


async def _places(client: Client) -> None:
    bounds = await client.bounds(STREAM)
    await client.positions_at(STREAM, 0)
    stream = await client.describe(STREAM)
    ends = {stream.entry_id(at, entry): each.end for at, found in bounds.items() for entry, each in enumerate(found)}
    await client.commit(GROUP, STREAM, ends)


async def _describe(client: Client) -> None:
    repr(await client.admin.describe_stream(STREAM))
    repr(await client.admin.list_streams())
    repr(await client.admin.describe_cluster())
    repr(await client.admin.recoveries())
    repr(await client.admin.rebalance(dry_run=True))


async def _groups(client: Client) -> None:
    repr(await client.admin.consumer_groups())
    repr(await client.admin.describe_consumer_group(GROUP))
    await client.admin.reset_consumer_group(GROUP, STREAM, "earliest", force=True)


async def _streams(client: Client) -> None:
    name = f"another-{next(_numbers)}"
    await client.admin.create_stream(name, streamlets=2)
    await client.admin.alter_stream(name, retention_ms=1_000)
    await client.admin.truncate_stream(name, "latest")
    await client.admin.delete_stream(name)


async def _pull(client: Client) -> None:
    await _consume(client, shared_memory="never")


OPERATIONS: tuple[Callable[[Client], Awaitable[None]], ...] = (
    *(
        _produce,
        _produce,
        _consume,
        _consume,
        _pull,
        _consume_as_group,
        _read_typed,
        _places,
        _describe,
        _groups,
        _streams,
    ),
)


async def session(bootstrap: str, random_: Random, spoiling: Spoiling) -> str:
    """Run one operation of a client. Returns the outcome."""
    transport = random_.choice(("auto", "tcp", "grpc"))
    operation = random_.choice(OPERATIONS)
    spoiling.random = random_
    try:
        async with asyncio.timeout(CLOSED_S_MAX):
            async with await Client.connect(bootstrap, ClientSettings.load(**SETTINGS, transport=transport)) as client:
                async with asyncio.timeout(OPERATION_S):
                    await operation(client)
    except InternalError as error:
        # The answer may claim a code of a newer daemon, or the client may not know the fate of a write.
        if "code" not in error.attributes and " answered " not in error.message:
            raise
        return "internal"
    except KeraError as error:
        repr(error.attributes)
        return error.code
    except TimeoutError:
        return "nothing in time"
    finally:
        spoiling.random = None
    return "done"


async def child(bootstrap: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run one session after the other. Returns the outcomes and defects."""
    spoiling, outcomes = Spoiling(), Counter[str]()
    defects: list[str] = []
    places: set[str] = set()
    """Places of the defects: one defect of each is enough."""
    unheard: list[str] = []

    def hear(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, KeraError | None) or "never retrieved" not in str(context.get("message")):
            told = "".join(traceback.format_exception(error)[-5:]) if error is not None else ""
            unheard.append(f"{context.get('message')}: {error!r}\n{told}")

    asyncio.get_running_loop().set_exception_handler(hear)
    number, begun_s, slowest_s = 0, time.monotonic(), 0.0
    with spoiling.everywhere():
        while time.monotonic() < begun_s + seconds and len(defects) < DEFECTS_MAX:
            random_, at_s = random_of("sessions", seed, number), time.monotonic()
            try:
                outcomes[await session(bootstrap, random_, spoiling)] += 1
            except Exception as error:  # noqa: BLE001 - it is reported
                outcomes[type(error).__name__] += 1
                if _place(error) not in places:
                    defects.append(f"sessions seed {seed} input {number}: {error!r}\n{_last_lines(error)}")
                places.add(_place(error))
            slowest_s = max(slowest_s, time.monotonic() - at_s)
            defects += [f"sessions seed {seed} input {number}, behind its back: {text}" for text in unheard]
            unheard.clear()
            number += 1
    return {"outcomes": outcomes, "defects": defects, "inputs": number, "slowest_s": slowest_s}


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


def _last_lines(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-6:])


async def run(directory: Path, seed: int, seconds: float) -> Report:
    """Run sessions in a child, against a cluster of its own."""
    report = Report("sessions", seed)
    async with LocalCluster(
        data_dir=directory, brokers=2, arena_bytes=32 << 20, segment_bytes=1 << 18, broker_settings={"metrics_port": 0}
    ) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream(STREAM, streamlets=3, entries=2)
            await client.admin.create_stream(TYPED, schema=pa.schema([("a", pa.int64()), ("b", pa.string())]))
            async with client.producer() as producer:
                for name, batch in ((STREAM, {"value": [b"x"] * 50}), (TYPED, {"a": [1, 2], "b": ["x", None]})):
                    await producer.send_batch(name, pa.record_batch(batch))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fuzz.sessions", cluster.bootstrap, str(seed), str(seconds)),
            stdout=asyncio.subprocess.PIPE,
        )
        begun_s = time.monotonic()
        said, _ = await process.communicate()
        report.taken_s = time.monotonic() - begun_s
    if process.returncode:
        report.defects.append(f"sessions seed {seed}: the process ended with {process.returncode}")
        return report
    told = json.loads(said.splitlines()[-1])
    report.inputs, report.slowest_s, report.defects = told["inputs"], told["slowest_s"], told["defects"]
    report.outcomes.update(told["outcomes"])
    return report


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    configure_logging("critical")
    sys.stdout.write(json.dumps(asyncio.run(child(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))) + "\n")
