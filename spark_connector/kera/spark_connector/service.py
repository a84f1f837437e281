"""The planner of the columnar engine: ``python -m kera.spark_connector.service``.

The engine reads in Spark's JVM, and knows nothing of clusters: it asks this process, its child, where to read, and does
so over standard input and output. All of planning, what a checkpoint holds, the named cursor, and what follows from an
error is decided here, by the very same code as when Spark runs the Python data source itself.

    request   {"id": 1, "method": "schema", "params": {"options": {…}}}
    answer    {"id": 1, "result": {…}}
    or        {"id": 1, "error": {"type": "UnknownStream", "message": "…", "retriable": false}}

One JSON object per line each way, in UTF-8. Requests are answered side by side, in any order; those about one stream
(`open`) one at a time. What cannot be read as a request is answered with an error, and never the end. The process ends
when its input does.

The same program runs beside executors, for `route` alone. What a method needs is imported when it is first called: a
driver waits for `hello`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from kera.spark_connector.options import ReadOptions
    from kera.spark_connector.routing import Router
    from kera.spark_connector.spark_api import ReadLimit
    from kera.spark_connector.streaming import KeraStreamReader

LINE_BYTES_MAX = 64 << 20
"""Longer requests are refused."""
REQUESTS_MAX = 256
"""So many are answered at the same time; more are refused, but for those that end something."""
ALWAYS_ANSWERED = {"close", "hello"}
CLOSE_TIMEOUT_S = 5.0
"""The end waits no longer for connections to be closed."""

Params = Mapping[str, Any]


class _Stream(NamedTuple):
    """What `open` has made."""

    reader: KeraStreamReader
    options: ReadOptions
    lock: threading.Lock
    """Readers take one call at a time."""


class Service:
    """The methods of the protocol, without its lines. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._opened = 0
        self._routers: dict[str, Router] = {}
        self._lock = threading.Lock()
        self._methods: dict[str, Callable[[Params], dict[str, Any]]] = {
            "hello": self._hello,
            "schema": self._schema,
            "plan_batch": self._plan_batch,
            "open": self._open,
            "close": self._close,
            "route": self._route,
        }
        self._of_streams: dict[str, Callable[[_Stream, Params], dict[str, Any]]] = {
            "initial_offset": _initial_offset,
            "read_limit": _read_limit,
            "latest_offset": _latest_offset,
            "report_latest_offset": _report_latest_offset,
            "prepare_available_now": _prepare_available_now,
            "plan": _plan,
            "commit": _commit,
            "metrics": _metrics,
            "plan_real_time": _plan_real_time,
            "merge": _merge,
        }

    def call(self, method: str, params: Params) -> dict[str, Any]:
        """The result of a method; raises what it raises, and `InvalidArgument` for one that there is not."""
        if method in self._methods:
            return self._methods[method](params)
        if method in self._of_streams:
            stream = self._stream(params)
            with stream.lock:
                return self._of_streams[method](stream, params)
        raise _invalid(f"there is no method {method!r}")

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            streams = list(self._streams.values())
            self._streams.clear()
        for stream in streams:
            stream.reader.stop()
        if "kera.spark_connector.portal" in sys.modules:
            from kera.spark_connector.portal import close_shared

            close_shared()

    # -- without a stream --------------------------------------------------------------------------------------

    def _hello(self, _: Params) -> dict[str, Any]:
        from importlib.metadata import version

        return {"version": version("kera"), "pid": os.getpid()}

    def _schema(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.source import columns_of_options

        return {"schema": columns_of_options(_options(params)).json()}

    def _plan_batch(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.batch import plan_batch
        from kera.spark_connector.pieces import as_json
        from kera.spark_connector.portal import shared

        options, wanted, parallelism = _options(params), _columns(params), params.get("parallelism")
        options.check_batch()

        async def plan(client: Any) -> list[dict[str, Any]]:
            return await as_json(client, await plan_batch(client, options, wanted, parallelism=parallelism), options)

        return {"pieces": shared(options.bootstrap).call(plan)}

    def _route(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.portal import shared
        from kera.spark_connector.routing import Asked, Router

        bootstrap, asked = str(params["bootstrap"]), Asked.of(params)
        with self._lock:
            router = self._routers.setdefault(bootstrap, Router())
        return shared(bootstrap).call(lambda client: router.route(client, asked))

    # -- streams -----------------------------------------------------------------------------------------------

    def _open(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.streaming import KeraStreamReader

        options, initial = _options(params), params.get("initial")
        options.check_streaming()
        reader = KeraStreamReader(
            _given(params), _columns(params), initial=None if initial is None else json.loads(initial)
        )
        with self._lock:
            self._opened += 1
            self._streams[self._opened] = _Stream(reader, options, threading.Lock())
            return {"stream": self._opened}

    def _close(self, params: Params) -> dict[str, Any]:
        stream = self._stream(params)
        with self._lock:
            self._streams.pop(params["stream"], None)
        with stream.lock:
            stream.reader.stop()
        return {}

    def _stream(self, params: Params) -> _Stream:
        with self._lock:
            found = self._streams.get(params["stream"])
        if found is None:
            raise _invalid(f"no stream {params['stream']!r} is open")
        return found


def _initial_offset(stream: _Stream, _: Params) -> dict[str, Any]:
    return {"offset": json.dumps(stream.reader.initialOffset())}


def _read_limit(stream: _Stream, _: Params) -> dict[str, Any]:
    return {"limit": _limit_to_json(stream.reader.getDefaultReadLimit())}


def _latest_offset(stream: _Stream, params: Params) -> dict[str, Any]:
    start = json.loads(params["start"])
    end = stream.reader.latestOffset(start, _limit_from_json(params["limit"]))
    return {"offset": _text(end, start, params)}


def _text(end: dict[str, Any], start: dict[str, Any], params: Params) -> str:
    """`end` as Spark is to store it; where nothing is new, that is the start's own text."""
    return str(params["start"]) if end == start else json.dumps(end)


def _report_latest_offset(stream: _Stream, _: Params) -> dict[str, Any]:
    latest = stream.reader.reportLatestOffset()
    return {"offset": None if latest is None else json.dumps(latest)}


def _prepare_available_now(stream: _Stream, _: Params) -> dict[str, Any]:
    stream.reader.prepareForTriggerAvailableNow()
    return {}


def _plan(stream: _Stream, params: Params) -> dict[str, Any]:
    pieces = stream.reader.pieces(json.loads(params["start"]), json.loads(params["end"]))
    return {"pieces": stream.reader.as_json(pieces)}


def _commit(stream: _Stream, params: Params) -> dict[str, Any]:
    stream.reader.commit(json.loads(params["end"]))
    return {}


def _metrics(stream: _Stream, params: Params) -> dict[str, Any]:
    consumed = params.get("consumed")
    return {"metrics": stream.reader.lag(None if consumed is None else json.loads(consumed))}


def _plan_real_time(stream: _Stream, params: Params) -> dict[str, Any]:
    return {"pieces": stream.reader.as_json(stream.reader.real_time_pieces(json.loads(params["start"])))}


def _merge(stream: _Stream, params: Params) -> dict[str, Any]:
    from kera.core.ids import Position
    from kera.spark_connector.offsets import EntryOffset, Lane

    start = json.loads(params["start"])
    places = [
        (Lane(name, streamlet, entry), EntryOffset(Position(group, segment, offset), record))
        for name, streamlet, entry, group, segment, offset, record in params["places"]
    ]
    return {"offset": _text(stream.reader.merged(start, places), start, params)}


def _given(params: Params) -> dict[str, str]:
    """The options. Which engine reads has been decided."""
    return {name: value for name, value in params["options"].items() if name.lower() != "engine"}


def _options(params: Params) -> ReadOptions:
    from kera.spark_connector.options import parse_read_options

    return parse_read_options(_given(params))


def _columns(params: Params) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(params["schema"]))


def _limit_to_json(limit: ReadLimit) -> dict[str, Any]:
    from kera.spark_connector.spark_api import ReadMaxBytes, ReadMaxRows, ReadMinRows

    if isinstance(limit, ReadMaxRows):
        return {"type": "max_rows", "value": limit.max_rows}
    if isinstance(limit, ReadMaxBytes):
        return {"type": "max_bytes", "value": limit.max_bytes}
    if isinstance(limit, ReadMinRows):
        return {"type": "min_rows", "value": limit.min_rows}
    return {"type": "all"}


def _limit_from_json(limit: Mapping[str, Any]) -> ReadLimit:
    from kera.spark_connector.spark_api import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows

    kinds = {"max_rows": ReadMaxRows, "max_bytes": ReadMaxBytes, "min_rows": ReadMinRows}
    kind = limit["type"]
    if kind == "all":
        return ReadAllAvailable()
    if kind not in kinds:
        raise _invalid(f"there is no limit of type {kind!r}")
    return kinds[kind](limit["value"])


def _invalid(message: str) -> Exception:
    from kera.core.errors import InvalidArgument

    return InvalidArgument(message)


# --- lines --------------------------------------------------------------------------------------------------------


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until `requests` ends. Raises `OSError` when nobody takes the answers any more."""
    service = Service()
    writing = threading.Lock()
    room = threading.Semaphore(REQUESTS_MAX)

    def send(line: str) -> None:
        with writing:
            answers.write(line.encode() + b"\n")
            answers.flush()

    def answer(request_id: Any, method: Any, params: Any, *, bounded: bool) -> None:
        try:
            with contextlib.suppress(OSError):  # nobody is there any more; the requests end, too
                send(_answer(service, request_id, method, params))
        finally:
            if bounded:
                room.release()

    pool = ThreadPoolExecutor(REQUESTS_MAX + len(ALWAYS_ANSWERED), thread_name_prefix="kera-service")
    try:
        while line := requests.readline(LINE_BYTES_MAX + 1):
            try:
                request_id, method, params = _parsed(line, requests)
            except ValueError as error:
                send(json.dumps({"id": None, "error": _error("ProtocolError", f"not a request: {error}")}))
                continue
            bounded = method not in ALWAYS_ANSWERED
            if bounded and not room.acquire(blocking=False):
                busy = _error("Unavailable", f"{REQUESTS_MAX} requests wait for answers already", retriable=True)
                send(json.dumps({"id": request_id, "error": busy}))
                continue
            pool.submit(answer, request_id, method, params, bounded=bounded)
    finally:
        closing = threading.Thread(target=service.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        pool.shutdown(wait=False, cancel_futures=True)


def _parsed(line: bytes, requests: IO[bytes]) -> tuple[Any, str, dict[str, Any]]:
    """Raises ``ValueError`` for what is no request."""
    if len(line) > LINE_BYTES_MAX:
        while not line.endswith(b"\n") and (line := requests.readline(1 << 20)):
            pass
        raise ValueError(f"a line of more than {LINE_BYTES_MAX} bytes")
    try:
        request = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(request, dict):
        raise ValueError("a request is an object")  # noqa: TRY004 - it is the line that is wrong
    return request.get("id"), str(request.get("method")), request.get("params", {})


def _answer(service: Service, request_id: Any, method: str, params: Any) -> str:
    try:
        return json.dumps({"id": request_id, "result": service.call(method, params)})
    except Exception as error:  # noqa: BLE001 - whatever it is, whoever asked is told
        return json.dumps({"id": request_id, "error": _error_of(error, method)})


def _error_of(error: Exception, method: str) -> dict[str, Any]:
    from kera.core.errors import InternalError, KeraError

    if isinstance(error, KeraError) and not isinstance(error, InternalError):
        return _error(type(error).__name__, error.message, retriable=error.retriable)
    traceback.print_exception(error)
    return _error(type(error).__name__, f"{method} failed with {type(error).__name__}: {error}")


def _error(kind: str, message: str, *, retriable: bool = False) -> dict[str, Any]:
    return {"type": kind, "message": message, "retriable": retriable}


def main() -> None:
    """Answer the process that has started this one, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches a whole terminal; whoever started this decides
    # Standard output belongs to the protocol: whatever else is printed goes where the log goes.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        serve(sys.stdin.buffer, answers)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)  # threads that still wait for a cluster are of no use to anyone


if __name__ == "__main__":
    main()
