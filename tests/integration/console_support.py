"""A running console, and a Chromium that looks at it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Page, Request, async_playwright

START_TIMEOUT_S = 60
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium (sh scripts/chromium.sh installs one)"
)


@dataclass
class Console:
    """A process that serves pages."""

    process: asyncio.subprocess.Process
    url: str
    """Without a slash at its end."""

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port


@contextlib.asynccontextmanager
async def a_console(*arguments: str, bootstrap: str, **settings: object) -> AsyncIterator[Console]:
    """`kera console` at any free port; `settings` are those of clients."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KERA_")}
    environment |= {f"KERA_CLIENT_{name.upper()}": str(value) for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kera.cli", "console", "--listen", "127.0.0.1:0", "--bootstrap", bootstrap, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        if not line:
            assert process.stderr is not None
            raise AssertionError((await process.stderr.read()).decode())
        yield Console(process, line.split()[-1].removesuffix("/"))
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(START_TIMEOUT_S):
            await process.communicate()


@dataclass
class Look:
    """A page of a browser, and its complaints."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """The page's console messages: scripts that fail, and what its policy blocks."""
    asked: list[str] = field(default_factory=list)
    """Addresses."""

    def note(self, request: Request) -> None:
        self.asked.append(request.url)

    async def go(self, address: str) -> int:
        answer = await self.page.goto(address)
        assert answer is not None
        return answer.status

    async def text(self) -> str:
        return await self.page.inner_text("body")

    async def fill(self, **fields: str) -> None:
        for name, value in fields.items():
            await self.page.fill(f"#{name}", value)


@contextlib.asynccontextmanager
async def a_browser(*flags: str, dark: bool = False) -> AsyncIterator[Look]:
    """The browser of a new visitor. `flags`: additional flags of Chromium."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *flags])
        try:
            context = await browser.new_context(
                ignore_https_errors=True,
                color_scheme="dark" if dark else "light",
                viewport={"width": 1360, "height": 850},
            )
            look = Look(await context.new_page())
            look.page.set_default_timeout(START_TIMEOUT_S * 1000)
            look.page.on("pageerror", lambda error: look.complaints.append(str(error)))
            look.page.on(
                "console", lambda said: look.complaints.append(said.text) if said.type in {"error", "warning"} else None
            )
            look.page.on("request", look.note)
            look.page.on("dialog", lambda dialog: look.complaints.append(f"dialog {dialog.message}"))
            yield look
        finally:
            await browser.close()
