"""The methods for the columnar engine, with parameters and results as JSON.

Methods import the modules that they need, because a driver waits for the answer to `hello`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from kera.spark_connector.options.reading import ReadOptions
    from kera.spark_connector.planning import Piece, Tail
    from kera.spark_connector.portal import Portal
    from kera.spark_connector.reading.streaming import KeraStreamReader
    from kera.spark_connector.service.routing import Router
    from kera.spark_connector.service.writes import WriteRouter
    from kera.spark_connector.spark_api import ReadLimit

Params = Mapping[str, Any]


class _Stream(NamedTuple):
    """The objects of a stream that `open` has made."""

    reader: KeraStreamReader
    options: ReadOptions
    lock: threading.Lock
    """Readers take one call at a time."""


class Service:
    """The methods of the protocol, without its lines. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._opened = 0
        self._routers: WeakKeyDictionary[Portal, Router] = WeakKeyDictionary()
        self._write_routers: WeakKeyDictionary[Portal, WriteRouter] = WeakKeyDictionary()
        """Like `_routers`: each router belongs to the event loop of its portal."""
        self._lock = threading.Lock()
        self._methods: dict[str, Callable[[Params], dict[str, Any]]] = {
            "hello": self._hello,
            "schema": self._schema,
            "plan_batch": self._plan_batch,
            "open": self._open,
            "close": self._close,
            "route": self._route,
            "can_write": self._can_write,
            "open_write": self._open_write,
            "route_write": self._route_write,
            "stored_rows": self._stored_rows,
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
        """Call a method, and return its result; raises its error, and `InvalidArgument` for an unknown method."""
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
        from kera.spark_connector.delegation.asking import for_tasks
        from kera.spark_connector.portal import shared
        from kera.spark_connector.reading.batch import plan_batch
        from kera.spark_connector.service.pieces import as_json, token_as_json

        options, wanted, parallelism = _options(params), _columns(params), params.get("parallelism")
        options.check_batch()

        async def plan(client: Any) -> list[dict[str, Any]]:
            return await as_json(client, await plan_batch(client, options, wanted, parallelism=parallelism), options)

        with shared(options.connection) as portal:
            pieces = portal.call(plan)
        tasks = for_tasks(options.connection, {piece["stream"] for piece in pieces})
        return {"pieces": pieces, "token": token_as_json(tasks)}

    def _route(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.portal import shared
        from kera.spark_connector.service.pieces import connection_from_json
        from kera.spark_connector.service.routing import Asked, Router

        asked = Asked.of(params)
        with shared(connection_from_json(params)) as portal:
            with self._lock:
                router = self._routers.setdefault(portal, Router())
            return portal.call(lambda client: router.route(client, asked))

    def _can_write(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.service.writes import can_write

        sensitive = bool(params["case_sensitive"])
        return {"can": can_write(params["options"], _columns(params), case_sensitive=sensitive)}

    def _open_write(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.service.writes import open_write

        return open_write(
            params["options"],
            _columns(params),
            overwrite=bool(params["overwrite"]),
            query=params.get("query"),
            name=str(params["name"]),
            partitions=int(params["partitions"]),
            case_sensitive=bool(params["case_sensitive"]),
        )

    def _route_write(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.portal import shared
        from kera.spark_connector.service.pieces import connection_from_json
        from kera.spark_connector.service.writes import WriteRouter, failures_of

        failed = failures_of(params)
        writer, stream, stream_id = str(params["writer"]), str(params["stream"]), int(params["stream_id"])
        with shared(connection_from_json(params)) as portal:
            with self._lock:
                router = self._write_routers.setdefault(portal, WriteRouter())
            return portal.call(lambda client: router.route(client, writer, stream, stream_id, failed))

    def _stored_rows(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.portal import shared
        from kera.spark_connector.service.pieces import connection_from_json
        from kera.spark_connector.service.writes import stored_rows

        with shared(connection_from_json(params)) as portal:
            return portal.call(lambda client: stored_rows(client, params))

    # -- streams -----------------------------------------------------------------------------------------------

    def _open(self, params: Params) -> dict[str, Any]:
        from kera.spark_connector.reading.streaming import KeraStreamReader

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
    """Return `end` as text for Spark to store; if nothing is new, that is the start's own text."""
    return str(params["start"]) if end == start else json.dumps(end)


def _report_latest_offset(stream: _Stream, _: Params) -> dict[str, Any]:
    latest = stream.reader.reportLatestOffset()
    return {"offset": None if latest is None else json.dumps(latest)}


def _prepare_available_now(stream: _Stream, _: Params) -> dict[str, Any]:
    stream.reader.prepareForTriggerAvailableNow()
    return {}


def _plan(stream: _Stream, params: Params) -> dict[str, Any]:
    return _as_json(stream, stream.reader.pieces(json.loads(params["start"]), json.loads(params["end"])))


def _as_json(stream: _Stream, pieces: Sequence[Piece | Tail]) -> dict[str, Any]:
    from kera.spark_connector.service.pieces import as_json, token_as_json

    found = stream.reader.portal.call(lambda client: as_json(client, pieces, stream.options))
    return {"pieces": found, "token": token_as_json(stream.reader.connection_for_tasks(pieces))}


def _commit(stream: _Stream, params: Params) -> dict[str, Any]:
    stream.reader.commit(json.loads(params["end"]))
    return {}


def _metrics(stream: _Stream, params: Params) -> dict[str, Any]:
    consumed = params.get("consumed")
    return {"metrics": stream.reader.lag(None if consumed is None else json.loads(consumed))}


def _plan_real_time(stream: _Stream, params: Params) -> dict[str, Any]:
    return _as_json(stream, stream.reader.real_time_pieces(json.loads(params["start"])))


def _merge(stream: _Stream, params: Params) -> dict[str, Any]:
    from kera.core.base.ids import Position
    from kera.spark_connector.planning.offsets import EntryName, EntryOffset

    start = json.loads(params["start"])
    places = [
        (EntryName(name, streamlet, entry), EntryOffset(Position(group, segment, offset), record))
        for name, streamlet, entry, group, segment, offset, record in params["places"]
    ]
    return {"offset": _text(stream.reader.merged(start, places), start, params)}


def _given(params: Params) -> dict[str, str]:
    """Return the options without the engine, which is already decided."""
    return {name: value for name, value in params["options"].items() if name.lower() != "engine"}


def _options(params: Params) -> ReadOptions:
    from kera.spark_connector.options.reading import parse_read_options

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
