"""Processes of another user on a broker's host: what they can read in place, and what else they can find in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client
from kera.core.access.rights import Operation
from tests.integration.secured_cluster import PASSWORD, Secured

READ = Operation.READ
OURS, THEIRS = b"what alice may read", b"what alice may not read"


pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user"),
]


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="kera-domains-"))
        stack.callback(shutil.rmtree, directory)
        directory.chmod(0o755)
        (directory / "data").mkdir(mode=0o755)
        others = {"unix_socket_users": "any"}
        secured = Secured(directory, stack, brokers=1, data_dir=directory / "data", broker_settings=others)
        asyncio.run(_make_users(secured))
        yield secured


async def _make_users(secured: Secured) -> None:
    await secured.make_user("admin")
    await secured.make_user("alice")


@pytest.fixture
async def admin(secured: Secured) -> AsyncIterator[Client]:
    async with await secured.client("admin") as client:
        yield client


async def make(client: Client, stream: str, domain: str, value: bytes, count: int = 200) -> None:
    await client.admin.create_stream(stream, memory_domain=domain)
    await write(client, stream, value, count)


async def write(client: Client, stream: str, value: bytes, count: int = 200) -> None:
    async with client.producer() as producer:
        await producer.prepare(stream)
        for _ in range(count):
            producer.send(stream, value)


@contextlib.contextmanager
def reader(secured: Secured, stream: str, shared_memory: str = "always") -> Iterator[subprocess.Popen[str]]:
    """A process of another user that reads a stream as alice, and keeps its mappings."""
    command = [sys.executable, "-m", "tests.integration.other_user"]
    command += [secured.cluster.bootstrap, str(secured.ca), stream, shared_memory]
    environment = {**os.environ, "KERA_TEST_PASSWORD": PASSWORD}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], **question: Any) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr is not None else ""
    answer: dict[str, Any] = json.loads(line)
    return answer


async def test_another_user_reads_only_its_domains_in_place_and_finds_no_other_data(
    secured: Secured, admin: Client
) -> None:
    await make(admin, "ours", "eu", OURS)
    await make(admin, "theirs", "us", THEIRS)
    await make(admin, "anybodys", "default", THEIRS)
    rules = [await secured.grant("user:alice", each, READ) for each in ("domain:eu", "stream:ours")]
    with reader(secured, "ours") as process:
        read = ask(process, read=200)
        assert read == {"records": 200, "in_place": True, "error": ""}
        assert ask(process, find=[OURS.decode(), THEIRS.decode()]) == {"files": 1, "found": [True, False]}
        assert ask(process, open_arenas=True) == {"opened": 0}, "the files themselves are for the broker's user"

        await secured.revoke(rules[0])
        await write(admin, "ours", b"written after it was revoked")
        assert ask(process, find=["written after it was revoked", THEIRS.decode()]) == {
            "files": 1,
            "found": [False, False],
        }
    with reader(secured, "ours", "auto") as process:
        assert ask(process, read=400) == {"records": 400, "in_place": False, "error": ""}
        assert ask(process, find=[OURS.decode()])["files"] == 0


async def test_a_user_without_a_right_to_the_domain_gets_copies_or_an_error(secured: Secured, admin: Client) -> None:
    await make(admin, "copied", "eu", OURS)
    await secured.grant("user:alice", "stream:copied", READ)
    with reader(secured, "copied") as process:
        answer = ask(process, read=200)
        assert "user:alice may not read domain:eu" in answer["error"]
    with reader(secured, "copied", "auto") as process:
        assert ask(process, read=200) == {"records": 200, "in_place": False, "error": ""}
