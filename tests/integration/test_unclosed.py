"""Producers and consumers that the program does not close: their records are delivered, or the loss is reported.

Each program is a process of its own, as the tests are about its end.
"""

import re
import textwrap

import pytest

from kera.client import Client
from kera.local.cluster import RunningCluster
from tests.integration.ending_support import run_program, stored

RECORDS = 300

BEGINNING = f"""
import asyncio, sys, threading
from kera.client import Client
bootstrap, stream = sys.argv[1:]

async def begin():
    client = await Client.connect(bootstrap)
    producer = client.producer(linger_ms=3_600_000)
    await producer.prepare(stream)
    for number in range({RECORDS}):
        producer.send(stream, b"%d" % number)
    return client, producer
"""

ENDS_WITH_ITS_LOOP = "asyncio.run(begin())"
ENDS_WITH_UVLOOP = "import uvloop; uvloop.run(begin())"
ENDS_BEFORE_IT_HAS_CONNECTED = f"""
async def main():
    client = await Client.connect(bootstrap)
    producer = client.producer()
    await producer.prepare(stream)
    for number in range({RECORDS}):
        producer.send(stream, b"%d" % number)
asyncio.run(main())
"""
ENDS_OVER_TCP = """
import os
os.environ["KERA_CLIENT_TRANSPORT"] = "tcp"
loop = asyncio.new_event_loop()
kept = loop.run_until_complete(begin())
"""
EXITS_WITHIN_THE_BLOCK = f"""
from kera.client.sync import Client
with Client(bootstrap) as client, client.producer() as producer:
    for number in range({RECORDS}):
        producer.send(stream, b"%d" % number)
    sys.exit()
"""
RUNS_IN_A_FORKED_CHILD = f"""
import multiprocessing
from kera.client.sync import Client
def work():
    global kept
    producer = Client(bootstrap).producer()
    for number in range({RECORDS}):
        producer.send(stream, b"%d" % number)
    kept = producer
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
assert child.exitcode == 0
"""
ENDS_AS_A_WORKER_OF_CELERY = f"""
import os, sys, types
from kera.client.sync import Client
receivers = []
class Signal:
    def connect(self, receiver, weak=True):
        receivers.append(receiver)
sys.modules["celery.signals"] = types.SimpleNamespace(worker_process_shutdown=Signal())
child = os.fork()
if child == 0:
    producer = Client(bootstrap).producer(linger_ms=3_600_000)
    for number in range({RECORDS}):
        producer.send(stream, b"%d" % number)
    for receiver in receivers:
        receiver(sender="host", pid=os.getpid(), exitcode=0)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
CLOSES_THE_CLIENT = """
async def main():
    client, producer = await begin()
    await client.close()
asyncio.run(main())
"""
LEAVES_THE_CLIENT = """
async def main():
    async with await Client.connect(bootstrap) as client:
        producer = client.producer(linger_ms=3_600_000)
        await producer.prepare(stream)
        for number in range(RECORDS):
            producer.send(stream, b"%d" % number)
asyncio.run(main())
""".replace("RECORDS", str(RECORDS))
STOPS_ITS_LOOP = """
loop = asyncio.new_event_loop()
kept = loop.run_until_complete(begin())
"""
HAS_ITS_LOOP_ON_A_THREAD = """
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
kept = asyncio.run_coroutine_threadsafe(begin(), loop).result()
"""
CLOSES_ITS_LOOP = """
loop = asyncio.new_event_loop()
kept = loop.run_until_complete(begin())
loop.close()
"""
DROPS_IT_AND_CLOSES_ITS_LOOP = """
import gc
loop = asyncio.new_event_loop()
loop.run_until_complete(begin())
loop.close()
gc.collect()
"""


async def run(program: str, cluster: RunningCluster, stream: str) -> str:
    """Run a program; returns its standard error."""
    ended = await run_program(BEGINNING + textwrap.dedent(program), cluster, stream)
    assert ended.code == 0, ended.errors
    return ended.errors


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("run", ENDS_WITH_ITS_LOOP),
        ("exit", EXITS_WITHIN_THE_BLOCK),
        ("stopped", STOPS_ITS_LOOP),
        pytest.param("uvloop", ENDS_WITH_UVLOOP, marks=pytest.mark.slow),
        pytest.param("early", ENDS_BEFORE_IT_HAS_CONNECTED, marks=pytest.mark.slow),
        pytest.param("tcp", ENDS_OVER_TCP, marks=pytest.mark.slow),
        pytest.param("child", RUNS_IN_A_FORKED_CHILD, marks=pytest.mark.slow),
        pytest.param("celery", ENDS_AS_A_WORKER_OF_CELERY, marks=pytest.mark.slow),
        pytest.param("client", CLOSES_THE_CLIENT, marks=pytest.mark.slow),
        pytest.param("left", LEAVES_THE_CLIENT, marks=pytest.mark.slow),
        pytest.param("thread", HAS_ITS_LOOP_ON_A_THREAD, marks=pytest.mark.slow),
    ],
)
async def test_records_of_an_unclosed_producer_are_delivered_at_the_end(
    cluster: RunningCluster, name: str, program: str
) -> None:
    errors = await run(program, cluster, f"unclosed-{name}")
    assert await stored(cluster, f"unclosed-{name}") == [b"%d" % number for number in range(RECORDS)]
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("name", "program"),
    [("kept", CLOSES_ITS_LOOP), pytest.param("dropped", DROPS_IT_AND_CLOSES_ITS_LOOP, marks=pytest.mark.slow)],
)
async def test_undeliverable_records_are_counted_in_a_warning_and_in_the_log(
    cluster: RunningCluster, name: str, program: str
) -> None:
    stream = f"lost-{name}"
    errors = await run(program, cluster, stream)
    assert f"ResourceWarning: a producer was dropped with {RECORDS} records of stream {stream!r} undelivered" in errors
    assert re.search(
        rf"producer was not closed; records are lost.*records={RECORDS}.*streams=\['{stream}'\]", errors
    ), errors
    assert await stored(cluster, stream) == []


async def test_an_unclosed_group_consumer_leaves_at_the_end_of_its_loop(
    cluster: RunningCluster,
) -> None:
    stream = "unclosed-group"
    program = f"""
    async def main():
        client, producer = await begin()
        await producer.close()
        consumer = client.group_consumer("app", stream, start="earliest", commit_interval_ms=3_600_000)
        taken = 0
        async for record in consumer:
            taken += 1
            if taken == {RECORDS}:
                break
        await consumer.records().aclose()
        return client
    asyncio.run(main())
    """
    await run(program, cluster, stream)
    async with await Client.connect(cluster.bootstrap) as client:
        consumer_group = await client.admin.describe_consumer_group("app")
        assert consumer_group.members == ()


async def test_proxies_of_the_environment_are_not_used(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    await run(ENDS_WITH_ITS_LOOP, cluster, "beside-a-proxy")
    assert len(await stored(cluster, "beside-a-proxy")) == RECORDS
