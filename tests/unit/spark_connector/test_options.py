"""Options are checked before anything runs, and an error says how to get out."""

import pytest

from kera.core.errors import InvalidArgument
from kera.core.ids import Position
from kera.spark_connector.offsets import EARLIEST_PLACES, LATEST_PLACES
from kera.spark_connector.options import KNOWN, KeraOptions, parse_options

NEEDED = {"kera.bootstrap.servers": "127.0.0.1:7400", "subscribe": "flights"}


def parse(**more: str) -> KeraOptions:
    return parse_options({**NEEDED, **more})


def test_defaults_are_those_of_the_kafka_source() -> None:
    options = parse()

    assert options.stream == "flights"
    assert options.batch_starting == EARLIEST_PLACES
    assert options.batch_ending == LATEST_PLACES
    assert options.stream_starting == LATEST_PLACES
    assert options.records_per_trigger_max is None


def test_names_are_taken_in_any_case_as_spark_hands_them_over_in_lower_case() -> None:
    assert parse(maxoffsetspertrigger="10").records_per_trigger_max == 10
    assert parse(MAXOffsetsPerTrigger="10").records_per_trigger_max == 10


def test_the_stream_may_be_the_path_given_to_load() -> None:
    assert parse_options({"kera.bootstrap.servers": "h:1", "path": "flights"}).stream == "flights"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "flights"}, "kera.bootstrap.servers is missing"),
        ({"kera.bootstrap.servers": "h:1"}, "name the stream once"),
        ({**NEEDED, "path": "flights"}, "name the stream once"),
        ({**NEEDED, "subscribe": "a,b"}, "one stream per DataFrame"),
        ({**NEEDED, "maxOffsetsPerTrigger": "0"}, "whole number from 1"),
        ({**NEEDED, "maxOffsetsPerTrigger": "many"}, "whole number from 1"),
        ({**NEEDED, "startingOffsets": "soon"}, "startingOffsets: must be 'earliest', 'latest' or a JSON object"),
    ],
)
def test_a_wrong_option_is_named_with_what_it_should_be(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_options(options)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("startingOffset", "startingOffsets"),
        ("starting_offsets", "startingOffsets"),
        ("bootstrap.servers", "kera.bootstrap.servers"),
        ("kafka.bootstrap.servers", "kera.bootstrap.servers"),
        ("suscribe", "subscribe"),
        ("maxOffsetPerTriger", "maxOffsetsPerTrigger"),
    ],
)
def test_an_unknown_option_gets_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(InvalidArgument, match=f"unknown option {typed}: did you mean {meant}\\?"):
        parse(**{typed: "x"})


def test_an_option_like_no_other_gets_the_list_of_all() -> None:
    with pytest.raises(InvalidArgument, match="known are") as caught:
        parse(zzz="1")

    assert all(name in str(caught.value) for name in KNOWN)


def test_what_makes_no_sense_in_a_batch_query_is_refused() -> None:
    for wrong in ({"startingOffsets": "latest"}, {"endingOffsets": "earliest"}, {"maxOffsetsPerTrigger": "1"}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            parse(**wrong).check_batch()
    parse(startingOffsets="earliest", endingOffsets="latest").check_batch()


def test_a_streaming_query_has_no_end() -> None:
    with pytest.raises(InvalidArgument, match="endingOffsets"):
        parse(endingOffsets="latest").check_streaming()
    parse(startingOffsets="earliest", maxOffsetsPerTrigger="5").check_streaming()


def test_offsets_in_json_have_the_shape_of_kafkas() -> None:
    starting = parse(startingOffsets='{"flights": {"0": -2, "1": [[1, 2, 64], "latest"]}}').starting

    assert starting is not None
    assert starting.streamlets == {0: "earliest", 1: (Position(1, 2, 64), "latest")}
