"""Positions and times are parsed as Kafka's users write them; errors say how to write them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.base.ids import Position
from kera.core.errors import InvalidArgument
from kera.spark_connector.options.places import EPOCH_MS_MAX, parse_time, parse_times, parse_where, span_ms
from kera.spark_connector.planning.offsets import EntryOffset, Offsets, StreamOffsets
from kera.spark_connector.planning.places import Time, Where

DAY_US = 86_400 * 10**6


@pytest.mark.parametrize(("text", "place"), [("earliest", "earliest"), (" Latest ", "latest")])
def test_earliest_and_latest_apply_to_all_streamlets(text: str, place: str) -> None:
    where = parse_where("startingOffsets", text)

    assert where == Where("startingOffsets", everywhere=place)  # type: ignore[arg-type]  # one of the two words
    assert not where.by_time


def test_a_position_applies_to_all_entries_of_a_streamlet_and_a_list_has_one_per_entry() -> None:
    text = '{"a": {"0": "earliest", "1": -1, "2": [[4, 2, 0], "latest", -2]}, "b": {"0": -2}}'

    assert parse_where("startingOffsets", text).streams == {
        "a": {0: "earliest", 1: "latest", 2: [Position(4, 2, 0), "latest", "earliest"]},
        "b": {0: "earliest"},
    }


def test_offsets_from_progress_are_accepted_with_their_ordinals_and_stream_ids() -> None:
    shown = Offsets(
        {"flights": StreamOffsets(7, {0: (EntryOffset(Position(1, 2, 64), 10),)})}, None, "spark-kera-source-1a2b3c4d"
    ).to_json()

    where = parse_where("startingOffsets", json.dumps(shown))

    assert where.streams == {"flights": {0: [EntryOffset(Position(1, 2, 64), 10)]}}
    assert where.stream_ids == {"flights": 7}


def test_offsets_from_progress_of_version_1_are_accepted() -> None:
    where = parse_where("endingOffsets", '{"stream": "flights", "stream_id": 7, "streamlets": {"0": [[1, 2, 64, 10]]}}')

    assert where.streams == {"flights": {0: [EntryOffset(Position(1, 2, 64), 10)]}}
    assert where.stream_ids == {"flights": 7}


def test_streams_may_be_named_like_fields_of_the_checkpoint() -> None:
    assert parse_where("startingOffsets", '{"streams": {"0": -2}, "version": {"0": -1}}').streams == {
        "streams": {0: "earliest"},
        "version": {0: "latest"},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("soon", "must be 'earliest', 'latest' or a JSON object"),
        ("", "must be 'earliest', 'latest' or a JSON object"),
        ("[]", "must have the form"),
        ("{}", "must have the form"),
        ('{"flights": "earliest"}', "stream 'flights' must have its streamlets"),
        ('{"flights": {}}', "stream 'flights' must have its streamlets"),
        ('{"flights": {"x": -2}}', "streamlet 'x': a streamlet is a number"),
        ('{"flights": {"-1": -2}}', "streamlet '-1': a streamlet is a number"),
        ('{"flights": {"0": -2, "00": -2}}', "streamlet '00': is named twice"),
        ('{"flights": {"0": 17}}', "streamlet '0': 17 is not a position: use earliest, latest or"),
        ('{"flights": {"0": true}}', "true is not a position"),
        ('{"flights": {"0": [1, 2, 3]}}', "1 is not a position"),
        ('{"flights": {"0": [[1, 2]]}}', r"\[1, 2\] is not a position"),
        ('{"flights": {"0": [[1, 2, -3]]}}', r"\[1, 2, -3\] is not a position"),
        ('{"flights": {"0": ["soon"]}}', '"soon" is not a position'),
        (f'{{"flights": {{"0": [[1, 2, {1 << 64}]]}}}}', "is not a position"),
        (f'{{"flights": {{"0": [[1, 2, 3, {1 << 64}]]}}}}', "is not a position"),
        ('{"version": 2, "streams": {"flights": {"streamlets": {"0": [[1, 2, 3, 4]]}}}}', "has no stream_id"),
    ],
)
def test_the_error_for_an_invalid_position_names_the_option_the_text_and_the_form(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse_where("startingOffsets", text)

    assert str(caught.value).startswith("option startingOffsets: ")
    assert repr(text) in str(caught.value)
    assert caught.value.attributes == {"option": "startingOffsets", "value": text}


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("0", Time(epoch_us=0)),
        ("1735689600000", Time(epoch_us=1_735_689_600_000_000)),
        ("2025-01-01", Time(epoch_us=1_735_689_600_000_000)),
        ("2025-01-01T00:00:00", Time(epoch_us=1_735_689_600_000_000)),
        ("2025-01-01T00:00:00Z", Time(epoch_us=1_735_689_600_000_000)),
        ("2025-01-01 01:00:00.000001+01:00", Time(epoch_us=1_735_689_600_000_001)),
        ("1969-12-31T00:00:00Z", Time(epoch_us=-DAY_US)),
        ("-30s", Time(ago_us=30 * 10**6)),
        (" -15m ", Time(ago_us=900 * 10**6)),
        ("-2h", Time(ago_us=7200 * 10**6)),
        ("-1D", Time(ago_us=DAY_US)),
        ("-500ms", Time(ago_us=500_000)),
    ],
)
def test_times_are_milliseconds_iso_8601_or_relative_to_now(text: str, time: Time) -> None:
    assert parse_time("startingTimestamp", text) == time


@pytest.mark.parametrize(
    "text", ["", "soon", "-5", "-5 parsecs", "1e3", "2025-13-01", "--1d", "-", str(EPOCH_MS_MAX + 1), "-999999999999w"]
)
def test_the_error_for_an_invalid_time_says_how_to_write_one(text: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"option startingTimestamp: .* is not a time: use milliseconds.*ISO-8601.*-15m"
    ):
        parse_time("startingTimestamp", text)


def test_a_relative_time_counts_back_from_now() -> None:
    assert Time(ago_us=5).at(100) == 95
    assert Time(epoch_us=5).at(100) == 5


def test_times_per_streamlet_are_numbers_or_strings() -> None:
    where = parse_times("startingOffsetsByTimestamp", '{"a": {"0": 1000, "1": "-15m"}, "b": {"0": "1970-01-01"}}')

    assert where.streams == {
        "a": {0: Time(epoch_us=10**6), 1: Time(ago_us=900 * 10**6)},
        "b": {0: Time(epoch_us=0)},
    }
    assert where.by_time


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latest", "must be a JSON object"),
        ("1000", "must have the form"),
        ('{"a": 1000}', "stream 'a' must have its streamlets"),
        ('{"a": {"0": true}}', "stream 'a', streamlet '0': true is not a time"),
        ('{"a": {"0": -5}}', "-5 is not a time"),
        ('{"a": {"0": null}}', "null is not a time"),
    ],
)
def test_invalid_times_per_streamlet_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"option endingOffsetsByTimestamp: .*{words}"):
        parse_times("endingOffsetsByTimestamp", text)


@given(st.text())
def test_any_text_is_a_time_or_gives_the_documented_error(text: str) -> None:
    try:
        parsed = parse_time("startingTimestamp", text)
    except InvalidArgument as error:
        assert "is not a time" in str(error)  # noqa: PT017  # most texts are none
    else:
        assert (parsed.epoch_us is None) != (parsed.ago_us is None)


def test_spans_need_a_unit() -> None:
    assert [span_ms(text) for text in ("5ms", "10s", "5m", "5 min", "1H", "2d")] == [
        5,
        10_000,
        300_000,
        300_000,
        3_600_000,
        172_800_000,
    ]
    assert [span_ms(text) for text in ("5", "s", "", "-5s", "5y", "0.5ms")] == [None] * 6
