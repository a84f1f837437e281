"""The Go client of clients/go, built once, with its commands as tests run them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "clients" / "go"
BUILD_S = 300
"""The first build also fetches and compiles all dependencies."""
TIMEOUT_S = 60.0


class GoRecord(NamedTuple):
    """A line of kera-consume."""

    streamlet: int
    entry: int
    ordinal: int
    key: bytes | None
    value: bytes | None


class GoClient:
    """The module and its commands."""

    def __init__(self, go: str, folder: Path) -> None:
        self._go = go
        self._folder = folder

    def tool(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Go's own command in the module, with the installed toolchain and versions."""
        return subprocess.run(
            [self._go, *arguments],
            cwd=MODULE,
            env=os.environ | {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )

    def unformatted(self) -> str:
        """Files that differ from gofmt's output."""
        gofmt = Path(self.tool("env", "GOROOT").stdout.strip(), "bin", "gofmt")
        return subprocess.run([gofmt, "-l", MODULE], capture_output=True, text=True, check=True).stdout

    def build(self) -> None:
        """Build the commands; skips the test if their dependencies are not available."""
        fetched = self.tool("mod", "download")
        if fetched.returncode:
            pytest.skip(f"the modules of clients/go cannot be fetched: {fetched.stderr[-500:]}")
        built = self.tool("build", "-o", f"{self._folder}/", "./cmd/...")
        assert built.returncode == 0, built.stderr

    async def start(self, command: str, bootstrap: str, *arguments: str) -> asyncio.subprocess.Process:
        """Run one of the commands."""
        return await asyncio.create_subprocess_exec(
            self._folder / command,
            "-bootstrap",
            bootstrap,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, command: str, bootstrap: str, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        """Run one of the commands to its end: its return code, output and errors."""
        process = await self.start(command, bootstrap, *arguments)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, errors = await process.communicate(stdin)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, out, errors.decode()

    async def read(self, bootstrap: str, stream: str, *arguments: str) -> list[GoRecord]:
        """All records of a stream."""
        code, out, errors = await self.run("kera-consume", bootstrap, "-stream", stream, "-until-end", *arguments)
        assert code == 0, errors
        return records_in(out)


def records_in(output: bytes) -> list[GoRecord]:
    """The records that kera-consume has printed; an unfinished line does not count."""
    whole, _, _ = output.rpartition(b"\n")
    return [_record(json.loads(line)) for line in whole.splitlines()]


def _record(line: dict[str, Any]) -> GoRecord:
    keys = line["keys"] or [None]
    return GoRecord(line["streamlet"], line["entry"], line["ordinal"], _bytes(keys[0]), _bytes(line["value"]))


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def find_go() -> str:
    """The command; skips the test without a new enough one."""
    found = subprocess.run(
        ["sh", str(ROOT / "scripts" / "go.sh"), "--look"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()
