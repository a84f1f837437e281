"""The protocol between the columnar engine and its planner.

    request   {"id": 1, "method": "schema", "params": {"options": {…}}}
    answer    {"id": 1, "result": {…}}
    or        {"id": 1, "error": {"type": "UnknownStream", "message": "…", "retriable": false}}

One JSON object per line each way, in UTF-8. Requests are answered concurrently, in any order. A line that is no valid
request gets an error as its answer, and does not end the conversation. The conversation ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Protocol

LINE_BYTES_MAX = 64 << 20
REQUESTS_MAX = 256
ALWAYS_ANSWERED = {"close", "hello"}
CLOSE_TIMEOUT_S = 5.0
"""Maximum time for closing connections at the end."""


class Answering(Protocol):
    """The methods, any of which may be called from any thread: `kera.spark_connector.service.methods`."""

    def call(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Call a method, and return its result; raises the method's error."""

    def close(self) -> None:
        """Close all connections."""


def serve(
    requests: IO[bytes],
    answers: IO[bytes],
    service: Answering,
    *,
    line_bytes_max: int = LINE_BYTES_MAX,
    requests_max: int = REQUESTS_MAX,
) -> None:
    """Answer until `requests` ends. Raises `OSError` if the reader of `answers` is gone.

    Lines longer than `line_bytes_max` are refused. So are requests while `requests_max` of them are being answered,
    except those in `ALWAYS_ANSWERED`.
    """
    writing = threading.Lock()
    room = threading.Semaphore(requests_max)

    def send(line: str) -> None:
        with writing:
            answers.write(line.encode() + b"\n")
            answers.flush()

    def answer(request_id: Any, method: Any, params: Any, *, bounded: bool) -> None:
        try:
            with contextlib.suppress(OSError):  # the reader is gone, and the requests will end, too
                send(_answer(service, request_id, method, params))
        finally:
            if bounded:
                room.release()

    pool = ThreadPoolExecutor(requests_max + len(ALWAYS_ANSWERED), thread_name_prefix="kera-service")
    try:
        while line := requests.readline(line_bytes_max + 1):
            try:
                request_id, method, params = _parsed(line, requests, line_bytes_max)
            except ValueError as error:
                send(json.dumps({"id": None, "error": _error("ProtocolError", f"not a request: {error}")}))
                continue
            bounded = method not in ALWAYS_ANSWERED
            if bounded and not room.acquire(blocking=False):
                busy = _error("Unavailable", f"{requests_max} requests wait for answers already", retriable=True)
                send(json.dumps({"id": request_id, "error": busy}))
                continue
            pool.submit(answer, request_id, method, params, bounded=bounded)
    finally:
        closing = threading.Thread(target=service.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        pool.shutdown(wait=False, cancel_futures=True)


def _parsed(line: bytes, requests: IO[bytes], line_bytes_max: int) -> tuple[Any, str, dict[str, Any]]:
    """Parse a line into id, method and parameters. Raises `ValueError` if it is not a request."""
    if len(line) > line_bytes_max:
        while not line.endswith(b"\n") and (line := requests.readline(1 << 20)):
            pass
        raise ValueError(f"a line of more than {line_bytes_max} bytes")
    try:
        request = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(request, dict):
        raise ValueError("a request is an object")  # noqa: TRY004 - it is the line that is wrong
    return request.get("id"), str(request.get("method")), request.get("params", {})


def _answer(service: Answering, request_id: Any, method: str, params: Any) -> str:
    try:
        return json.dumps({"id": request_id, "result": service.call(method, params)})
    except Exception as error:  # noqa: BLE001 - the engine gets an answer for any error
        return json.dumps({"id": request_id, "error": _error_of(error, method)})


def _error_of(error: Exception, method: str) -> dict[str, Any]:
    from kera.core.errors import InternalError, KeraError

    if isinstance(error, KeraError) and not isinstance(error, InternalError):
        return _error(type(error).__name__, error.message, retriable=error.retriable)
    traceback.print_exception(error)
    return _error(type(error).__name__, f"{method} failed with {type(error).__name__}: {error}")


def _error(kind: str, message: str, *, retriable: bool = False) -> dict[str, Any]:
    return {"type": kind, "message": message, "retriable": retriable}
