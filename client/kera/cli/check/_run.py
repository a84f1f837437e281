"""Runs a check: creates the stream, runs the load, waits for calm, reads everything back, and gives the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kera.cli._client import connected
from kera.cli._run import TERMINATED, UsageError
from kera.cli.check._kills import Kill, Kills
from kera.cli.check._options import Options
from kera.cli.check._workload import (
    Acknowledgements,
    Looking,
    Member,
    Reading,
    Sending,
    Shared,
    pass_unreadable,
    strange,
)
from kera.client.checking.findings import Violation
from kera.client.checking.ledger import LAST_READER, Ledger
from kera.client.checking.numbers import TOKEN_BYTES, Values
from kera.core.base.telemetry import get_logger
from kera.core.errors import CorruptChunk, DataLost, InvalidArgument, KeraError, UnknownStream

if TYPE_CHECKING:
    from kera.client import Client, StreamDescription

log = get_logger("kera.check")

SLICE_S = 0.25
"""Length of one wait. A wait of more than twice this length means that this process was suspended meanwhile."""
SETTLED_EVERY_S = 0.1
"""Time between two looks at whether everything is acknowledged, read and processed."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a check: the verdict, and its reasons."""

    options: Options
    bootstrap: str
    stream: StreamDescription
    impossible: str | None = None
    """Why the cluster could not be checked; None: it was."""
    interrupted: bool = False
    load_s: float = 0.0
    calm_s: float | None = None
    """Time after the load and the last command until all was acknowledged, read and processed; None: not in time."""
    sent: int = 0
    acknowledged: int = 0
    refused: int = 0
    uncertain: int = 0
    uncertain_stored: int = 0
    lost_as_told: int = 0
    processed_again: int = 0
    longest_pause_s: float = 0.0
    """The longest time that a streamlet was without an acknowledgement."""
    longest_pause_from_s: float = 0.0
    longest_pause_of: int | None = None
    ends_looked: int = 0
    pulling: int = 0
    """Number of readers that have pulled everything; the others have read pushed chunks in the broker's memory."""
    kills: list[Kill] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    findings: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """The findings for people."""
    stream_kept: bool = False
    """Whether the stream still exists."""

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.impossible is not None:
            return "not checked"
        return "violated" if self.counts else "kept"


class Check:
    """One check."""

    def __init__(self, options: Options, bootstrap: str, stream: StreamDescription) -> None:
        self._options = options
        self._stream = stream
        consumer_group = f"kera-check-{secrets.token_hex(4)}" if options.stream else stream.name
        self._begun_s = time.monotonic()
        durability = stream.config.durability
        self.ledger = Ledger(self.now_s, may_lose=durability == "leader")
        self.shared = Shared(options, bootstrap, stream, consumer_group)
        self.acknowledgements = Acknowledgements(self.now_s)
        self.kills = Kills(options, self.now_s)
        self.looking = Looking(self.shared, self.ledger)
        self.doing = "the load is on"
        self._is_read_back = False
        self._missing = ""
        """Text about the condition that the check waits for."""
        self._unread: str | None = None
        """Why the records could not be read back; None: no error."""
        self._values = Values(secrets.token_hex(TOKEN_BYTES // 2), options.record_bytes)
        self._sending = [
            Sending(self.shared, self.ledger, self._values, self.acknowledgements, number)
            for number in range(1, options.producers + 1)
        ]
        self._reading = [
            Reading(self.shared, self.ledger, self._values, self.looking, number)
            for number in range(1, options.readers + 1)
        ]
        self._members = [
            Member(self.shared, self.ledger, self._values, number) for number in range(1, options.members + 1)
        ]

    def now_s(self) -> float:
        """Return the time since the beginning of the check."""
        return time.monotonic() - self._begun_s

    async def run(self) -> Outcome:
        """Run the whole check. Ctrl-C ends the load, and a second one the check."""
        outcome = Outcome(self._options, self.shared.bootstrap, self._stream)
        followers: list[Reading | Member | Looking] = [*self._reading, *self._members, self.looking]
        async with asyncio.TaskGroup() as tasks:
            begin, within = tasks.create_task, self.shared.with_descriptors
            others = [begin(within(each.run)) for each in followers]
            sending = [begin(within(each.run)) for each in self._sending]
            killing = begin(within(self.kills.run))
            try:
                await self._load(outcome, killing)
                if self.shared.impossible is None:
                    await self._calm(outcome, sending)
            finally:
                for task in (*sending, *others, killing):
                    task.cancel()
        if self.shared.impossible is None and not self._is_read_back and self._unread is None:
            await self._read_back()
        self._judge(outcome)
        return outcome

    async def _load(self, outcome: Outcome, killing: asyncio.Task[None]) -> None:
        """Wait until the load is over, Ctrl-C is pressed, or the stream can no longer be checked; end the commands."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.seconds):
                    await self.shared.stopping.wait()
        except asyncio.CancelledError as error:
            if error.args == (TERMINATED,):
                raise
            if (this := asyncio.current_task()) is not None:
                this.uncancel()
            outcome.interrupted = True
        self.shared.stopping.set()
        outcome.load_s = self.now_s()
        self.doing = "the load has ended; waiting for the last command"
        self.kills.stop()
        await asyncio.wait([killing], timeout=self._options.within_s)
        killing.cancel()
        await asyncio.wait([killing])

    async def _calm(self, outcome: Outcome, sending: list[asyncio.Task[None]]) -> None:
        """Wait until everything is acknowledged, read and processed, or the time for that is up."""
        self.doing = "the load has ended; waiting until all is acknowledged and read"
        begun_s = max(outcome.load_s, self.kills.last_end_s)
        left_s = max(0.0, begun_s + self._options.within_s - self.now_s())
        if await while_running(self._settle(sending), left_s):
            outcome.calm_s = max(0.0, self.now_s() - begun_s)
        else:
            text = f"{self._options.within_s:g} s after the load and the last command, {self._missing}"
            self.ledger.note("not in time", text)
            return
        if not (self._members and self.ledger.losses.any_allowed):
            return
        # Records that were reported lost may still be stored: only reading back shows what the group has to be given.
        await self._read_back()
        self.doing = "waiting until the consumer group has been given what is there"
        if not await while_running(self._until(self._has_group_all), self._options.within_s):
            self.ledger.note(
                "not in time", f"{self._options.within_s:g} s after everything was read back, {self._missing}"
            )

    async def _settle(self, sending: list[asyncio.Task[None]]) -> None:
        self._missing = "some records that were sent had no answer"
        await asyncio.wait(sending)
        self._missing = "the cluster did not tell where the stream ends"
        async with self.shared.connected() as client:
            ends = await self._ends(client)
        for reader in self._reading:
            self._missing = f"{reader.name} did not have all of the stream"
            await self._until(lambda name=reader.name: self._has(name, ends))  # type: ignore[misc]
        if self._members:
            self._missing = "the consumer group had not been given all that was acknowledged"
            await self._until(self._has_group_all)

    async def _ends(self, client: Client) -> dict[tuple[int, int], int]:
        while self.shared.impossible is None:
            try:
                return await self.looking.look(client)
            except KeraError as error:
                await self.shared.failed("durable ends", error)
        return {}

    def _has(self, reader: str, ends: dict[tuple[int, int], int]) -> bool:
        there = self.ledger.next_of(reader)
        return all(there.get(entry, 0) >= end for entry, end in ends.items())

    def _has_group_all(self) -> bool:
        return self.ledger.unprocessed(read_back=self._is_read_back) == 0

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if self.shared.impossible is not None:
                return
            await asyncio.sleep(SETTLED_EVERY_S)

    async def _read_back(self) -> None:
        """Read back everything that is stored in the end."""
        self.doing = "reading back"
        shared = self.shared
        try:
            async with shared.connected() as client:
                await self.looking.look(client)
                if shared.impossible is not None:
                    return
                await self._store(client)
        except KeraError as error:
            self._unread = f"what is stored in the end could not be read: {error.message}"
            if self.ledger.findings.counts:  # the verdict is a violation anyway, so this is one more finding
                self.ledger.note("not read back", error.message)

    async def _store(self, client: Client) -> None:
        """Store all records that can be read in the ledger; skip lost and corrupt parts."""
        positions: dict[int, list[Any]] | None = None
        while self.shared.impossible is None:
            consumer = client.consumer(
                self.shared.stream,
                start=positions or "earliest",
                end="latest",
                shared_memory="never",
                corrupt_chunks="skip",
            )
            try:
                async for chunk in consumer.batches():
                    if pass_unreadable(self.ledger, LAST_READER, chunk):
                        continue
                    column, entry = chunk.batch.column("value"), (chunk.entry.streamlet_id, chunk.entry.entry)
                    values = self.shared.recognize(self._values, chunk)
                    self.ledger.store(entry, chunk.header.first_record, values, partial(strange, column))
                self._is_read_back = True
                return
            except DataLost as error:
                positions = await self.looking.behind(LAST_READER, error, consumer.positions(), client)
            except CorruptChunk as error:  # not even its header can be read: no reader can get past it
                self.ledger.note("corrupt", f"{LAST_READER}: {error.message}")
                streamlet, entry_number = error.attributes["streamlet_id"], error.attributes["entry"]
                positions = consumer.positions()
                end = (await client.bounds(self.shared.stream))[streamlet][entry_number].end
                positions[streamlet][entry_number] = end
            finally:
                await consumer.close()

    def _judge(self, outcome: Outcome) -> None:
        ledger = self.ledger
        impossible = self.shared.impossible
        if impossible is None:
            self.doing = "comparing"
            ledger.close(group=bool(self._members), read_back=self._is_read_back)
            if self._unread is not None and not ledger.findings.counts:  # earlier findings decide the verdict
                impossible = self._unread
            elif not ledger.acknowledged:
                refused = ", ".join(sorted(self.shared.notes))
                impossible = "nothing was acknowledged" + (f" ({refused})" if refused else "")
            elif not ledger.findings.counts:  # a finding counts even if no command has succeeded
                impossible = self._without_a_command()
        outcome.impossible = impossible
        outcome.sent, outcome.acknowledged = ledger.sent, ledger.acknowledged
        outcome.refused, outcome.uncertain = ledger.refused, ledger.sent - ledger.acknowledged - ledger.refused
        outcome.uncertain_stored, outcome.lost_as_told = ledger.uncertain_stored, ledger.lost_as_told
        outcome.processed_again = ledger.processed_again
        pause_s, from_s, of = self.acknowledgements.longest(outcome.load_s)
        outcome.longest_pause_s, outcome.longest_pause_from_s, outcome.longest_pause_of = pause_s, from_s, of
        outcome.ends_looked, outcome.kills = self.looking.looked, self.kills.done
        outcome.pulling = sum(not each.pushed for each in self._reading)
        outcome.notes = dict(sorted(self.shared.notes.items()))
        outcome.findings, outcome.counts, outcome.lines = (
            ledger.findings.kept,
            dict(ledger.findings.counts),
            list(ledger.findings.lines()),
        )

    def _without_a_command(self) -> str | None:
        """Return why no --kill command has had an effect; None: one has, or none was given."""
        if self._options.kill and not self.kills.done:
            return "no --kill command was run: the load was ended before"
        if self.kills.done and all(kill.exit_code != 0 for kill in self.kills.done):
            return f"no --kill command has succeeded: {_ending(self.kills.done[-1])}"
        return None


def exit_of(kill: Kill) -> str:
    """Return how a command ended that the check did not end: its exit code or signal."""
    code = kill.exit_code or 0
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _ending(kill: Kill) -> str:
    ended = "was ended, as it took too long" if kill.exit_code is None else f"ended with {exit_of(kill)}"
    return f"{kill.command!r} {ended}" + (f": {kill.output.splitlines()[-1]}" if kill.output else "")


async def while_running(work: Coroutine[Any, Any, None], seconds: float) -> bool:
    """Wait for `work` for at most `seconds`; return whether it has finished, and cancel it otherwise.

    Time during which this process was suspended, as by Ctrl-Z, does not count, as it says nothing about the cluster.
    """
    task, loop = asyncio.create_task(work), asyncio.get_running_loop()
    try:
        while not task.done() and seconds > 0:
            begun_s = loop.time()
            await asyncio.wait([task], timeout=min(seconds, SLICE_S))
            seconds -= min(loop.time() - begun_s, 2 * SLICE_S)
        if task.done():
            await task
            return True
        return False
    finally:
        task.cancel()
        await asyncio.wait([task])


Watching = Callable[[Check], contextlib.AbstractAsyncContextManager[None]]


async def carry_out(options: Options, bootstrap: str, watching: Watching) -> Outcome:
    """Check a cluster; `watching` shows the progress. Raises `UsageError`, and `KeraError` if it cannot begin."""
    async with connected(bootstrap) as client:
        stream = await _stream(client, options)
        check = Check(options, bootstrap, stream)
        outcome: Outcome | None = None
        try:
            async with watching(check):
                outcome = await check.run()
        finally:
            # Keep evidence, a stream that existed before, and one that has been deleted and made again meanwhile.
            evidence = options.keep or (outcome is not None and outcome.verdict == "violated")
            left = []
            if not evidence and options.members:
                group = check.shared.consumer_group
                left += await _left(f"consumer group {group}", client.admin.delete_consumer_group(group))
            if options.stream is None and not evidence and not check.shared.gone:
                left += await _left(f"stream {stream.name}", client.admin.delete_stream(stream.name))
            elif outcome is not None:
                outcome.stream_kept = not check.shared.gone
            if left:
                log.error("could not be removed, and stays", what=" and ".join(left))
    return outcome


async def _stream(client: Client, options: Options) -> StreamDescription:
    if options.stream is None:
        return await client.admin.create_stream(
            f"kera-check-{secrets.token_hex(4)}",
            streamlets=options.streamlets,
            entries=options.entries,
            replication=options.replication,
            durability=options.durability,
        )
    stream = await client.admin.describe_stream(options.stream)
    if stream.typed:
        raise UsageError(f"--stream: {stream.name} is typed; a check sends bytes")
    config = stream.config
    if config.retention_ms or config.retention_bytes or config.retention_consumed:
        raise UsageError(
            f"--stream: {stream.name} has retention rules, and removed records cannot be checked; use a stream"
            " without them"
        )
    bounds = await client.bounds(stream.name)
    records = sum(entry.next_record for entries in bounds.values() for entry in entries)
    if records:
        raise UsageError(f"--stream: {stream.name} has, or had, {records:,} records; a check needs an empty one")
    return stream


async def _left(what: str, removal: Coroutine[Any, Any, None]) -> list[str]:
    """Await `removal`; return `what` if it fails, as the verdict does not depend on it."""
    try:
        await removal
    except KeraError as error:
        there_is_none = isinstance(error, InvalidArgument | UnknownStream)
        return [] if there_is_none else [what]
    return []
