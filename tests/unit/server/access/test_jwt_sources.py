"""Keys of issuers from files and web servers, which may misbehave."""

from __future__ import annotations

import os
import socket
import ssl
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from kera.core.errors import InvalidArgument
from kera.core.security.issuing import Authority
from kera.server.access.jwt_sources import KEYS_BYTES_MAX, FileSource, NotRead, UrlSource, keys_source
from tests.token_issuer import Published, key_set, published

DATA = key_set()


def answer(page: Published, status: int, *headers: tuple[str, str], body: bytes = b"") -> None:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers:
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    page.answer = send


def test_a_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    source = keys_source(str(path))
    with pytest.raises(NotRead, match="No such file"):
        source.read()
    path.write_bytes(b"one")
    assert source.read() == b"one"
    path.write_bytes(b"two")
    assert source.read() == b"two"
    path.write_bytes(b" " * (KEYS_BYTES_MAX + 1))
    with pytest.raises(NotRead, match="more than 262144 bytes"):
        source.read()


def test_a_path_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(NotRead):
            FileSource(path).read()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://issuer.example/keys", "could replace the keys"),
        ("http://10.0.0.1/keys", "could replace the keys"),
        ("http://127.0.0.1.issuer.example/keys", "could replace the keys"),
        ("http://localhost.issuer.example/keys", "could replace the keys"),
        ("file:///etc/keys.json", "not an address"),
        ("file://host/etc/keys.json", "could replace the keys"),
        ("ftp://issuer.example/keys", "could replace the keys"),
        ("https://", "not an address"),
        ("https:///keys", "not an address"),
        ("https://issuer.example:99999/", "not an address"),
        ("https://[::1/keys", "not an address"),
        ("https://alice:secret@issuer.example/keys", "key sets are public"),
        ("https://issuer.example/ke ys", "not an address"),
        ("https://issuer.example/keys\r\nX: y", "not an address"),
        ("https://issüer.example/keys", "not an address"),
    ],
)
def test_an_invalid_or_unsafe_address_of_keys_is_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as raised:
        keys_source(url)
    assert "secret" not in raised.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.9.9.9"])
def test_keys_may_come_without_tls_from_this_host(host: str) -> None:
    assert isinstance(keys_source(f"http://{host}:8080/keys"), UrlSource)


def test_keys_are_fetched_at_each_read() -> None:
    with published(DATA) as page:
        source = keys_source(page.url)
        assert source.read() == DATA
        page.data = b"others"
        assert source.read() == b"others"
        assert page.asked == 2


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(one.cert, one.key)
    return context


def test_https_needs_a_certificate_for_the_host(tls: ssl.SSLContext) -> None:
    with published(DATA, tls) as page:
        assert keys_source(page.url).read() == DATA
    with published(DATA, tls, "127.0.0.2") as page:
        with pytest.raises(NotRead, match="certificate is not accepted: IP address mismatch"):
            keys_source(page.url).read()
        assert page.asked == 0


def test_a_certificate_of_an_unknown_authority_is_refused(tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with published(DATA, tls) as page:
        with pytest.raises(NotRead, match="certificate is not accepted: "):
            keys_source(page.url).read()
        assert page.asked == 0


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with published(DATA) as other, published(DATA) as page:
        answer(page, status, ("Location", other.url))
        with pytest.raises(NotRead, match=f"redirects, which is not allowed: {status} to 'http://127"):
            keys_source(page.url).read()
        assert other.asked == 0


@pytest.mark.parametrize("status", [204, 400, 401, 403, 404, 429, 500, 503])
def test_the_error_about_an_answer_without_keys_has_its_status(status: int) -> None:
    with published(DATA) as page:
        answer(page, status, ("Content-Length", "0"))
        with pytest.raises(NotRead, match=f"it answers {status}"):
            keys_source(page.url).read()


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 65536)


@pytest.mark.parametrize("length", [None, KEYS_BYTES_MAX + 1, 1 << 40])
def test_an_answer_over_the_size_limit_is_refused(length: int | None) -> None:
    with published(DATA) as page:
        if length is None:
            page.answer = endless
        else:
            answer(page, 200, ("Content-Length", str(length)), body=b" " * (KEYS_BYTES_MAX + 1))
        with pytest.raises(NotRead, match="more than 262144 bytes"):
            keys_source(page.url).read()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"",
    ],
    ids=range(9),
)
def test_a_garbage_answer_is_an_error(sent: bytes) -> None:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(sent)
        handler.close_connection = True

    with published(DATA) as page:
        page.answer = send
        with pytest.raises(NotRead):
            keys_source(page.url).read()


def silent(page: Published) -> Any:
    return lambda _: page.released.wait(60)


def dripping(page: Published, begin: bytes) -> Any:
    """Sends one byte after the other: each single read is quick."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(begin)
        while not page.released.wait(0.01):
            handler.wfile.write(b" ")

    return send


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("slow", ["silent", "headers", "body", "length"])
def test_an_endless_answer_times_out(encrypted: bool, slow: str, tls: ssl.SSLContext) -> None:
    with published(DATA, tls if encrypted else None) as page:
        begin = {
            "headers": b"HTTP/1.1 200 OK\r\nX: ",
            "body": b"HTTP/1.1 200 OK\r\n\r\n",
            "length": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        }
        page.answer = silent(page) if slow == "silent" else dripping(page, begin[slow])
        begun_s = time.monotonic()
        with pytest.raises(NotRead, match=r"no whole answer within 0\.2 s"):
            keys_source(page.url, fetch_s=0.2).read()
        assert time.monotonic() - begun_s < 5


def test_a_server_without_a_handshake_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = keys_source(f"https://127.0.0.1:{listener.getsockname()[1]}/keys", fetch_s=0.2)
        with pytest.raises(NotRead, match="no answer in time"):
            source.read()


def test_an_address_without_a_server_is_an_error() -> None:
    with published(DATA) as page:
        source = keys_source(page.url)
    with pytest.raises(NotRead, match="Connection refused"):
        source.read()


def test_proxy_settings_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with published(b"of a proxy") as proxy, published(DATA) as page:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("https_proxy", proxy.url)
        assert keys_source(page.url).read() == DATA
        assert proxy.asked == 0
