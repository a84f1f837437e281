"""However a program ends, every record that was accepted is stored, or the program says that it is not.

The tests are a matrix of the ways to accept records and the ways to end. Each program is a process of its own.
"""

import textwrap

import pytest

from kera.client import Client
from kera.local.cluster import RunningCluster
from tests.integration.ending_support import Ended, run_program, stored

RECORDS = 200

ACCEPTING = {
    "producer": """
        from kera.client.sync import Client
        def accept(first=0, count=RECORDS):
            global kept
            client = Client(bootstrap)
            producer = client.producer(linger_ms=LINGER_MS)
            for number in range(first, first + count):
                producer.send(stream, b"%d" % number)
            kept = client, producer
        def within(end):
            with Client(bootstrap) as client, client.producer(linger_ms=LINGER_MS) as producer:
                for number in range(RECORDS):
                    producer.send(stream, b"%d" % number)
                end()
    """,
    "asyncio": """
        from kera.client import Client
        async def accepted(first, count, end):
            global kept
            client = await Client.connect(bootstrap)
            producer = client.producer(linger_ms=LINGER_MS)
            await producer.prepare(stream)
            for number in range(first, first + count):
                producer.send(stream, b"%d" % number)
            kept = client, producer
            end()
            await asyncio.sleep(0)  # cancelled here by SIGINT
        def accept(first=0, count=RECORDS):
            asyncio.run(accepted(first, count, lambda: None))
        def within(end):
            asyncio.run(accepted(0, RECORDS, end))
    """,
    "appender": """
        import pyarrow as pa
        from kera.client import Client
        from kera.core.base.ids import PRODUCER_IDS
        async def accepted(first, count, end):
            client = await Client.connect(bootstrap)
            identity = dict(producer_id=PRODUCER_IDS[first], producer_epoch=1, chunk_bytes_max=1 << 20)
            appender = await client.appender(stream, **identity)
            values = [b"%d" % number for number in range(first, first + count)]
            rows = appender.conform(pa.record_batch({"value": values}))
            done, sequence = 0, 0
            while done < count:
                result = await appender.append(0, rows.slice(done, 10), sequence)
                done, sequence = done + result.record_count, sequence + 1
            end()
            await asyncio.sleep(0)
        def accept(first=0, count=RECORDS):
            asyncio.run(accepted(first, count, lambda: None))
        def within(end):
            asyncio.run(accepted(0, RECORDS, end))
    """,
}
BEGINNING = f"""
import asyncio, concurrent.futures, multiprocessing, os, signal, sys, threading, time
bootstrap, stream = sys.argv[1:]
RECORDS, LINGER_MS = {RECORDS}, 100
def fails():
    raise RuntimeError("of the program")
def signalled(number):
    os.kill(os.getpid(), number)
    time.sleep(0)  # the handler of Python runs here
"""
ENDS = {
    "returns": "accept()",
    "returns within": "within(lambda: None)",
    "fails": "accept()\nfails()",
    "fails within": "within(fails)",
    "exits": "accept()\nsys.exit(0)",
    "exits within": "within(sys.exit)",
    "SIGTERM": "accept()\nsignalled(signal.SIGTERM)",
    "SIGTERM within": "within(lambda: signalled(signal.SIGTERM))",
    "SIGINT": "accept()\nsignalled(signal.SIGINT)",
    "SIGINT within": "within(lambda: signalled(signal.SIGINT))",
    "child": """
        child = multiprocessing.get_context("fork").Process(target=accept)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    """,
    "forked": """
        child = os.fork()
        if child == 0:
            accept()
            sys.exit()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    "pool": """
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.starmap(accept, [(first, RECORDS // 4) for first in range(0, RECORDS, RECORDS // 4)])
            pool.close()
            pool.join()
    """,
    "threads": """
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda first: accept(first, RECORDS // 4), range(0, RECORDS, RECORDS // 4)))
    """,
    "thread": """
        thread = threading.Thread(target=accept)
        thread.start()
        thread.join()
    """,
}
QUICK = {("producer", "fails"), ("asyncio", "exits within")}


def says_so(ended: Ended) -> bool:
    """Whether the program reports the loss."""
    return ended.code != 0 or "lost" in ended.errors or "undelivered" in ended.errors


def cases() -> list[object]:
    found: list[object] = []
    for accepting in ACCEPTING:
        for end in ENDS:
            for options in ((), ("-O",)):
                quick = (accepting, end) in QUICK and not options
                found.append(pytest.param(accepting, end, options, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("accepting", "end", "options"), cases())
async def test_accepted_records_are_stored_or_the_program_reports_the_loss(
    cluster: RunningCluster, accepting: str, end: str, options: tuple[str, ...]
) -> None:
    stream = f"ends-{accepting}-{end}{''.join(options)}".replace(" ", "-")
    program = BEGINNING + textwrap.dedent(ACCEPTING[accepting]) + textwrap.dedent(ENDS[end])
    ended = await run_program(program, cluster, stream, *options)
    found = await stored(cluster, stream)
    assert len(set(found)) == len(found), "a record was stored twice"
    assert len(found) == RECORDS or says_so(ended), (len(found), ended)
    if not end.startswith("SIG"):
        assert "within" in end or len(found) == RECORDS, ended.errors
        assert (ended.code == 0) != end.startswith("fails"), ended.errors


READS = f"""
from kera.client.sync import Client
with Client(bootstrap) as client:
    group = client.group_consumer("group-of-" + stream, stream, start="earliest", commit_interval_ms=100)
    for number, record in enumerate(group, 1):
        print(record.value.decode(), flush=True)
        if number == {RECORDS // 2}:
            break
    END
"""


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        pytest.param("fails()", marks=pytest.mark.slow),
        pytest.param("sys.exit()", marks=pytest.mark.slow),
        pytest.param("signalled(signal.SIGTERM)", marks=pytest.mark.slow),
        pytest.param("signalled(signal.SIGINT)", marks=pytest.mark.slow),
        pytest.param("os._exit(0)", marks=pytest.mark.slow),
    ],
)
async def test_a_consumer_group_skips_no_record_after_a_member_has_ended(cluster: RunningCluster, end: str) -> None:
    stream = f"group-{''.join(letter for letter in end if letter.isalpha())}"
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream(stream)
        async with client.producer() as producer:
            await producer.prepare(stream)
            for number in range(RECORDS):
                producer.send(stream, b"%d" % number)
        ended = await run_program(BEGINNING + READS.replace("END", end), cluster, stream, create=False)
        seen = {line.encode() for line in ended.said.split()}
        assert len(seen) == RECORDS // 2, ended.errors
        async with client.group_consumer(f"group-of-{stream}", stream, start="earliest") as group:
            async for record in group:
                seen.add(record.value)
                if len(seen) == RECORDS:
                    break
