"""Sends requests to the application as a browser does, without a connection: with cookies and the origin of forms."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from kera.console.web.gate import App, Message

HOST = "127.0.0.1:7480"


@dataclass
class Answer:
    """The answer to a request."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def text(self) -> str:
        """The body with plain spaces in place of non-breaking ones."""
        return self.body.decode().replace("\u00a0", " ")

    def header(self, name: str) -> str:
        return next((value for each, value in self.headers if each == name), "")

    @property
    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.text)
        assert found is not None, "the page has no form"
        return found[1]


@dataclass
class Browser:
    """The browser of one person."""

    app: App
    host: str = HOST
    cookies: dict[str, str] = field(default_factory=dict)

    async def get(self, address: str, **headers: str) -> Answer:
        return await self.ask("GET", address, b"", headers)

    async def post(self, address: str, fields: dict[str, str] | list[tuple[str, str]], **headers: str) -> Answer:
        sent = {"content_type": "application/x-www-form-urlencoded", "origin": f"http://{self.host}", **headers}
        return await self.ask("POST", address, urlencode(fields).encode(), sent)

    async def send(self, page: str, address: str, fields: dict[str, str]) -> Answer:
        """Send a form of a page."""
        return await self.post(address, {**fields, "csrf": (await self.get(page)).csrf})

    async def ask(self, method: str, address: str, body: bytes, headers: dict[str, str]) -> Answer:
        parts = urlsplit(address)
        given = {"host": self.host, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if self.cookies:
            given["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items() if value],
            "server": ("127.0.0.1", 7480),
            "client": ("127.0.0.1", 50_000),
            "state": {},
        }
        sent: list[Message] = []

        received = False

        async def receive() -> Message:
            nonlocal received
            if received:
                await asyncio.Event().wait()  # the client stays connected
            received = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        start, *parts_sent = sent
        found = [(name.decode().lower(), value.decode()) for name, value in start["headers"]]
        for name, value in found:
            if name == "set-cookie":
                self._keep(value)
        return Answer(start["status"], found, b"".join(each.get("body", b"") for each in parts_sent))

    def _keep(self, cookie: str) -> None:
        name, _, value = cookie.partition(";")[0].partition("=")
        if "max-age=0" in cookie.lower():
            self.cookies.pop(name, None)
        else:
            self.cookies[name] = value
