"""``kera latency``: limits on the latency of records on their way through streams, and measured latencies."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION, confirm
from kera.cli._durations import parse_duration_ms
from kera.cli._latency_text import described, in_ms, listed, of_which
from kera.cli._output import OUTPUT_OPTION, Output, rendered, show_document
from kera.cli._run import UsageError
from kera.core.base.spans import format_ms
from kera.core.latency import limits

if TYPE_CHECKING:
    from kera.client import LatencyConstraint, LatencyDescription
    from kera.client.admin.latency import Statistic

app = Commands(help="Limit how late records may be on a path, and see how late they are.", no_args_is_help=True)

NAME_ARGUMENT = typer.Argument(..., metavar="NAME", help="Name of the latency constraint.")
PATH_HELP = "Streams in turn with group:NAME, the consumer group that reads the stream before it; separated by commas."
LIMIT_HELP = "How long records may take for the path: 300ms, 2s."
WINDOW_HELP = "Time over which the mean is taken: 15s, 1min."
P99_OPTION = typer.Option(False, "--p99", help="Limit the 99th percentile.")
INTERVAL = "2s"
CLEAR = "\x1b[H\x1b[2J"
"""Clears the terminal."""


@app.command()
async def create(
    name: str = NAME_ARGUMENT,
    path: str = typer.Option(..., "--path", metavar="PATH", help=PATH_HELP),
    limit: str = typer.Option(..., "--limit", metavar="TIME", help=LIMIT_HELP),
    window: str = typer.Option("15s", "--window", metavar="TIME", help=WINDOW_HELP),
    p99: bool = P99_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Limit the latency of records on a path: their mean over any window is at most the limit.

    Writers, brokers and readers let their buffers fill for as long as the limit allows, and no longer.
    """
    elements, limit_ms, window_ms = _path(path), _limit(limit), _window(window)
    statistic: Statistic = "p99" if p99 else "mean"
    async with connected(bootstrap) as client:
        made = await client.latency.create(
            name, path=elements, limit_ms=limit_ms, window_ms=window_ms, statistic=statistic
        )
    print(_in_words(made))


@app.command()
async def alter(
    name: str = NAME_ARGUMENT,
    path: str | None = typer.Option(None, "--path", metavar="PATH", help=PATH_HELP),
    limit: str | None = typer.Option(None, "--limit", metavar="TIME", help=LIMIT_HELP),
    window: str | None = typer.Option(None, "--window", metavar="TIME", help=WINDOW_HELP),
    p99: bool = P99_OPTION,
    mean: bool = typer.Option(False, "--mean", help="Limit the mean."),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Change a latency constraint at once. Settings that are not given stay unchanged."""
    if p99 and mean:
        raise UsageError("give either --p99 or --mean")
    fields: dict[str, Any] = {
        "path": None if path is None else _path(path),
        "limit_ms": None if limit is None else _limit(limit),
        "window_ms": None if window is None else _window(window),
        "statistic": "p99" if p99 else "mean" if mean else None,
    }
    if all(value is None for value in fields.values()):
        raise UsageError("say what changes: --path, --limit, --window, --p99 or --mean")
    async with connected(bootstrap, patient=False) as client:
        made = await client.latency.alter(name, **fields)
    print(_in_words(made))


@app.command("list")
async def list_(bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> None:
    """List all latency constraints, and whether they are met."""
    async with connected(bootstrap) as client:
        found = await client.latency.constraints()
    if output.is_document:
        show_document([_to_json(each, hops=False) for each in found], output)
    elif found:
        print(listed(found))
    else:
        print("no latency constraints", file=sys.stderr)


@app.command()
async def delete(name: str = NAME_ARGUMENT, yes: bool = YES_OPTION, bootstrap: str = BOOTSTRAP_OPTION) -> None:
    """Delete a latency constraint: buffers of its streams follow their own settings again."""
    confirm(f"deleting {name}", f"delete latency constraint {name}?", yes=yes)
    async with connected(bootstrap, patient=False) as client:
        await client.latency.delete(name)
    print(f"deleted {name}")


@app.command()
async def describe(
    name: str = NAME_ARGUMENT,
    watch: bool = typer.Option(False, "--watch", "-w", help="Show it again and again, until Ctrl-C."),
    interval: str = typer.Option(INTERVAL, "--interval", metavar="TIME", help="With --watch: the pause in between."),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Show the time of each hop of a path, the hops that take too long, and the advice to buffers."""
    import asyncio

    pause_s = _time("--interval", interval) / 1000
    if not watch and interval != INTERVAL:
        raise UsageError("--interval needs --watch")
    on_screen = watch and not output.is_document and sys.stdout.isatty()
    async with connected(bootstrap) as client:
        while True:
            found = await client.latency.describe(name)
            if not output.is_document:
                text = described(found)
            elif not watch:
                text = rendered(_to_json(found), output)
            else:  # a stream of documents: one line of JSON each, or YAML with separators
                text = rendered(_to_json(found), output, indent=None)
                text = f"---\n{text}" if output is Output.YAML else text
            print(f"{CLEAR}{text}" if on_screen else text, flush=True)
            if not watch:
                return
            await asyncio.sleep(pause_s)
            if not (on_screen or output.is_document):
                print()


def _path(text: str) -> list[str]:
    elements = [element.strip() for element in text.split(",")]
    if not all(elements):
        raise UsageError(
            f"--path: {text!r} has a comma without an element beside it; write clicks, group:enrich, visits"
        )
    return elements


def _time(flag: str, text: str) -> int:
    milliseconds = parse_duration_ms(text, name=flag)
    if not milliseconds:
        raise UsageError(f"{flag}: {text!r} is not a time: the minimum is 1 ms")
    return milliseconds


def _limit(text: str) -> int:
    return _within("--limit", text, limits.LIMIT_US_MIN // 1000, limits.LIMIT_US_MAX // 1000)


def _window(text: str) -> int:
    return _within("--window", text, limits.WINDOW_MS_MIN, limits.WINDOW_MS_MAX)


def _within(flag: str, text: str, least_ms: int, most_ms: int) -> int:
    milliseconds = _time(flag, text)
    if not least_ms <= milliseconds <= most_ms:
        raise UsageError(f"{flag}: {text!r} is not from {format_ms(least_ms)} to {format_ms(most_ms)}")
    return milliseconds


def _in_words(made: LatencyConstraint) -> str:
    return f"{made.name}: {', '.join(made.path)} within {in_ms(made.limit_ms * 1000)}, {of_which(made)}"


def _to_json(found: LatencyDescription, *, hops: bool = True) -> dict[str, Any]:
    told = dataclasses.asdict(found)
    constraint = told.pop("constraint")
    if not hops:
        del told["hops"]
    return {**constraint, **told}
