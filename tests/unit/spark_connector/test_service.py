"""The columnar engine's service: each request gets one answer; tests/integration tests the process itself."""

import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kera.core.errors import InvalidArgument, SchemaMismatch, Unavailable
from kera.spark_connector.columns import columns_of
from kera.spark_connector.service.lines import Answering, serve
from kera.spark_connector.service.methods import Service
from tests.unit.spark_connector.fakes import SCHEMA, FakeClient, FakeStream, at

OPTIONS = {"kera.bootstrap.servers": "h:1", "subscribe": "numbers", "startingOffsets": "earliest"}
COLUMNS = columns_of(SCHEMA, typed=True).json()
ALL = {"type": "all"}


@pytest.fixture
def service(cluster: FakeClient) -> Iterator[Service]:  # noqa: ARG001  # it is what its portals find
    made = Service()
    yield made
    made.close()


@pytest.fixture
def handle(service: Service) -> int:
    return int(service.call("open", {"options": OPTIONS, "schema": COLUMNS})["stream"])


class Only:
    """A service with one function for all methods."""

    def __init__(self, call: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> None:
        self.call = call

    def close(self) -> None:
        pass


def answers_to(*lines: bytes, service: Answering | None = None, **limits: int) -> list[dict[str, Any]]:
    """The answers until the input has ended and each line is answered."""

    class Answers(io.BytesIO):
        def flush(self) -> None:
            if self.getvalue().count(b"\n") == len(lines):
                complete.set()

    class Requests(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            if not line:
                assert complete.wait(60)
            return line

    complete = threading.Event()
    answers = Answers()
    serve(Requests(b"".join(line + b"\n" for line in lines)), answers, service or Service(), **limits)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def request(number: int, method: str, **params: Any) -> bytes:
    return json.dumps({"id": number, "method": method, "params": params}).encode()


# -- lines -------------------------------------------------------------------------------------------------------


def test_every_line_is_answered_under_its_number() -> None:
    answers = answers_to(*(request(number, "hello") for number in range(50)))

    assert sorted(answer["id"] for answer in answers) == list(range(50))
    assert all(answer["result"]["pid"] for answer in answers)


@pytest.mark.parametrize("line", [b"{", b"7", b"\xff\xff", b"", b"[" * 200_000, b'{"id": 1, "method": '])
def test_an_invalid_request_is_answered_and_the_next_one_is_served(line: bytes) -> None:
    bad, good = answers_to(line, request(1, "hello"))

    assert (bad["id"], bad["error"]["type"], bad["error"]["retriable"]) == (None, "ProtocolError", False)
    assert good["id"] == 1


def test_a_line_that_is_too_long_is_refused_and_skipped() -> None:
    bad, good = answers_to(request(1, "x" * 5000), request(2, "hello"), line_bytes_max=100)

    assert "more than 100 bytes" in bad["error"]["message"]
    assert good["id"] == 2


def test_too_many_requests_are_refused_but_close_is_accepted() -> None:
    go_on = threading.Event()

    def wait(method: str, _: Any) -> dict[str, Any]:
        if method == "close":
            go_on.set()
        assert go_on.wait(60)
        return {}

    requests = [*(request(number, "schema") for number in range(5)), request(5, "close")]
    answers = answers_to(*requests, service=Only(wait), requests_max=2)

    refused = [answer for answer in answers if "error" in answer]
    assert [answer["id"] for answer in refused] == [2, 3, 4]
    assert all(answer["error"]["type"] == "Unavailable" and answer["error"]["retriable"] for answer in refused)
    assert {answer["id"] for answer in answers} == set(range(6))


@pytest.mark.parametrize("params", [None, 7, [], {"stream": [1]}, {"stream": {}}])
def test_params_of_a_wrong_type_are_an_error_of_that_request(params: Any) -> None:
    for method in ("plan", "schema", "route", "merge"):
        line = json.dumps({"id": 1, "method": method, "params": params}).encode()
        (answer,) = answers_to(line)
        assert answer["error"]["type"] in {"TypeError", "KeyError", "InvalidArgument", "AttributeError"}


def test_expected_errors_keep_their_type_and_unexpected_ones_print_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: str, params: Any) -> dict[str, Any]:
        raise Unavailable("nobody is there") if params else ZeroDivisionError("by zero")

    (expected,) = answers_to(request(1, "hello", some="thing"), service=Only(fail))
    assert expected["error"] == {"type": "Unavailable", "message": "nobody is there", "retriable": True}
    assert capsys.readouterr().err == ""
    (unexpected,) = answers_to(request(1, "hello"), service=Only(fail))
    assert unexpected["error"]["message"] == "hello failed with ZeroDivisionError: by zero"
    assert "Traceback" in capsys.readouterr().err


# -- methods -----------------------------------------------------------------------------------------------------


def test_planning_a_query_with_missing_columns_is_an_error(service: Service, cluster: FakeClient) -> None:
    others = {"options": OPTIONS, "schema": COLUMNS.replace('"n"', '"m"')}
    with pytest.raises(SchemaMismatch, match="has no column 'm': it has n"):
        service.call("plan_batch", others)
    with pytest.raises(SchemaMismatch, match="has no column 'm': it has n"):
        service.call("initial_offset", service.call("open", others))
    cluster.streams["others"] = FakeStream(8, {0: [[]]}, typed=False)
    both = {"options": OPTIONS | {"subscribe": "numbers,others"}, "schema": COLUMNS}
    with pytest.raises(SchemaMismatch, match="stream 'others' has no column 'n'"):
        service.call("plan_batch", both)


def test_batch_options_are_refused_for_streams_and_the_reverse(service: Service) -> None:
    of_stream = {"options": OPTIONS | {"maxOffsetsPerTrigger": "7"}, "schema": COLUMNS}
    of_batch = {"options": OPTIONS | {"endingOffsets": "latest"}, "schema": COLUMNS}

    assert service.call("open", of_stream) == {"stream": 1}
    assert service.call("plan_batch", of_batch) == {"pieces": [], "token": None}
    for method, params in (("plan_batch", of_stream), ("open", of_batch)):
        with pytest.raises(InvalidArgument, match=r"option (maxOffsetsPerTrigger|endingOffsets)"):
            service.call(method, params)


@pytest.mark.parametrize("engine", ["columnar", "auto"])
def test_the_service_plans_for_engine_columnar_and_auto(service: Service, cluster: FakeClient, engine: str) -> None:
    cluster.chunks[0][0] += [4]
    given = {"options": OPTIONS | {"engine": engine}, "schema": COLUMNS}

    assert service.call("schema", given)["schema"] == COLUMNS
    assert len(service.call("plan_batch", given)["pieces"]) == 1
    stream = service.call("open", given)
    assert service.call("initial_offset", stream)["offset"]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, {"type": "all"}),
        ({"maxOffsetsPerTrigger": "7"}, {"type": "max_rows", "value": 7}),
        ({"maxBytesPerTrigger": "7"}, {"type": "max_bytes", "value": 7}),
        ({"minOffsetsPerTrigger": "7"}, {"type": "min_rows", "value": 7}),
    ],
)
def test_a_read_limit_comes_from_the_options_and_bounds_the_offset(
    service: Service, cluster: FakeClient, options: dict[str, str], limit: dict[str, Any]
) -> None:
    cluster.chunks[0][0] += [4, 4]
    stream = service.call("open", {"options": OPTIONS | options, "schema": COLUMNS})
    assert service.call("read_limit", stream) == {"limit": limit}
    start = service.call("initial_offset", stream)["offset"]

    end = json.loads(service.call("latest_offset", stream | {"start": start, "limit": limit})["offset"])

    first = end["streams"]["numbers"]["streamlets"]["0"][0]
    assert first == [*(at(1) if limit["type"].startswith("max") else at(2)), 4 if "max" in limit["type"] else 8]
    with pytest.raises(InvalidArgument, match="no limit of type 'max_files'"):
        service.call("latest_offset", stream | {"start": start, "limit": {"type": "max_files", "value": 1}})


def test_an_unchanged_offset_keeps_the_text_of_the_start(service: Service, handle: int, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    initial = service.call("initial_offset", {"stream": handle})["offset"]
    end = service.call("latest_offset", {"stream": handle, "start": initial, "limit": ALL})["offset"]
    assert end == json.dumps(json.loads(end))

    odd = json.dumps(json.loads(end), separators=(",", ":"))
    assert service.call("latest_offset", {"stream": handle, "start": odd, "limit": ALL})["offset"] == odd
    assert service.call("merge", {"stream": handle, "start": odd, "places": []})["offset"] == odd


def test_the_calls_of_a_query_reach_its_reader(service: Service, handle: int, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    of = {"stream": handle}
    assert service.call("report_latest_offset", of) == {"offset": None}
    assert service.call("metrics", of | {"consumed": None}) == {"metrics": {}}
    initial = service.call("initial_offset", of)["offset"]
    service.call("prepare_available_now", of)
    cluster.chunks[1][0] += [9]
    end = service.call("latest_offset", of | {"start": initial, "limit": ALL})["offset"]

    (piece,) = service.call("plan", of | {"start": initial, "end": end})["pieces"]
    assert (piece["streamlet"], piece["records"], piece["end"]) == (0, 4, list(at(1)))
    latest = service.call("report_latest_offset", of)["offset"]
    assert json.loads(latest)["streams"]["numbers"]["streamlets"]["1"] == [[*at(1), 9]]
    assert service.call("metrics", of | {"consumed": end})["metrics"]["avgOffsetsBehindLatest"] == "4.5"
    service.call("commit", of | {"end": end})
    service.call("close", of)
    ((_, positions),) = cluster.committed.items()
    assert sorted(positions.values()) == [at(0), at(1)]


def test_real_time_mode_goes_on_within_a_chunk(service: Service, handle: int, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    of = {"stream": handle}
    initial = service.call("initial_offset", of)["offset"]
    pieces = service.call("plan_real_time", of | {"start": initial})["pieces"]
    assert [(piece["streamlet"], piece["end"], piece["first_record"]) for piece in pieces] == [
        (0, None, 0),
        (1, None, 0),
    ]

    places = [["numbers", 0, 0, *at(0), 3], ["numbers", 1, 0, *at(0), 0]]
    end = service.call("merge", of | {"start": initial, "places": places})["offset"]
    written = json.loads(end)
    assert written["streams"]["numbers"]["streamlets"] == {"0": [[*at(0), 3]], "1": [[*at(0), 0]]}
    assert written["since"] == json.loads(initial)["streams"]
    assert written["group"] == json.loads(initial)["group"]

    first, _ = service.call("plan_real_time", of | {"start": end})["pieces"]
    assert (first["start"], first["first_record"]) == (list(at(0)), 3)
    another = service.call("open", {"options": OPTIONS, "schema": COLUMNS})
    later = service.call("merge", another | {"start": end, "places": [["numbers", 0, 0, *at(1), 4]]})["offset"]
    assert json.loads(later)["streams"]["numbers"]["streamlets"]["0"] == [[*at(1), 4]]


def test_the_error_for_a_stream_that_is_not_open_names_it(service: Service, handle: int) -> None:
    service.call("close", {"stream": handle})

    for stream in (handle, 99):
        with pytest.raises(InvalidArgument, match=f"no stream {stream} is open"):
            service.call("plan", {"stream": stream})
