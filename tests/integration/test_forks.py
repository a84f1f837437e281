"""Programs that fork with a client open: a child gets a clear error at once, and its parent loses nothing."""

import pytest

from kera.local.cluster import RunningCluster
from tests.integration.ending_support import run_program, stored

SYNC = """
import os, sys
from kera.client.sync import Client
from kera.core.errors import ClosedError
bootstrap, stream = sys.argv[1:]
with Client(bootstrap) as client, client.producer() as producer, client.consumer(stream, start="earliest") as consumer:
    producer.send(stream, b"parent").result()
    child = os.fork()
    if child == 0:
        for use in (
            lambda: producer.send(stream, b"child"),
            lambda: producer.flush(),
            lambda: next(iter(consumer)),
            lambda: client.describe(stream),
            lambda: Client(bootstrap).describe(stream),
        ):
            try:
                use()
            except ClosedError as error:
                assert "forked" in str(error)
            else:
                os._exit(1)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    producer.send(stream, b"parent again").result()
"""


async def test_a_forked_child_gets_an_error_when_it_uses_the_client_of_its_parent(cluster: RunningCluster) -> None:
    ended = await run_program(SYNC, cluster, "forked")
    assert (ended.code, ended.errors) == (0, "")
    assert await stored(cluster, "forked") == [b"parent", b"parent again"]


ASYNC = """
import asyncio, os, sys, time
from kera.client import Client
from kera.core.errors import ClosedError
bootstrap, stream, ends, loop_of = *sys.argv[1:], {ends!r}, {loop_of!r}
parent = os.getpid()

async def child(client, producer, group):
    for use in (
        lambda: producer.send(stream, b"child"),
        lambda: producer.flush(),
        lambda: producer.prepare(stream),
        lambda: client.admin.list_streams(),
    ):
        try:
            await use()
        except ClosedError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    if ends == "exit":
        sys.exit(0)
    if ends == "error":
        raise SystemError("of the child")
    os._exit(0)

async def main():
    await asyncio.to_thread(time.sleep, 0)  # there are threads whose end the loop waits for
    async with await Client.connect(bootstrap) as client, client.producer(linger_ms=300) as producer:
        async with client.group_consumer("group-of-" + stream, stream, start="earliest") as group:
            await producer.prepare(stream)
            await producer.send(stream, b"first")
            pending = producer.send(stream, b"pending")
            pid = os.fork()
            if pid == 0:
                await child(client, producer, group)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            code = os.waitstatus_to_exitcode(status)
            assert (code != 0) == (ends == "error"), code
            await pending
            await producer.send(stream, b"last")
            values = []
            async for record in group:
                values.append(record.value)
                if len(values) == 3:
                    break
            assert values == [b"first", b"pending", b"last"]

try:
    if loop_of == "uvloop":
        import uvloop
        uvloop.run(main())
    else:
        asyncio.run(main())
except SystemError:
    assert os.getpid() != parent
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("loop_of", "ends", "transport"),
    [
        ("asyncio", "exit", "unix"),
        *(
            pytest.param(loop_of, ends, transport, marks=pytest.mark.slow)
            for loop_of in ("asyncio", "uvloop")
            for ends in ("exit", "error", "_exit")
            for transport in ("unix", "tcp", "grpc")
            if (loop_of, ends, transport) != ("asyncio", "exit", "unix")
            # The child of a parent with streams over gRPC has to end with _exit: see docs/client.md.
            and (transport, ends) not in {("grpc", "exit"), ("grpc", "error")}
        ),
    ],
)
async def test_a_fork_in_a_running_loop_does_not_disturb_the_parent(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, loop_of: str, ends: str, transport: str
) -> None:
    """The child leaves the parent's loop: it must take nothing from it, and send none of the accepted records."""
    monkeypatch.setenv("KERA_CLIENT_TRANSPORT", transport)
    stream = f"forked-{loop_of}-{ends}-{transport}"
    ended = await run_program(ASYNC.format(ends=ends, loop_of=loop_of), cluster, stream)
    assert ended.code == 0, ended.errors
    assert "retrying" not in ended.errors
    assert await stored(cluster, stream) == [b"first", b"pending", b"last"]
