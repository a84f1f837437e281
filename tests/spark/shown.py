"""Everything that others can see of an application on a Spark cluster: pages, processes, environments.

All of it goes into files, and `hidden` searches whole folders for secrets.
"""

from __future__ import annotations

import html.parser
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tests.spark.secured import secrets_in
from tests.spark.standalone import Standalone

PAGES_MAX = 400
TIMEOUT_S = 60
PARTS = "jobs", "SQL/execution", "environment", "executors", "stages/stage", "logPage"
"""Parts of the addresses of pages that always exist: of the driver, and of workers (`logPage`, executors' output)."""


def keep_what_is_shown(spark: Standalone, ui: str, folder: Path) -> list[str]:
    """Save the pages and the processes of a running application; return the pages' addresses.

    `ui`: the address of the application's pages.
    """
    web = [found for each in (spark.master, *spark.workers) for found in web_of(each.log)]
    assert len(web) == 1 + len(spark.workers)
    fetched = pages(ui, *web, *api(ui))
    for part in (f"/{each}/" for each in PARTS):
        assert any(part in url for url in fetched), f"{part} is not among {sorted(fetched)}"
    for number, (url, data) in enumerate(sorted(fetched.items())):
        (folder / f"page-{number}").write_bytes(url.encode() + b"\n" + data)
    executors = [
        f"{process.cmdline()} {process.environ()}"
        for worker in spark.workers
        for process in psutil.Process(worker.process.pid).children(recursive=True)
        if running(process)
    ]
    assert sum("CoarseGrainedExecutorBackend" in text for text in executors) == len(spark.workers)
    (folder / "executors").write_text("\n".join(executors))
    commands = [str(process.cmdline()) for process in psutil.Process().children(recursive=True) if running(process)]
    (folder / "commands").write_text("\n".join(commands))
    return sorted(fetched)


def running(process: psutil.Process) -> bool:
    """Whether the process can still be examined."""
    with suppress(psutil.Error):
        return bool(process.cmdline())
    return False


def web_of(log: Path) -> list[str]:
    """The address of the pages of a master or a worker."""
    return re.findall(r"(?:MasterWebUI|WorkerWebUI).*?started at (http://\S+)", log.read_text())


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        del tag
        self.found += [value for name, value in attributes if name in ("href", "src") and value]


def pages(*begin: str) -> dict[str, bytes]:
    """All pages of these hosts and ports that links reach."""
    servers = {urllib.parse.urlsplit(url).netloc for url in begin}
    found: dict[str, bytes] = {}
    waiting = list(begin)
    while waiting and len(found) < PAGES_MAX:
        url = urllib.parse.urldefrag(waiting.pop(0))[0]
        path = urllib.parse.urlsplit(url)
        unwanted = path.path.endswith((".js", ".css", ".png", "/kill", "/kill/")) or ".sort=" in path.query
        if url in found or path.netloc not in servers or unwanted:
            continue
        try:
            with urllib.request.urlopen(urllib.parse.quote(url, safe=":/?&=%+"), timeout=TIMEOUT_S) as answer:
                found[url] = answer.read()
        except urllib.error.HTTPError as error:
            found[url] = error.read()
            continue
        if "html" in answer.headers.get("Content-Type", ""):
            links = _Links()
            links.feed(found[url].decode(errors="replace"))
            waiting += [urllib.parse.urljoin(url, link) for link in links.found]
    return found


def api(ui: str) -> Iterator[str]:
    """The addresses of Spark's REST API."""
    with urllib.request.urlopen(f"{ui}/api/v1/applications", timeout=TIMEOUT_S) as answer:
        (application,) = json.load(answer)
    base = f"{ui}/api/v1/applications/{application['id']}"
    yield from (f"{ui}/api/v1/applications", base)
    for name in ("jobs", "stages?details=true", "allexecutors", "storage/rdd", "environment", "streaming/statistics"):
        yield f"{base}/{name}"
    yield f"{base}/sql?details=true&planDescription=true&length=1000"


def hidden(folder: Path, meant: Path) -> dict[str, list[bytes]]:
    """Files with secrets, except those in the folder `meant`, which must have them."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names if Path(where) != meant else ():
            with suppress(FileNotFoundError):  # Spark clears up
                secrets = secrets_in((Path(where) / name).read_bytes())
                if secrets:
                    found[str(Path(where) / name)] = secrets[:3]
    return found
