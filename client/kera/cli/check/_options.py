"""The options of `kera check`, checked before anything is sent."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from kera.cli._run import UsageError
from kera.client.checking.numbers import VALUE_BYTES
from kera.client.settings import Durability

if TYPE_CHECKING:
    from kera.client import StreamConfig

SECONDS_DEFAULT = 60.0
KILL_EVERY_DEFAULT_S = 30.0
NUMBER_MAX = 1e9
"""Maximum of seconds, or of records per second: larger numbers are typing errors."""
RECORDS_MAX = 100_000_000
"""Maximum of records in a check: each takes some thirty bytes of memory."""
VALUE_BYTES_MAX = 1 << 20
STREAMLETS_MAX = 1 << 14
ENTRIES_MAX = 1 << 6


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one check."""

    seconds: float
    stream: str | None = None
    """Name of an existing stream; None: the check creates one."""
    streamlets: int = 4
    entries: int = 1
    replication: int | None = None
    durability: str | None = None
    producers: int = 2
    readers: int = 2
    members: int = 2
    """Members of the consumer group."""
    rate: float = 1000.0
    """Records a second, of all producers together."""
    record_bytes: int = 100
    kill: tuple[str, ...] = ()
    """Commands, which are run in turn."""
    kill_every_s: float = KILL_EVERY_DEFAULT_S
    within_s: float = 60.0
    """How long after the load and the last kill all records have to be acknowledged and read."""
    seed: int = 0
    keep: bool = False

    def repeated(self, config: StreamConfig, bootstrap: str) -> str:
        """Return the flags that repeat the load, on a stream of the same kind."""
        text = f"--bootstrap {shlex.quote(bootstrap)} --seconds {self.seconds:g} --streamlets {config.streamlets}"
        text += f" --entries {config.entries} --replication {config.replication} --durability {config.durability}"
        text += f" --producers {self.producers} --readers {self.readers} --members {self.members}"
        text += f" --rate {self.rate:g} --record-bytes {self.record_bytes} --within {self.within_s:g}"
        text += f" --seed {self.seed}"
        if self.kill:
            text += "".join(f" --kill {shlex.quote(each)}" for each in self.kill)
            text += f" --kill-every {self.kill_every_s:g}"
        return text


def seconds_of(minutes: float | None, seconds: float | None) -> float:
    """Return the duration of the load. Raises `UsageError`."""
    if minutes is not None and seconds is not None:
        raise UsageError("--minutes and --seconds are mutually exclusive")
    if minutes is not None:
        return 60 * _positive("--minutes", minutes)
    return SECONDS_DEFAULT if seconds is None else _positive("--seconds", seconds)


def checked(
    *,
    seconds: float,
    stream: str | None,
    streamlets: int | None,
    entries: int | None,
    replication: int | None,
    durability: str | None,
    producers: int,
    readers: int,
    members: int,
    rate: float,
    record_bytes: int,
    kill: Sequence[str],
    kill_every_s: float | None,
    within_s: float,
    seed: int | None,
    keep: bool,
) -> Options:
    """Return the options, with defaults for those that are None, not given. Raises `UsageError`."""
    own = {"--streamlets": streamlets, "--entries": entries, "--replication": replication, "--durability": durability}
    given = [name for name, value in own.items() if value is not None]
    if stream is not None and given:
        raise UsageError(f"{given[0]} is for a stream that the check makes; --stream names one that is there")
    _within("--streamlets", streamlets, 1, STREAMLETS_MAX)
    _within("--entries", entries, 1, ENTRIES_MAX)
    if durability is not None and durability not in get_args(Durability):
        raise UsageError(f"--durability: {durability!r} is not one of {', '.join(get_args(Durability))}")
    _within("--record-bytes", record_bytes, VALUE_BYTES, VALUE_BYTES_MAX)
    _positive("--rate", rate)
    _positive("--within", within_s)
    records = rate * seconds
    if records > RECORDS_MAX:
        raise UsageError(
            f"that is {records:,.0f} records, and a check takes {RECORDS_MAX:,}: lower --rate, or the time"
        )
    if records < producers:
        raise UsageError(f"that is {records:,.0f} records for {producers} producers: raise --rate, or the time")
    if not kill and kill_every_s is not None:
        raise UsageError("--kill-every needs --kill")
    if any(not command.strip() for command in kill):
        raise UsageError("--kill must not be empty")
    every_s = KILL_EVERY_DEFAULT_S if kill_every_s is None else _positive("--kill-every", kill_every_s)
    if kill and every_s >= seconds:
        raise UsageError(f"no --kill would come: the load is on for {seconds:g} s, and --kill-every is {every_s:g}")
    return Options(
        seconds=seconds,
        stream=stream,
        streamlets=streamlets or 4,
        entries=entries or 1,
        replication=replication,
        durability=durability,
        producers=producers,
        readers=readers,
        members=members,
        rate=rate,
        record_bytes=record_bytes,
        kill=tuple(kill),
        kill_every_s=every_s,
        within_s=within_s,
        seed=secrets.randbits(32) if seed is None else seed,
        keep=keep,
    )


def _positive(name: str, value: float) -> float:
    if not 0 < value < NUMBER_MAX:
        raise UsageError(f"{name} must be above 0 and below {NUMBER_MAX:g}, and is {value:g}")
    return value


def _within(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise UsageError(f"{name} must be from {low} to {high:,}, and is {value:,}")
