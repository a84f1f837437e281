"""The commands of the documentation work as shown, and its examples in Python run; runbooks have tests of their own.

Each example finds a cluster that has only the streams that the example takes for granted, with a few records. Commands
succeed, except where the page shows an error: then they fail with that error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client
from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster, RunningCluster
from tests.docs_examples import ROOT, Command, Example, calls, commands, examples

PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / name
        for name in (
            "cli.md",
            "connect.md",
            "consumer-groups.md",
            "epochs.md",
            "latency.md",
            "replication.md",
            "schemas.md",
        )
    ),
]
TYPED = {"stream", "group", "produce", "consume", "connect", "cluster", "schema", "top", "epochs", "latency"}
"""Commands that need only a cluster."""
NOT_TYPED = {
    "kera connect copy kafka://localhost:9092/clicks kera:clicks --create": "test_connect_kafka.py has a Kafka",
    "kera connect copy 'rides/*.parquet' kera:rides --create --key id --time pickup": "test_connect_files.py has files",
    "kera connect copy kera:clicks 'postgresql://me@db/shop?table=clicks' --create --follow": "it has a PostgreSQL",
    "kera connect copy kafka://broker:9093/clicks kera:clicks --kafka-config kafka.properties": "as the first one",
    "kera connect copy 'postgresql://me@db/shop?table=orders' kera:orders --create --value avro --key id": (
        "test_connect_values.py has a PostgreSQL"
    ),
    "kera connect copy kafka://localhost:9092/clicks kera:clicks --create --value json --subject clicks-value": (
        "it has a Kafka"
    ),
    "kera group import billing clicks --from kafka://localhost:9092/clicks --dry-run": "test_group_import.py has it",
    "kera group import billing clicks --from kafka://localhost:9092/clicks --yes": "likewise",
    "kera connect copy 'postgresql://me@db/shop?table=orders&changes=logical' kera:orders --follow": (
        "test_connect_changes.py has a PostgreSQL"
    ),
    "kera consume clicks --group billing": "it goes on for ever",
    "kera latency create checkout --path 'clicks, group:enrich, visits, group:dashboard' --limit 300ms --window 15s": (
        "test_latency_constraints.py has the consumer groups"
    ),
    "kera consume orders --group billing": "it goes on for ever",
    "kera stream list --context prod": "tests/integration/test_access_commands.py has contexts, with users",
    "kera cluster health": "a broker is lost there; tests/integration/test_health.py has that",
    "kera cluster forget backup-2": "tests/integration/test_deploy.py has it, with hosts that are gone",
    "kera cluster forget broker-3": "likewise",
    "kera cluster forget broker-3 --force": "likewise",
}
MADE = ("clicks", "orders", "rides")
STREAM = re.compile(rf"\b({'|'.join(MADE)})\b")
ASKS = re.compile(r"^kera (stream truncate|stream delete \w+$|group reset|group delete)")
SOME_POSITION = "1/2+5808256"
TIMEOUT_S = 60


def typed(example: Example) -> list[Command]:
    return [
        command
        for command in commands(example)
        if command.text not in NOT_TYPED and any(call[:1] and call[0] in TYPED for call in calls(command))
    ]


def quick_ones(found: list[Example]) -> list[Any]:
    """The parameters of a test: the first example of each page is quick."""
    pages = [each.page for each in found]
    return [
        pytest.param(each, id=str(each), marks=() if each.page not in pages[:at] else pytest.mark.slow)
        for at, each in enumerate(found)
    ]


EXAMPLES = [each for page in PAGES for each in examples(page, "sh", "console") if typed(each)]


@pytest.fixture(scope="module")
def documented() -> Iterator[RunningCluster]:
    with LocalCluster.running(
        brokers=2, backups=2, replication=1, arena_bytes=256 * MIB, segment_bytes=512 << 10
    ) as cluster:
        yield cluster


@pytest.fixture
async def client(documented: RunningCluster) -> Any:
    """A client of a cluster without streams and consumer groups."""
    async with await Client.connect(documented.bootstrap) as client:
        yield client
        for stream in await client.admin.list_streams():
            await client.admin.delete_stream(stream.name)
        for group in await client.admin.consumer_groups():
            await client.admin.delete_consumer_group(group.consumer_group)
        for subject in await client.schemas.subjects():
            await client.schemas.delete(subject)
        there = await client.admin.describe_cluster()
        for broker in there.brokers:
            await client.admin.drain_broker(broker.broker_id, undo=True)
        for backup in there.backups:
            await client.admin.drain_backup(backup.backup_id, undo=True)


async def make_what_is_taken_for_granted(client: Client, example: Example) -> None:
    created = {call[2] for command in typed(example) for call in calls(command) if call[:2] == ["stream", "create"]}
    for name in sorted({*STREAM.findall(example.text)} - created):
        await client.admin.create_stream(name, streamlets=8 if name == "clicks" else 4)
        async with client.producer() as producer:
            await producer.prepare(name)
            await asyncio.gather(*(producer.send(name, b"%d" % number, keys=b"anna") for number in range(10)))
        if "billing" in example.text:
            async with client.group_consumer("billing", name) as consumer:
                async for _ in consumer.records():
                    break


def programs(text: str) -> list[list[str]]:
    """The programs that the shell would start for a command, each writing to the next."""
    words = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>")
    words.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            found.append([])
        else:
            assert not set(word) <= set("|&;<>"), f"{word} in {text} needs a shell"
            found[-1] += [sys.executable, "-m", "kera.cli"] if (word, found[-1]) == ("kera", []) else [word]
    return found


def type_it(command: Command, bootstrap: str, directory: Path) -> tuple[int, str]:
    """The exit code of the last program that failed, and the standard error of all.

    No shell starts them, because the programs that tests start have nothing to import: see tests/forked_programs.py.
    """
    text = command.text.replace(".venv/bin/kera", "kera").replace(SOME_POSITION, "1/1+0")
    text = text.replace("seq 1000000", "seq 10000")  # the text of the command matters, not the amount
    if ASKS.search(text):
        text += " --yes"  # at a terminal, the command would ask
    with contextlib.ExitStack() as stack, tempfile.TemporaryFile("w+") as errors:
        running: list[subprocess.Popen[bytes]] = []
        for program in programs(text):
            running.append(
                subprocess.Popen(
                    program,
                    env=os.environ | {"KERA_BOOTSTRAP": bootstrap},
                    cwd=directory,
                    stdin=running[-1].stdout if running else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            )
            stack.enter_context(running[-1])
            stack.callback(running[-1].kill)  # after a time-out
        for each in running[:-1]:
            assert each.stdout is not None
            each.stdout.close()  # so that it notices when the next program reads no more
        running[-1].communicate(timeout=TIMEOUT_S)
        codes = [each.wait(TIMEOUT_S) for each in running]
        errors.seek(0)
        return next((code for code in reversed(codes) if code), 0), errors.read()


def alike(text: str) -> str:
    """The text without the numbers that differ from run to run."""
    return re.sub(r"\d+", "N", text).strip()


def test_each_command_excluded_from_typing_is_in_the_documentation() -> None:
    there = {command.text for page in PAGES for each in examples(page, "sh", "console") for command in commands(each)}
    assert NOT_TYPED.keys() <= there


@pytest.mark.parametrize("example", quick_ones(EXAMPLES))
async def test_the_commands_of_the_documentation_work_as_shown(
    example: Example, client: Client, documented: RunningCluster, tmp_path: Path
) -> None:
    await make_what_is_taken_for_granted(client, example)
    for command in typed(example):
        code, errors = await asyncio.to_thread(type_it, command, documented.bootstrap, tmp_path)
        if command.output.startswith("kera: error"):
            assert code != 0, command.text
            assert alike(errors) == alike(command.output)
        else:
            assert code == 0, f"{command.text}: {errors}"


class Enough(Exception):
    """An endless example has done what it shows."""


def enough(*_: Any) -> None:
    raise Enough


@pytest.mark.parametrize(
    "example",
    quick_ones(
        [
            each
            for name in ("client.md", "consumer-groups.md")
            for each in examples(ROOT / "docs" / name, "python")
            if "LocalCluster" not in each.text
        ]
    ),
)
async def test_the_python_examples_of_the_documentation_run(
    example: Example, client: Client, documented: RunningCluster
) -> None:
    text = example.text.replace("127.0.0.1:7400", documented.bootstrap)
    if "create_stream" not in text:
        for name in ("clicks", "orders", "refunds"):
            await client.admin.create_stream(name, streamlets=4)
            async with client.producer() as producer:
                for streamlet in range(4):  # examples start at places in them
                    await producer.send_batch(name, pa.record_batch({"value": [b"value"] * 1000}), streamlet=streamlet)
    names: dict[str, Any] = {
        "client": client,
        "values": [b"a", b"b"],
        "batch": pa.record_batch({"value": [b"a", b"b", b"c"]}),
        "arrow_schema": pa.schema({"carrier": pa.string(), "time": pa.timestamp("us", tz="UTC"), "delay": pa.int32()}),
        "timestamp_us": 0,
        "use": enough,
        "store": enough,
        "book": enough,
        "print": enough,
        "database": type("Database", (), {"insert": staticmethod(enough)}),
        "log": None,
    }
    if "truncate_stream" in text:
        names["consumer"] = type("Consumer", (), {"positions": staticmethod(lambda: "latest")})
    body = "\n".join(f"    {line}" for line in text.splitlines())
    exec(compile(f"async def main():\n{body}\n    return locals()\n", str(example), "exec"), names)
    async with asyncio.timeout(TIMEOUT_S):
        with contextlib.suppress(Enough):
            await names["main"]()
