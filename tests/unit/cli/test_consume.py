"""`kera consume`: times, and slow readers of the output."""

import asyncio
import datetime
import os
import threading

import pytest

from kera.cli._run import UsageError, run_app
from kera.cli._times import parse_time_us
from kera.cli.app import app
from kera.cli.consume import _Begin, _write_all

NOW_US = 1_800_000_000_000_000


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [
        ("0s", 0),
        ("30s", 30),
        ("10m", 600),
        ("10min", 600),
        ("1.5h", 5_400),
        ("10 m", 600),
        ("2w", 1_209_600),
        ("2h", 7_200),
        ("1d", 86_400),
        ("999999d", 86_399_913_600),
    ],
)
def test_a_span_is_before_now(text: str, ago_s: int) -> None:
    assert parse_time_us(text, NOW_US, name="--since") == NOW_US - ago_s * 1_000_000


@pytest.mark.parametrize(
    ("text", "epoch_us"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("2026-01-02T03:04:05.000006Z", 1_767_323_045_000_006),
        ("2026-01-02T03:04:05.000006+02:00", 1_767_315_845_000_006),
    ],
)
def test_a_time_with_a_zone_is_converted_to_utc(text: str, epoch_us: int) -> None:
    assert parse_time_us(text, NOW_US, name="--since") == epoch_us


def test_a_time_without_a_zone_is_local() -> None:
    local = datetime.datetime(2026, 1, 2, 3, 4).astimezone()
    assert parse_time_us("2026-01-02T03:04", NOW_US, name="--since") == int(local.timestamp()) * 1_000_000


@pytest.mark.parametrize("text", ["", "10", "m", "-10m", "1h30m", "yesterday"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a span"):
        parse_time_us(text, NOW_US, name="--since")


@pytest.mark.parametrize("text", ["12345678d", "5 fortnights", "1..5h", "9999999999999s"])
def test_an_impossible_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--since: .* (not a duration|no further back)"):
        parse_time_us(text, NOW_US, name="--since")


@pytest.mark.parametrize("number", ["--5", "²", "-", "", "latest", "9" * 40])
def test_epochs_list_refuses_an_invalid_number_of_an_epoch(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["epochs", "list", "s", f"--from={number}"]) == 2
    assert f"--from: {number!r} is neither the number of an epoch nor earliest" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("offset", "warning"),
    [
        (None, ""),
        (7, ""),
        (3, "stream 'orders' no longer has offset 3 in 1 of 2 entries, which are read from their oldest record"),
    ],
)
def test_a_removed_offset_gets_a_warning(offset: int | None, warning: str, capsys: pytest.CaptureFixture[str]) -> None:
    _Begin("earliest", None, offset, None, None)._warn_of_removed("orders", [0, 7])
    assert capsys.readouterr().err == (f"kera: warning: {warning}\n" if warning else "")


async def test_a_stalled_reader_blocks_neither_the_loop_nor_cancellation() -> None:
    reader, writer = os.pipe()
    data = bytes(1 << 20)  # more than a pipe has room for

    stuck = asyncio.create_task(_write_all(writer, data))
    await asyncio.sleep(0)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck

    os.close(reader)
    for thread in threading.enumerate():
        if thread.name == "kera-output":
            await asyncio.to_thread(thread.join)
    with pytest.raises(BrokenPipeError):
        await _write_all(writer, data)
    os.close(writer)


async def test_a_slow_reader_gets_everything() -> None:
    reader, writer = os.pipe()
    data = os.urandom(1 << 20)

    def read() -> bytes:
        with os.fdopen(reader, "rb") as file:
            return file.read()

    reading = asyncio.create_task(asyncio.to_thread(read))
    await _write_all(writer, data)
    await _write_all(writer, b"end")
    os.close(writer)
    assert await reading == data + b"end"
