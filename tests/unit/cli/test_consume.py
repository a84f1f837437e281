"""`kera consume --since`: times, what of a chunk is left out, and what does not go together."""

import datetime

import pyarrow as pa
import pytest

from kera.cli._run import UsageError, run_app
from kera.cli._times import parse_time_us
from kera.cli.app import app
from kera.cli.consume import _Since
from kera.client import ChunkBatch, EntryId, Position
from kera.core.chunk import encode_chunk, encode_payload, read_header
from tests.unit.client.support import description

NOW_US = 1_800_000_000_000_000
POSITION = Position(1, 1, 0)


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
def test_a_time_with_a_zone_is_what_it_says(text: str, epoch_us: int) -> None:
    assert parse_time_us(text, NOW_US, name="--since") == epoch_us


def test_a_time_without_a_zone_is_a_local_one() -> None:
    local = datetime.datetime(2026, 1, 2, 3, 4).astimezone()
    assert parse_time_us("2026-01-02T03:04", NOW_US, name="--since") == int(local.timestamp()) * 1_000_000


@pytest.mark.parametrize("text", ["", "10", "m", "-10m", "1h30m", "yesterday"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a span"):
        parse_time_us(text, NOW_US, name="--since")


@pytest.mark.parametrize("text", ["12345678d", "5 fortnights", "1..5h", "9999999999999s"])
def test_a_span_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--since: .* (no span of time|no further back)"):
        parse_time_us(text, NOW_US, name="--since")


@pytest.mark.parametrize(
    ("other", "says"),
    [(("--from", "earliest"), "--since and --from"), (("--group", "g"), "--since and --group")],
)
def test_there_is_one_place_to_begin(other: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["consume", "s", "--since", "10m", *other]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("s", "--ordered", "--group", "g"), "--ordered and --group"),
        (("s", "t"), "add --ordered"),
        (("s", "--epoch", "10s"), "--epoch goes with --ordered"),
        (("s", "--ordered", "--epoch", "soon"), "no span of time"),
    ],
)
def test_an_order_is_for_who_reads_all(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["consume", *arguments]) == 2
    assert says in capsys.readouterr().err


def chunk(times_us: list[int | None], *, entry: int = 0, unit: str = "us", column: str = "timestamp") -> ChunkBatch:
    scale = {"s": 1_000_000, "us": 1}[unit]
    values = [None if each is None else each // scale for each in times_us]
    batch = pa.record_batch({column: pa.array(values, pa.timestamp(unit, tz="UTC"))})
    header = encode_chunk(
        encode_payload(batch),
        record_count=batch.num_rows,
        stream_id=7,
        streamlet_id=0,
        schema_id=1,
        producer_id=1,
        producer_epoch=0,
        sequence=0,
        created_us=0,
        min_timestamp_us=0,
        max_timestamp_us=0,
    ).header
    return ChunkBatch(batch, read_header(header), POSITION, POSITION, EntryId(7, 0, entry))


def test_records_before_the_time_are_left_out_of_the_first_chunk_of_each_entry() -> None:
    since = _Since(description(entries=2), 50)

    assert since.skipped(chunk([10, 49, 50, 20, 60])) == 2
    assert since.skipped(chunk([10, 20])) == 0, "what comes later is printed whatever its time is"
    assert since.skipped(chunk([70, 10], entry=1)) == 0
    assert since.skipped(chunk([10, 70], entry=1)) == 0


def test_a_chunk_that_has_no_such_record_is_printed_whole() -> None:
    assert _Since(description(), 50).skipped(chunk([None, 10])) == 0


def test_the_time_of_a_typed_stream_is_that_of_its_timestamp_column() -> None:
    schema = pa.schema([pa.field("at", pa.timestamp("s", tz="UTC"), nullable=True)])
    rows = [10_000_000, None, 50_000_000]

    assert (
        _Since(description(schema=schema, timestamp_column="at"), 50_000_000).skipped(
            chunk(rows, unit="s", column="at")
        )
        == 2
    )
    assert _Since(description(schema=schema), 50_000_000).skipped(chunk(rows, unit="s", column="at")) == 0
