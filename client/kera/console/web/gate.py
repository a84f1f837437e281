"""Guards all pages: checks the host of requests, limits the pages made at the same time, and adds security headers.

A foreign page can make a browser send requests to this server: by a form, or by a foreign name that resolves to this
server (DNS rebinding). So a request must use one of this server's names, and a change must come from one of our pages.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from kera.console import limits
from kera.core.base.telemetry import get_logger

log = get_logger("kera.console")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self';"
    " frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
_NOT_KEPT = (b"cache-control", b"no-store")
_STATIC = "/static/"


def host_in(header: str) -> str:
    """Return the host of a Host header, without port and brackets, in lower case; empty: the header is invalid."""
    host = header.strip().lower()
    if host.startswith("["):
        inside, bracket, port = host[1:].partition("]")
        return inside if bracket and (not port or port[:1] == ":") else ""
    host, _, port = host.partition(":")
    return "" if ":" in port else host.removesuffix(".")


def is_ours(header: str, names: Collection[str]) -> bool:
    """Return whether a Host header names this server.

    Any IP address is accepted, because nobody can make an address resolve elsewhere. A name must be one of `names`.
    """
    host = host_in(header)
    if host in names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def comes_from_us(headers: dict[bytes, bytes]) -> bool:
    """Return whether a request for a change comes from one of our pages, according to the browser.

    All browsers send this with changes, and pages cannot forge it. Another port of the same host counts as foreign.
    """
    origin = headers.get(b"origin")
    if origin is not None:
        return origin.partition(b"://")[2] == headers.get(b"host", b"") != b""
    return headers.get(b"sec-fetch-site") == b"same-origin"


class Gate:
    """Passes allowed requests on to `app`, and adds the security headers to each answer."""

    def __init__(self, app: App, names: Collection[str], refuse: Callable[[int, str], App]) -> None:
        """`names`: the names of this server; `refuse`: makes a page from a status and a reason."""
        self._app, self._names, self._refuse = app, frozenset(names), refuse
        self._made = 0
        """Number of pages that are being made now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that names this server and comes from its own pages, and refuse any other."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with_headers = _Answer(send, kept=scope["path"].startswith(_STATIC))
        refusal = self._refusal(scope)
        if refusal is not None:
            await self._refuse(*refusal)(scope, receive, with_headers)
            return
        self._made += 1
        try:
            # A client that does not take its answer loses its place, and an answer that has begun is cut off.
            async with asyncio.timeout(limits.ANSWER_TIMEOUT_S):
                await self._app(scope, receive, with_headers)
        except TimeoutError:
            log.warning("an answer was not taken in time", client=scope.get("client"))
        finally:
            self._made -= 1

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not is_ours(hosts[0].decode("latin-1"), self._names):
            return 421, ("Unknown host name. Use the server's address, or allow the name with --host when starting it.")
        if scope["method"] not in {"GET", "HEAD"} and not comes_from_us(dict(scope["headers"])):
            return 403, "This request did not come from a page of the console: open the page here and repeat it."
        if len(scope["query_string"]) > limits.REQUEST_BYTES_MAX // 2:
            return 414, "The address is too long."
        if self._made >= limits.REQUESTS_MAX:
            return 503, f"{limits.REQUESTS_MAX} pages are being made already. Try again in a moment."
        return None


class _Answer:
    """Sends an answer in pieces, with the headers of all answers.

    A server buffers a message as a whole. In pieces, an answer that a client does not take occupies only the buffer of
    its connection. It keeps its place among the pages being made until it is taken or times out.
    """

    def __init__(self, send: Send, *, kept: bool) -> None:
        self._send = send
        self._headers = [*_HEADERS] if kept else [*_HEADERS, _NOT_KEPT]

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *self._headers]
        elif message["type"] == "http.response.body" and len(message.get("body", b"")) > limits.ANSWER_PIECE_BYTES:
            body, step = memoryview(message["body"]), limits.ANSWER_PIECE_BYTES
            last = (len(body) - 1) // step * step
            for at in range(0, last, step):
                await self._send({**message, "body": bytes(body[at : at + step]), "more_body": True})
            message = {**message, "body": bytes(body[last:])}
        await self._send(message)
