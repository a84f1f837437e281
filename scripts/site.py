"""Builds the documentation as a site: ``make docs``. Any warning, such as a broken link, ends it.

    docs/, README.md, examples/, clients/ ─┐
    settings, errors, commands, messages ──┼──► build/docs ──mkdocs──► build/site
    public names of the Python SDK ────────┤
    metrics of daemons that run            ──┘

Each build writes the pages of the reference from the code, and from the metrics of running daemons of this tree.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import posixpath
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts import api_reference

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "docs"
TOOLS = ROOT / "build" / "docs-tools"
REQUIREMENTS = ROOT / "scripts" / "docs-tools.txt"
TIMEOUT_S = 600
STYLE = ".md-typeset table:not([class]) td:not(:last-child) code { white-space: nowrap; }\n"
"""Keeps names in tables in one line."""
LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(`{3,}).*?^\1", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Write the pages, and build the site."""
    parser = argparse.ArgumentParser(prog="make docs", description="Build the documentation as a site.")
    parser.add_argument("--pages-only", action="store_true", help="write the pages, and build nothing")
    arguments = parser.parse_args()
    write_pages(PAGES)
    if arguments.pages_only:
        return 0
    return build(_tools() / "mkdocs")


def build(mkdocs: Path) -> int:
    """Build the site from the written pages, print any problems, and return the exit code."""
    # Without --quiet, which would neither print nor count warnings, so that --strict would have no effect.
    done = subprocess.run(
        [mkdocs, "build", "--strict"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    if done.returncode:
        print(done.stdout + done.stderr, end="", file=sys.stderr)
    else:
        print(f"docs: {ROOT / 'build' / 'site' / 'index.html'}")
    return done.returncode


def _tools() -> Path:
    """Return the programs of the environment that builds the site; make it if it is missing or has other versions."""
    programs, stamp = TOOLS / "bin", TOOLS / "requirements.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != REQUIREMENTS.read_text(encoding="utf-8"):
        print("docs: installing what the site is built with", flush=True)
        shutil.rmtree(TOOLS, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", TOOLS], check=True, timeout=TIMEOUT_S)
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", programs / "python")
        subprocess.run((*pip, "install", "-r", REQUIREMENTS), check=True, timeout=TIMEOUT_S)
        shutil.copy(REQUIREMENTS, stamp)
    return programs


# -- pages that are written by hand ----------------------------------------------------------------------------------


def write_pages(folder: Path) -> None:
    """Write all pages into `folder`, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    places = dict(_places())
    for source, place in places.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(_relinked(source, place, places), encoding="utf-8")
        else:
            shutil.copy(source, target)
    (folder / "site.css").write_text(STYLE, encoding="utf-8")
    reference = folder / "reference"
    reference.mkdir()
    for name, lines in {
        "settings": _settings(),
        "errors": _errors(),
        "commands": _commands(),
        "messages": _messages(),
        "metrics": _metrics(),
    }.items():
        (reference / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    python = reference / "python"
    python.mkdir()
    for package in api_reference.PACKAGES:
        text = "\n".join(api_reference.page(package)) + "\n"
        (python / f"{package}.md").write_text(text, encoding="utf-8")


def _places() -> Iterator[tuple[Path, str]]:
    """Yield the files of pages, and those that pages use, with their places on the site."""
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.is_file():
            yield path, path.relative_to(ROOT / "docs").as_posix()
    yield ROOT / "README.md", "index.md"
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        yield ROOT / name, name
    for folder, pages in {
        "examples": "README.md",
        "clients": "README.md",
        "deploy": "README.md",
        "bench/notes": "*.md",
    }.items():
        for path in sorted((ROOT / folder).rglob(pages)):
            yield path, path.relative_to(ROOT).as_posix()


def _relinked(source: Path, place: str, places: dict[Path, str]) -> str:
    """Return the text of a page with links to pages of the site; other links become plain text."""

    def relink(match: re.Match[str]) -> str:
        text, to = match.groups()
        path, _, anchor = to.partition("#")
        if not path or "://" in path:
            return match[0]
        target = (source.parent / path).resolve()
        if target.is_dir():
            target = target / "README.md"
        if target not in places:
            return text
        there = posixpath.relpath(places[target], posixpath.dirname(place))
        return f"[{text}]({there}{'#' + anchor if anchor else ''})"

    whole = source.read_text(encoding="utf-8").replace("docs/images/", "images/")
    pieces, at = [], 0
    for fence in FENCE.finditer(whole):
        pieces += [LINK.sub(relink, whole[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*pieces, LINK.sub(relink, whole[at:])])


# -- pages that are made from the code -------------------------------------------------------------------------------


def _table(*rows: tuple[str, ...]) -> Iterator[str]:
    head, *rest = rows
    for row in (head, ("---",) * len(head), *rest):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _settings() -> Iterator[str]:
    from kera.backup.settings import BackupSettings
    from kera.broker.settings import BrokerSettings
    from kera.client import ClientSettings, ConsumerSettings, GroupConsumerSettings, ProducerSettings
    from kera.coordinator.settings import CoordinatorSettings

    yield "# Settings"
    yield ""
    yield "A setting is a flag of its daemon, a variable of the environment, or a line of its table in the file that"
    yield "`--config` names, in this order. Those of clients are arguments, variables, or lines of the file that"
    yield "`KERA_CONFIG` names."
    for settings in (
        BrokerSettings,
        BackupSettings,
        CoordinatorSettings,
        ClientSettings,
        ProducerSettings,
        ConsumerSettings,
        GroupConsumerSettings,
    ):
        prefix = settings.model_config.get("env_prefix", "")
        first = next(iter(settings.fields()))
        yield from ("", f"## `[{settings.section}]`", "", f"As variables: `{prefix}{first.upper()}`, and so on.", "")
        yield from _table(
            ("name", "default", "what it is"),
            *((f"`{name}`", _default(field), field.description or "") for name, field in settings.fields().items()),
        )


def _default(field: Any) -> str:
    if field.is_required():
        return "none: it must be given"
    value = field.get_default(call_default_factory=True)
    return "" if value in (None, "", ()) else f"`{value}`"


def _errors() -> Iterator[str]:
    from kera.core import errors

    yield "# Errors"
    yield ""
    yield "One tree, in `kera.core.errors`; each has a `code`, by which it goes over the wire, a `message`, and"
    yield "`attributes` that name what it is about. What is *retriable* may simply be asked again."
    yield ""
    found = [each for name in errors.__all__ if isinstance(each := getattr(errors, name), type)]
    yield from _table(
        ("error", "is a", "code", "retriable", "what it means"),
        *(
            (
                f"`{each.__name__}`",
                f"`{each.__mro__[1].__name__}`",
                f"`{getattr(each, 'code', '')}`",
                "yes" if getattr(each, "retriable", False) else "",
                (each.__doc__ or "").strip().splitlines()[0].replace("``", "`"),
            )
            for each in found
        ),
    )


def _commands() -> Iterator[str]:
    import typer.main

    from kera.cli.app import app

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[str]:
        context = typer.Context(command, info_name=" ".join(words), max_content_width=110)
        if hasattr(command, "commands"):
            if len(words) > 1:
                yield from ("", f"## `{' '.join(words)}`", "", command.get_short_help_str(limit=300))
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                if not child.hidden:
                    yield from walk(child, (*words, name))
        else:
            yield from ("", f"{'##' if len(words) == 2 else '###'} `{' '.join(words)}`", "")
            yield from ("```text", command.get_help(context).rstrip(), "```")

    yield "# Every command"
    yield ""
    yield "What `--help` says of each."
    yield from walk(typer.main.get_command(app), ("kera",))


def _messages() -> Iterator[str]:
    yield "# Messages"
    yield ""
    yield "What goes over the wire: over gRPC as they are, and in frames between our own parts. How clients use them is"
    yield "in [Write a client](../writing-a-client.md)."
    for path in sorted((ROOT / "proto" / "kera" / "v1").glob("*.proto")):
        yield from ("", f"## {path.name}", "", "```proto", path.read_text(encoding="utf-8").rstrip(), "```")


def _metrics() -> Iterator[str]:
    """Yield the page of metrics, from daemons that are started for this."""
    from kera.local.cluster import LocalCluster

    yield "# Metrics"
    yield ""
    yield "What `/metrics/all` has; `/metrics` has what is of a daemon as a whole. A histogram has `_bucket`, `_count`"
    yield "and `_sum`."
    with tempfile.TemporaryDirectory(prefix="kera-docs-") as directory, contextlib.ExitStack() as stack:
        secret = Path(directory) / "secret"
        secret.write_text(secrets.token_hex(16))
        # With security, so that its metrics are shown as well.
        served = {"metrics_port": 0, "security": True, "cluster_secret_file": secret}
        cluster = stack.enter_context(
            LocalCluster.running(
                backups=1,
                replication=1,
                data_dir=Path(directory) / "data",
                broker_settings=served,
                backup_settings=served,
                coordinator_settings=served,
            )
        )
        token = asyncio.run(_token(cluster.bootstrap, secret))
        for name, ready in sorted(cluster.ready.items()):
            address = f"http://{ready['metrics_address']}/metrics/all"
            request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                text = answer.read().decode()
            kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
            told = re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)
            yield from ("", f"## {name.partition('-')[0]}", "")
            yield from _table(
                ("name", "kind", "what it is"),
                *((f"`{metric}`", kinds.get(metric, ""), help_) for metric, help_ in sorted(told)),
            )


async def _token(bootstrap: str, secret: Path) -> str:
    """Return a token of a user that may see the metrics of a cluster."""
    from kera.client import Client, ClientSettings
    from kera.core.credential_settings import as_daemon
    from kera.core.runtime import MACHINE

    password = secrets.token_hex(16)
    async with await Client.connect(bootstrap, ClientSettings(), runtime=as_daemon(MACHINE, secret)) as client:
        await client.access.create_user("docs", password)
        await client.access.grant("user:docs", ["describe"], "cluster")
    async with await Client.connect(bootstrap, ClientSettings(user="docs", password=password)) as client:
        return (await client.access.issue_token()).secret


if __name__ == "__main__":
    sys.exit(main())
