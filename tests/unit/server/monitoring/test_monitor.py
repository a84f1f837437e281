"""Health and metrics of a daemon over HTTP: also while its loop is stuck."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Generator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily

from kera.core.base.build import this_build
from kera.core.base.health import concern, well, wrong
from kera.core.base.turns import Turns, at_once
from kera.core.native import native
from kera.core.rpc import Call, Reply, api
from kera.core.rpc.method import Method, Peer, ResponseT
from kera.server.monitoring.figures import STREAMS_AT_ONCE_MAX
from kera.server.monitoring.figures import OfStreams as FoundStreams
from kera.server.monitoring.monitor import Monitor
from kera.server.monitoring.sources import SAMPLES_AT_ONCE, Aside, Fixed, Steps, rendered
from kera.v1 import daemon_pb2

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30


class OfStreams:
    def __init__(self, count: int) -> None:
        self._count = count

    def steps(self, *, everything: bool) -> Steps:
        family = GaugeMetricFamily("streams_by_name", "Streams.", labels=["stream"])
        for number in range(self._count if everything else 0):
            family.add_metric([f'a "stream" {number}'], number)
            yield
        return [GaugeMetricFamily("streams", "Streams.", value=self._count), family]


@pytest.fixture
async def monitor() -> AsyncIterator[Monitor]:
    with Monitor("broker") as monitor:
        yield monitor


def served(monitor: Monitor) -> str:
    return monitor.serve("127.0.0.1", 0)["metrics_address"]


def fetch(address: str, path: str, **fields: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", headers=fields)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def get(address: str, path: str, **fields: str) -> tuple[int, str]:
    return await asyncio.to_thread(fetch, address, path, **fields)


async def test_a_daemon_is_ready_when_it_serves_without_problems(monitor: Monitor) -> None:
    address = served(monitor)
    monitor.health.starting("it reads its log")
    starting = await get(address, "/readyz")
    monitor.health.add("disk", lambda: well("it takes data"))
    monitor.health.started()
    serving = await get(address, "/readyz")
    monitor.health.add("disk", lambda: wrong("it is full"))
    full = await get(address, "/readyz")
    monitor.health.add("disk", lambda: concern("it is slow"))
    slow = await get(address, "/readyz")
    monitor.health.stopping()
    stopping = await get(address, "/readyz")

    assert starting == (503, "not ready\n[-] state: it is starting: it reads its log\n")
    assert serving == (200, "ready\n[+] state: it serves\n[+] disk: it takes data\n")
    assert full == (503, "not ready\n[+] state: it serves\n[-] disk: it is full\n")
    assert slow == (200, "ready\n[+] state: it serves\n[!] disk: it is slow\n")
    assert stopping[0] == 503
    assert stopping[1].startswith("not ready\n[-] state: it is stopping")


async def test_readiness_is_json_on_request(monitor: Monitor) -> None:
    address = served(monitor)
    status, text = await get(address, "/readyz", Accept="application/json")

    assert status == 503
    assert json.loads(text) == {
        "ready": False,
        "checks": [{"name": "state", "state": "problem", "text": "it is starting"}],
    }


async def test_a_stuck_loop_makes_the_daemon_neither_live_nor_ready() -> None:
    with Monitor("broker", stuck_s=0.3) as monitor:
        address = served(monitor)
        monitor.health.started()
        live = await get(address, "/livez")
        found: list[tuple[int, str]] = []
        told = threading.Event()

        def ask() -> None:
            while not found or found[-1][0] == 200:
                found.append(fetch(address, "/livez"))
            found.append(fetch(address, "/readyz"))
            told.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert told.wait(WAIT_S), "this is the loop, and it is stuck here"
        asking.join()
        (*_, (livez, why), (readyz, reason)) = found
        while (recovered := await get(address, "/livez"))[0] != 200:
            pass
        ready = await get(address, "/readyz")

    assert live == (200, "live\n")
    assert (livez, readyz) == (503, 503)
    assert why.startswith("the event loop has not turned for ")
    assert "[-] loop: the event loop has not turned for " in reason
    assert recovered == (200, "live\n")
    assert ready[0] == 200


async def test_metrics_has_totals_and_metrics_all_has_each_stream(monitor: Monitor) -> None:
    monitor.add(OfStreams(3))
    Counter("chunks_appended", "Chunks.", registry=monitor.registry).inc(3)
    address = served(monitor)
    (few_status, few), (status, everything) = await get(address, "/metrics"), await get(address, "/metrics/all")

    assert (few_status, status) == (200, 200)
    for text in few, everything:
        assert "\nstreams 3.0\n" in text
        assert "\nchunks_appended_total 3.0\n" in text
        assert f"\nkera_native {float(native is not None)}\n" in text
        assert "kera_build_info{" in text
        assert "\nprocess_resident_memory_bytes " in text
        assert "\nkera_loop_lag_seconds " in text
    assert "stream=" not in few
    assert '\nstreams_by_name{stream="a \\"stream\\" 2"} 2.0\n' in everything


async def test_collecting_many_metrics_does_not_block_the_loop(monitor: Monitor) -> None:
    monitor.add(OfStreams(500))
    monitor._turns = Turns(slice_s=0.0)  # each step ends a slice
    families = await monitor.collect(everything=True)

    assert sum(len(family.samples) for family in families if family.name == "streams_by_name") == 500
    assert monitor._turns.slices > 500


async def test_the_free_space_of_disks_is_shown(tmp_path: object) -> None:
    with Monitor("broker", [tmp_path, "/none"]) as monitor:  # type: ignore[list-item]
        _, text = await get(served(monitor), "/metrics")

    assert f'kera_filesystem_free_bytes{{path="{tmp_path}"}} ' in text
    assert f'kera_filesystem_size_bytes{{path="{tmp_path}"}} ' in text
    assert 'path="/none"' not in text


async def test_two_daemons_of_one_process_have_separate_metrics(monitor: Monitor) -> None:
    with Monitor("broker") as other:
        Counter("chunks_appended", "Chunks.", registry=monitor.registry).inc(3)
        _, mine = await get(served(monitor), "/metrics")
        _, others = await get(served(other), "/metrics")

    assert "chunks_appended_total" in mine
    assert "chunks_appended_total" not in others


async def test_a_monitor_without_a_port_does_not_listen() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with Monitor("broker") as monitor:
        assert monitor.serve("127.0.0.1", None) == {}
        assert "kera-http" not in {thread.name for thread in threading.enumerate()} - before


async def test_a_daemon_describes_itself(monitor: Monitor) -> None:
    monitor.health.started()
    monitor.health.add("disk", lambda: concern("it is slow"))
    said = await ask(monitor, api.DESCRIBE_DAEMON, daemon_pb2.DescribeDaemonRequest())

    assert (said.role, said.version, said.native) == ("broker", this_build().version, native is not None)
    assert abs(said.now_us - time.time() * 1e6) < 60e6
    assert [(each.name, each.state) for each in said.checks] == [
        ("state", daemon_pb2.HEALTH_STATE_OK),
        ("disk", daemon_pb2.HEALTH_STATE_WARNING),
    ]


async def ask(monitor: Monitor, method: Method[Any, ResponseT], request: Any) -> ResponseT:
    answer = monitor.service()[method](Call(request, memoryview(b""), Peer("grpc", "")))
    assert not isinstance(answer, Reply)
    message: ResponseT = (await answer).message
    return message


class Numbered:
    """A `PerStream` of streams 1 to `count`."""

    def __init__(self, count: int) -> None:
        self._count = count

    def of_streams(self, after_stream_id: int, streams_max: int) -> Generator[None, None, FoundStreams]:
        ids = range(after_stream_id + 1, self._count + 1)
        yield
        found = [daemon_pb2.StreamFigures(stream_id=stream_id) for stream_id in ids[:streams_max]]
        return FoundStreams(found, more=len(ids) > streams_max)


def values(response: daemon_pb2.ReadFiguresResponse) -> dict[tuple[str, ...], float]:
    return {(figure.name, *figure.labels): figure.value for figure in response.figures}


async def test_figures_over_rpc_agree_with_prometheus_without_a_port(monitor: Monitor) -> None:
    Counter("chunks", "Chunks.", ["kind"], registry=monitor.registry).labels("new").inc(3)
    monitor.add(OfStreams(2))
    first = await ask(monitor, api.READ_FIGURES, daemon_pb2.ReadFiguresRequest())
    second = await ask(monitor, api.READ_FIGURES, daemon_pb2.ReadFiguresRequest())

    found = values(second)
    assert found["chunks_total", "kind", "new"] == 3
    assert found["streams",] == 2
    assert not [name for name, *_ in found if name == "streams_by_name" or name.endswith("_created")]
    assert found["process_resident_memory_bytes",] > 0
    assert found["kera_processor_seconds_total", "of", "process"] > 0
    assert first.launch_id == second.launch_id
    assert first.uptime_us < second.uptime_us
    assert not second.streams


async def test_figures_of_streams_are_read_in_pages(monitor: Monitor) -> None:
    monitor.watch_streams(Numbered(STREAMS_AT_ONCE_MAX + 2))

    async def read(streams_max: int, after: int = 0) -> tuple[list[int], bool]:
        request = daemon_pb2.ReadFiguresRequest(streams_max=streams_max, after_stream_id=after)
        response = await ask(monitor, api.READ_FIGURES, request)
        return [each.stream_id for each in response.streams], response.more_streams

    assert await read(0) == ([], False)
    assert await read(2) == ([1, 2], True)
    found, more = await read((1 << 32) - 1)
    assert (len(found), found[-1], more) == (STREAMS_AT_ONCE_MAX, STREAMS_AT_ONCE_MAX, True)
    assert await read(10, STREAMS_AT_ONCE_MAX) == ([STREAMS_AT_ONCE_MAX + 1, STREAMS_AT_ONCE_MAX + 2], False)
    assert await read(10, (1 << 64) - 1) == ([], False)


async def test_reading_figures_leaves_the_loop_lag_to_prometheus(monitor: Monitor) -> None:
    address = served(monitor)
    found = values(await ask(monitor, api.READ_FIGURES, daemon_pb2.ReadFiguresRequest()))

    assert ("kera_loop_lag_seconds",) not in found
    assert "\nkera_loop_lag_seconds " in (await get(address, "/metrics"))[1]


async def test_a_hanging_source_takes_one_thread_for_all_requests() -> None:
    go_on, asked = threading.Event(), 0

    def hangs() -> list[int]:
        nonlocal asked
        asked += 1
        go_on.wait(WAIT_S)
        return [1]

    aside = Aside("test")
    assert [await aside.run(hangs, 0.01) for _ in range(3)] == [[], [], []]
    assert asked == 1
    go_on.set()
    while not await aside.run(hangs, WAIT_S):
        await asyncio.sleep(0)


def test_rendering_in_parts_gives_the_text_of_rendering_at_once() -> None:
    registry = CollectorRegistry()
    counter = Counter("chunks", "Chunks,\nin lines.", ["stream"], registry=registry)
    for number in range(3 * SAMPLES_AT_ONCE):
        counter.labels(f"# HELP me\n# {number}").inc(number)
    families = [*registry.collect(), *at_once(OfStreams(2 * SAMPLES_AT_ONCE).steps(everything=True))]
    for family in families:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]

    assert rendered(families) == generate_latest(Fixed(families))
