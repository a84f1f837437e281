"""The planner service as a process of its own, with a real cluster: its answers to the columnar engine."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kera.client import Client
from kera.local.cluster import RunningCluster
from kera.spark_connector.columns import columns_of
from kera.spark_connector.reading.streaming import KeraStreamReader

pytestmark = pytest.mark.timeout(120)

SCHEMA = pa.schema([("n", pa.int64())])
COLUMNS = columns_of(SCHEMA, typed=True)
ANSWER_TIMEOUT_S = 60.0


class Refused(Exception):
    """An error answer."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['type']}: {error['message']}")
        self.error = error


class Planner:
    """The process, and the requests on their way."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kera.spark_connector.service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.unasked: list[dict[str, Any]] = []
        """Answers that belong to no request."""
        self.log: list[str] = []
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_log)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            if answer["id"] is None:
                self.unasked.append(answer)
            else:
                self._waiting.pop(answer["id"]).set_result(answer)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(line.decode() for line in self.process.stderr)

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def begin(self, method: str, **params: Any) -> Callable[[], dict[str, Any]]:
        number = self.numbers = getattr(self, "numbers", 0) + 1
        waiting: Future[dict[str, Any]] = Future()
        self._waiting[number] = waiting
        self.write(json.dumps({"id": number, "method": method, "params": params}).encode())

        def result() -> dict[str, Any]:
            answer = waiting.result(ANSWER_TIMEOUT_S)
            if "error" in answer:
                raise Refused(answer["error"])
            found = answer["result"]
            assert isinstance(found, dict)
            return found

        return result

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.begin(method, **params)()

    def end(self) -> int:
        """Close its input; returns its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        code = self.process.wait(ANSWER_TIMEOUT_S)
        for thread in self._threads:
            thread.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code


@pytest.fixture(scope="module")
def planner() -> Iterator[Planner]:
    """A service that tests share."""
    made = Planner()
    yield made
    assert made.end() == 0


@pytest.fixture
def own_planner() -> Iterator[Planner]:
    """A service for a test that ends it or reads its log."""
    made = Planner()
    yield made
    assert made.end() == 0


@pytest.fixture
def stream(request: pytest.FixtureRequest, cluster: RunningCluster) -> str:
    """A stream with two streamlets and 100 records in each."""
    name = str(request.node.name).replace("_", "-")[-60:].strip("-")

    async def make() -> None:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream(name, streamlets=2, schema=SCHEMA)

    asyncio.run(make())
    write(cluster, name, 100)
    return name


def write(cluster: RunningCluster, stream: str, records: int) -> None:
    async def send() -> None:
        async with await Client.connect(cluster.bootstrap) as client, client.producer() as producer:
            for streamlet in range(2):
                batch = pa.record_batch([pa.array(range(records))], schema=SCHEMA)
                await (await producer.send_batch(stream, batch, streamlet=streamlet))

    asyncio.run(send())


def options(cluster: RunningCluster, stream: str, **more: str) -> dict[str, str]:
    return {"kera.bootstrap.servers": cluster.bootstrap, "subscribe": stream, **more}


def test_hello_reports_the_version_and_logs_nothing(own_planner: Planner) -> None:
    answer = own_planner.call("hello")

    assert answer["pid"] == own_planner.process.pid
    assert answer["version"].count(".") == 2
    assert own_planner.end() == 0
    assert own_planner.log == []


def test_the_schema_and_pieces_of_a_batch_match_the_stream(
    planner: Planner, cluster: RunningCluster, stream: str
) -> None:
    given = options(cluster, stream, engine="columnar")

    schema = planner.call("schema", options=given)["schema"]
    assert json.loads(schema) == json.loads(COLUMNS.json())
    pieces = planner.call("plan_batch", options=given, schema=schema, parallelism=8)["pieces"]

    assert [(piece["streamlet"], piece["records"], piece["first_record"]) for piece in pieces] == [
        (0, 100, 0),
        (1, 100, 0),
    ]
    for piece in pieces:
        assert piece["start"] < piece["end"]
        assert piece["broker"]["frames_address"].count(":") == 1
        assert piece["connection"]["bootstrap"] == cluster.bootstrap
        assert not {"localhost", "127.0.0.1", "::1"} & set(piece["hosts"])
    assert {piece["broker"]["broker_id"] for piece in pieces} == {1, 2}


def test_a_query_gets_the_same_offsets_as_from_the_python_engine(
    planner: Planner, cluster: RunningCluster, stream: str
) -> None:
    given = options(cluster, stream, startingOffsets="earliest") | {"kera.group.id": f"{stream}-group"}
    handle = planner.call("open", options=given, schema=COLUMNS.json())["stream"]
    reader = KeraStreamReader(given, COLUMNS)
    everything = {"type": "all"}

    def latest(start: str) -> str:
        return str(planner.call("latest_offset", stream=handle, start=start, limit=everything)["offset"])

    try:
        start = planner.call("initial_offset", stream=handle)["offset"]
        assert start == json.dumps(reader.initialOffset())
        assert planner.call("read_limit", stream=handle)["limit"] == everything
        first = latest(start)
        assert first == json.dumps(reader.latestOffset(json.loads(start), ReadAllAvailable()))
        assert planner.call("report_latest_offset", stream=handle)["offset"] == json.dumps(reader.reportLatestOffset())
        pieces = planner.call("plan", stream=handle, start=start, end=first)["pieces"]
        assert [(piece["streamlet"], piece["records"]) for piece in pieces] == [(0, 100), (1, 100)]
        planner.call("commit", stream=handle, end=first)

        write(cluster, stream, 10)
        second = latest(first)
        assert second == json.dumps(reader.latestOffset(json.loads(first), ReadAllAvailable()))
        pieces = planner.call("plan", stream=handle, start=first, end=second)["pieces"]
        assert [(piece["first_record"], piece["records"]) for piece in pieces] == [(100, 10)] * 2
        metrics = planner.call("metrics", stream=handle, consumed=first)["metrics"]
        assert set(metrics.values()) == {"10", "10.0"}

        odd = json.dumps(json.loads(second), indent=1)
        assert latest(odd) == odd
        planner.call("prepare_available_now", stream=handle)
        write(cluster, stream, 1)
        assert latest(second) == second
    finally:
        reader.stop()
    planner.call("close", stream=handle)
    with pytest.raises(Refused, match=f"no stream {handle} is open"):
        planner.call("initial_offset", stream=handle)


def test_a_restarted_service_keeps_the_initial_offset_of_a_query(
    cluster: RunningCluster, stream: str, planner: Planner
) -> None:
    given = options(cluster, stream)
    before = Planner()
    handle = before.call("open", options=given, schema=COLUMNS.json())["stream"]
    initial = before.call("initial_offset", stream=handle)["offset"]
    before.process.kill()
    before.process.wait()
    before.end()
    write(cluster, stream, 10)

    handle = planner.call("open", options=given, schema=COLUMNS.json(), initial=initial)["stream"]
    assert planner.call("initial_offset", stream=handle)["offset"] == initial
    end = planner.call("latest_offset", stream=handle, start=initial, limit={"type": "all"})["offset"]

    assert json.loads(end)["since"] == json.loads(initial)["streams"]


def test_real_time_mode_continues_from_places_within_chunks(
    planner: Planner, cluster: RunningCluster, stream: str
) -> None:
    handle = planner.call("open", options=options(cluster, stream, startingOffsets="earliest"), schema=COLUMNS.json())[
        "stream"
    ]
    start = planner.call("initial_offset", stream=handle)["offset"]
    pieces = planner.call("plan_real_time", stream=handle, start=start)["pieces"]
    assert [(piece["streamlet"], piece["end"], piece["records"]) for piece in pieces] == [(0, None, 0), (1, None, 0)]

    places = [[stream, 1, 0, *pieces[1]["start"], 40]]
    end = planner.call("merge", stream=handle, start=start, places=places)["offset"]
    assert planner.call("merge", stream=handle, start=start, places=[])["offset"] == start
    following = planner.call("plan_real_time", stream=handle, start=end)["pieces"]
    assert [piece["first_record"] for piece in following] == [0, 40]
    assert following[1]["start"] == pieces[1]["start"]

    latest = planner.call("latest_offset", stream=handle, start=end, limit={"type": "all"})["offset"]
    batch = planner.call("plan", stream=handle, start=end, end=latest)["pieces"]
    assert [(piece["first_record"], piece["records"]) for piece in batch] == [(0, 100), (40, 60)]


def test_route_names_the_broker_and_handles_failures_and_data_loss(
    planner: Planner, cluster: RunningCluster, stream: str
) -> None:
    (piece, _) = planner.call("plan_batch", options=options(cluster, stream), schema=COLUMNS.json())["pieces"]
    names = "connection", "stream", "stream_id", "streamlet", "entry", "end", "fail_on_data_loss", "shared_memory"
    asked = {name: piece[name] for name in names} | {"reader": "r", "position": piece["start"], "progressed": False}
    error = {"code": "not_owner", "message": "it has moved", "retriable": True, "attributes": {"broker_id": "1"}}

    assert planner.call("route", **asked, failed=None) == {"broker": piece["broker"], "position": piece["start"]}
    failed = {"broker_id": 1, "error": error}
    assert planner.call("route", **asked, failed=failed)["broker"] == piece["broker"]
    lost = error | {"code": "data_lost", "message": "it is gone", "attributes": {"available_from": "[9, 9, 9]"}}
    with pytest.raises(Refused, match="DataLost: it is gone"):
        planner.call("route", **asked, failed={"broker_id": 1, "error": lost})
    asked["fail_on_data_loss"] = False
    answer = planner.call("route", **asked, failed={"broker_id": 1, "error": lost})
    assert answer == {"end": True, "lost": "it is gone"}
    with pytest.raises(Refused, match="StreamRecreated"):
        planner.call("route", **{**asked, "stream_id": 10**9, "fail_on_data_loss": True}, failed=None)


def test_errors_are_answers_and_do_not_end_the_service(own_planner: Planner, cluster: RunningCluster) -> None:
    own_planner.write(b"{this is not json")
    own_planner.write(b"[1, 2]")
    with pytest.raises(Refused, match="InvalidArgument: there is no method 'dance'"):
        own_planner.call("dance")
    with pytest.raises(Refused, match="UnknownStream: no stream is called 'nothing'") as caught:
        own_planner.call("schema", options=options(cluster, "nothing"))
    assert caught.value.error["retriable"] is False
    with pytest.raises(Refused, match="unknown option startingOffset: did you mean startingOffsets"):
        own_planner.call("open", options=options(cluster, "x", startingOffset="latest"), schema=COLUMNS.json())
    with pytest.raises(Refused, match="KeyError: schema failed with KeyError"):
        own_planner.call("schema")

    assert own_planner.call("hello")["pid"] == own_planner.process.pid
    assert [answer["error"]["type"] for answer in own_planner.unasked] == ["ProtocolError"] * 2
    assert own_planner.end() == 0
    assert any("Traceback" in line for line in own_planner.log)


def test_a_waiting_request_does_not_delay_others(planner: Planner, cluster: RunningCluster, stream: str) -> None:
    closed = planner.begin("schema", options={"kera.bootstrap.servers": "127.0.0.1:1", "subscribe": stream})

    results = [planner.begin("schema", options=options(cluster, stream)) for _ in range(20)]

    assert {result()["schema"] for result in results} == {COLUMNS.json()}
    with pytest.raises(Refused, match="Unavailable"):
        closed()


def test_the_service_ends_with_its_input_despite_a_waiting_request(own_planner: Planner) -> None:
    own_planner.call("hello")
    nowhere = {"kera.bootstrap.servers": "127.0.0.1:1", "subscribe": "x"}
    own_planner.begin("plan_batch", options=nowhere, schema=COLUMNS.json())

    assert own_planner.end() == 0
