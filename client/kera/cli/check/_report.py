"""The output of a check: a line of progress while it runs, figures and evidence at its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from kera.cli._table import fields
from kera.cli.check._kills import Kill
from kera.cli.check._run import Check, Outcome, exit_of
from kera.core.base.spans import format_ms
from kera.core.base.spelling import plural

PROGRESS_INTERVAL_S = 0.2
EXIT_CODES = {"kept": 0, "violated": 1, "not checked": 2}
KILLS_MAX = 20
"""Maximum of commands in the output for people."""
OUTPUT_LINES_MAX = 3
"""Maximum of lines of a command's output in the output for people."""


@contextlib.asynccontextmanager
async def progress_of(check: Check) -> AsyncIterator[None]:
    """Context manager that shows a line of progress, updated in place, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    showing = asyncio.create_task(_show(check))
    try:
        yield
    finally:
        showing.cancel()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


async def _show(check: Check) -> None:
    while True:
        columns = shutil.get_terminal_size().columns  # the line is cut: a longer one would scroll
        print(f"\r{progress_line(check)[: columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(PROGRESS_INTERVAL_S)


def progress_line(check: Check) -> str:
    """Describe the progress of a check."""
    ledger, kills = check.ledger, check.kills.done
    text = f"{check.now_s():.0f} s, {check.doing}: {ledger.sent:,} sent, {ledger.acknowledged:,} acknowledged"
    if kills:
        text += f", {plural(len(kills), 'command')}"
    quiet_s = check.now_s() - check.acknowledgements.last_s
    if quiet_s >= 1 and not check.shared.stopping.is_set():
        text += f", none for {quiet_s:.0f} s"
    if ledger.findings.counts:
        text += f", {ledger.findings.counts.total():,} WRONG"
    return text


def to_text(outcome: Outcome) -> str:
    """Return figures, evidence and verdict, for people."""
    lines = [fields(_figures(outcome))]
    if outcome.lines:
        lines += ["", *outcome.lines]
    return "\n".join([*lines, "", _verdict(outcome)])


def _figures(outcome: Outcome) -> list[tuple[str, object]]:
    options, config = outcome.options, outcome.stream.config
    backups = plural(config.replication, "backup")
    stream = (
        f"{outcome.stream.name}: {plural(config.streamlets, 'streamlet')}, durability {config.durability}, {backups}"
    )
    load = f"{outcome.load_s:.1f} s, {plural(options.producers, 'producer')}, {options.rate:g} records/s"
    load += f", seed {options.seed}" + (", ended by Ctrl-C" if outcome.interrupted else "")
    records = f"{outcome.sent:,} sent: {outcome.acknowledged:,} acknowledged, {outcome.refused:,} refused,"
    records += f" {outcome.uncertain:,} uncertain"
    if outcome.uncertain_stored:
        records += f", of which {outcome.uncertain_stored:,} are there"
    if outcome.lost_as_told:
        records += f"; {outcome.lost_as_told:,} acknowledged ones are lost, as the cluster reported"
    figures: list[tuple[str, object]] = [
        ("stream", stream + (", kept" if outcome.stream_kept else "")),
        ("load", load),
        ("records", records),
        ("pause", _pause(outcome)),
    ]
    if options.readers:
        pushed = options.readers - outcome.pulling
        figures.append(("readers", f"{outcome.pulling} pulled, {pushed} read in the brokers' memory"))
    if options.members:
        again = _many(outcome.processed_again, "record")
        figures.append(("group", f"{plural(options.members, 'member')}, given {again} more than once"))
    figures.append(("ends", f"looked at {plural(outcome.ends_looked, 'time')}"))
    if outcome.calm_s is not None:
        figures.append(
            ("calm", f"all acknowledged and read {outcome.calm_s:.2f} s after the load and the last command")
        )
    if outcome.kills:
        figures.append(("commands", "\n".join(_kill_lines(outcome.kills))))
    if outcome.notes:
        notes = ", ".join(f"{what} {count:,}" for what, count in outcome.notes.items())
        figures.append(("tried again", notes))
    return figures


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _pause(outcome: Outcome) -> str:
    if outcome.longest_pause_of is None:
        return "none: there were no acknowledgements, or one"
    return (
        f"{outcome.longest_pause_s:.2f} s at most, in which streamlet {outcome.longest_pause_of} had no answer,"
        f" from {outcome.longest_pause_from_s:.1f} s on"
    )


def _kill_lines(kills: Sequence[Kill]) -> Iterator[str]:
    yield from map(_kill_line, kills[:KILLS_MAX])
    if len(kills) > KILLS_MAX:
        yield f"and {len(kills) - KILLS_MAX:,} more"
    succeeded = {kill.command for kill in kills if kill.exit_code == 0}
    for command in dict.fromkeys(kill.command for kill in kills):
        if command not in succeeded:
            yield f"never succeeded: {command}"


def _kill_line(kill: Kill) -> str:
    took = "" if kill.ended_s is None else f" after {format_ms(round(1000 * (kill.ended_s - kill.begun_s)))}"
    ended = f"ended by the check{took}" if kill.exit_code is None else f"{exit_of(kill)}{took}"
    lines = [f"  {line}" for line in kill.output.splitlines()[-OUTPUT_LINES_MAX:]]
    return "\n".join([f"at {kill.begun_s:.1f} s: {kill.command}: {ended}", *lines])


def _verdict(outcome: Outcome) -> str:
    match outcome.verdict:
        case "kept":
            return (
                f"kept: {outcome.acknowledged - outcome.lost_as_told:,} acknowledged records are there, once, in the"
                " order of their producers, and nothing that was read has changed"
            )
        case "violated":
            return (
                f"VIOLATED: {_many(sum(outcome.counts.values()), 'finding')}; once more:"
                f" kera check {outcome.options.repeated(outcome.stream.config, outcome.bootstrap)}"
            )
    return f"not checked: {outcome.impossible}"


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return figures, evidence and verdict, for programs."""
    config = outcome.stream.config
    shown = dataclasses.asdict(dataclasses.replace(outcome, stream=None))  # type: ignore[arg-type]
    del shown["lines"]
    shown["findings"] = [finding._asdict() for finding in outcome.findings]
    return {
        "verdict": outcome.verdict,
        **shown,
        "stream": {
            "name": outcome.stream.name,
            "streamlets": config.streamlets,
            "entries": config.entries,
            "replication": config.replication,
            "durability": config.durability,
        },
    }
