"""The HTTP server of health and metrics survives any client, and answers invalid requests with an error."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from kera.core.errors import PortTaken
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from kera.server.monitoring.http_server import HttpServer, Limits, Refused, Request, Response, Route, parse, text

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30
GET = b"GET / HTTP/1.1\r\n\r\n"


async def answer(request: Request) -> Response:
    return text(HTTPStatus.OK, f"{request.path} {request.query} {request.fields.get('accept', '-')}")


Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def started(route: Callable[..., object] = answer, lane: str = "", **limits: float) -> int:
            routes = {"/": Route(route, lane), "/other": Route(answer, "other")}  # type: ignore[arg-type]
            server = HttpServer(routes, Limits(**limits))  # type: ignore[arg-type]
            port = server.listen("127.0.0.1", 0)
            stack.callback(server.close)
            return port

        yield started


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def everything(sock: socket.socket) -> bytes:
    """All bytes until the connection ends, by a close or a reset."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            got += part
    return got


def asked(port: int, request: bytes) -> bytes:
    with connected(port) as sock:
        sock.sendall(request)
        return everything(sock)


def asked_in_vain(port: int, request: bytes) -> bytes:
    """The answer of a server that may close the connection at any moment, even before connecting has returned."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        return asked(port, request)
    return b""


def status_of(answered: bytes) -> int:
    return int(answered.split(b" ", 2)[1])


def test_a_request_is_answered_and_the_connection_closed(start: Start) -> None:
    got = asked(start(), b"GET /?a=b HTTP/1.1\r\nHost: x\r\nACCEPT: text/plain \r\n\r\n")

    head, body = got.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close" in head
    assert f"\r\nContent-Length: {len(body)}\r\n".encode() in head
    assert body == b"/ a=b text/plain\n"


def test_the_answer_to_head_has_no_body(start: Start) -> None:
    got = asked(start(), b"HEAD / HTTP/1.1\r\n\r\n")

    assert status_of(got) == 200
    assert b"\r\nContent-Length: 5\r\n" in got
    assert got.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /none HTTP/1.1\r\n\r\n", 404),
        (b"GET //livez HTTP/1.1\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /none HTTP/1.1\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"OPTIONS / HTTP/1.0\r\n\r\n", 405),
        (b"get / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\n\r\n", 400),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n", 431),
    ],
)
def test_an_invalid_request_is_answered_with_its_status(start: Start, request_: bytes, status: int) -> None:
    port = start()
    got = asked(port, request_)

    assert not got or status_of(got) == status, "a request that is too large may be cut off before its answer arrives"
    assert got or status in {413, 431}
    assert status_of(asked(port, GET)) == 200, "others are served"


def test_the_answer_names_the_allowed_methods(start: Start) -> None:
    assert b"\r\nAllow: GET, HEAD\r\n" in asked(start(), b"DELETE / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n", b"\0" * 100])
def test_an_invalid_head_is_refused(head: bytes) -> None:
    with pytest.raises(Refused):
        parse(head + b"\r\n\r\n")


def test_a_silent_client_is_disconnected(start: Start) -> None:
    port = start(request_s=0.2)
    with connected(port) as silent, connected(port) as slow:
        slow.sendall(b"GET / HT")
        assert everything(silent) == b""
        assert everything(slow) == b""
    assert status_of(asked(port, GET)) == 200


def test_silent_connections_make_room_for_a_client(start: Start) -> None:
    port = start(connections_max=3)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(3)]
        assert status_of(asked(port, GET)) == 200
        assert everything(silent[0]) == b"", "the oldest makes room"


def test_many_connections_of_one_host_do_not_keep_out_another_host(start: Start) -> None:
    port = start(connections_max=3)
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S, source_address=("127.0.0.2", 0))
        )
        many = [stack.enter_context(connected(port)) for _ in range(6)]
        for each in many[:4]:
            assert everything(each) == b""
        alone.sendall(GET)
        assert status_of(everything(alone)) == 200


def test_a_new_connection_is_closed_while_all_others_wait_for_answers(start: Start) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    async def slow(_: Request) -> Response:
        begun.release()
        await asyncio.to_thread(go_on.wait, WAIT_S)
        return text(HTTPStatus.OK, "slow")

    port = start(slow, connections_max=1)
    with connected(port) as first:
        first.sendall(GET)
        assert begun.acquire(timeout=WAIT_S)
        assert asked_in_vain(port, GET) == b""
        go_on.set()
        assert status_of(everything(first)) == 200


def test_an_answer_that_takes_too_long_gives_503(start: Start) -> None:
    async def never(_: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    assert status_of(asked(start(never, answer_s=0.1), GET)) == 503


def test_lanes_do_not_wait_for_each_other(start: Start) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    async def slow(_: Request) -> Response:
        begun.release()
        await asyncio.to_thread(go_on.wait, WAIT_S)
        return text(HTTPStatus.OK, "slow")

    port = start(slow, "slow")
    with connected(port) as first:
        first.sendall(GET)
        assert begun.acquire(timeout=WAIT_S)
        assert status_of(asked(port, b"GET /other HTTP/1.1\r\n\r\n")) == 200
        go_on.set()
        assert status_of(everything(first)) == 200


def test_a_client_that_does_not_take_its_answer_is_disconnected(start: Start) -> None:
    async def large(_: Request) -> Response:
        return Response(HTTPStatus.OK, bytes(64 << 20))

    port = start(large, response_s=0.3)
    with connected(port) as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.sendall(GET)
        assert status_of(asked(port, b"GET /other HTTP/1.1\r\n\r\n")) == 200
        assert len(everything(greedy)) < 64 << 20


def test_a_defect_in_an_answer_ends_that_connection_only(start: Start) -> None:
    async def broken(_: Request) -> Response:
        raise RuntimeError("broken")

    port = start(broken)
    assert asked(port, GET) == b""
    assert status_of(asked(port, b"GET /other HTTP/1.1\r\n\r\n")) == 200


def test_the_error_names_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"metrics: cannot listen on 127.0.0.1:{port}: Address already in use") as e:
            HttpServer({}).listen("127.0.0.1", port)

    assert e.value.attributes == {"host": "127.0.0.1", "port": port}


def test_closing_the_server_disconnects_its_clients() -> None:
    server = HttpServer({"/": Route(answer)})
    port = server.listen("127.0.0.1", 0)
    with connected(port) as sock:
        server.close()
        assert everything(sock) == b""
        with pytest.raises(OSError, match="refused"):
            connected(port)


def test_answers_over_tls_log_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("127.0.0.1")
    server = HttpServer({"/": Route(answer)}, tls=Tls(TlsFiles(one.cert, one.key, authority.path)))
    port = server.listen("127.0.0.1", 0)
    context = ssl.create_default_context(cafile=str(authority.path))
    for _ in range(20):
        with context.wrap_socket(connected(port), server_hostname="127.0.0.1") as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert everything(sock).startswith(b"HTTP/1.1 200")
    server.close()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.timeout(30)
def test_closing_the_server_disconnects_tls_clients_in_any_state(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("127.0.0.1")
    server = HttpServer({"/": Route(answer)}, tls=Tls(TlsFiles(one.cert, one.key, authority.path)))
    port = server.listen("127.0.0.1", 0)
    context = ssl.create_default_context(cafile=str(authority.path))
    with connected(port) as silent, context.wrap_socket(connected(port), server_hostname="127.0.0.1") as known:
        known.sendall(b"GET /")
        server.close()
        assert everything(silent) == b""
        with contextlib.suppress(ssl.SSLEOFError):
            assert everything(known) == b""
        with pytest.raises(OSError, match="refused"):
            connected(port)
