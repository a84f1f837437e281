"""Options for writing, and the errors about them."""

import pytest

from kera.core.errors import InvalidArgument
from kera.spark_connector.connection import Connection
from kera.spark_connector.options.writing import VERSION_MAX, WriteOptions, parse_write_options

SERVERS = {"kera.bootstrap.servers": "127.0.0.1:7400"}


def parse(**options: str) -> WriteOptions:
    return parse_write_options({**SERVERS, **options})


def test_the_stream_is_an_option_or_the_argument_of_save_or_neither() -> None:
    assert parse(stream="clicks").stream == "clicks"
    assert parse(path="clicks").stream == "clicks"
    assert parse().stream is None
    assert parse(path="  ").stream is None


def test_option_names_are_accepted_in_any_case() -> None:
    assert parse_write_options({"KERA.BOOTSTRAP.SERVERS": "a:1", "STREAM": "s"}) == WriteOptions(
        Connection("a:1"), "s", None, 0
    )


def test_options_that_spark_adds_are_ignored() -> None:
    assert parse(checkpointlocation="/tmp/c", queryname="q", stream="s").stream == "s"


def test_a_transaction_has_an_id_and_a_version() -> None:
    options = parse(txnAppId="daily", txnVersion="20240131")

    assert (options.app_id, options.version) == ("daily", 20240131)
    assert parse(txnAppId="daily", txnVersion="0").version == 0


def test_a_latency_target_is_a_span_of_time() -> None:
    assert parse(stream="s").latency_target_ms is None
    assert parse(stream="s", latencyTarget="200ms").latency_target_ms == 200
    assert parse(stream="s", LATENCYTARGET="1d").latency_target_ms == 24 * 3_600_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latencyTarget": "0s"}, "latencyTarget: must be at least 10ms"),
        ({"latencyTarget": "-1s"}, "latencyTarget: must be a number with a unit"),
        ({"latencyTarget": "2"}, "latencyTarget: must be a number with a unit"),
        ({"latencyTarget": "1ms"}, "latencyTarget: must be at least 10ms, as storing takes some of it; it is '1ms'"),
        ({"latencyTarget": "99999999999h"}, "latencyTarget: must be at most a day"),
        ({"stream": "a", "path": "b"}, "name the stream once"),
        ({"txnAppId": "a"}, "txnVersion is missing"),
        ({"txnVersion": "1"}, "txnAppId is missing"),
        ({"txnAppId": "a", "txnVersion": "-1"}, f"whole number from 0 to {VERSION_MAX}; it is '-1'"),
        ({"txnAppId": "a", "txnVersion": str(VERSION_MAX + 1)}, "whole number from 0"),
        ({"txnAppId": "a", "txnVersion": "one"}, "it is 'one'"),
        ({"steam": "a"}, "unknown option steam: did you mean stream?"),
        ({"subscribe": "a"}, "option subscribe does not apply here: is for reading; to write, use stream"),
        ({"startingoffsets": "earliest"}, "option startingOffsets does not apply here: is for reading"),
        ({"kera.bootstrap.servers": " "}, "option kera.bootstrap.servers is missing"),
    ],
)
def test_the_error_for_a_wrong_option_says_how_to_correct_it(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse(**options)

    assert message in raised.value.message


def test_the_engine_is_one_of_three_and_the_columnar_one_needs_its_jar() -> None:
    assert parse().engine == "auto"
    for engine in ("auto", "Python"):
        parse(engine=engine).check_engine()
    with pytest.raises(InvalidArgument, match="option engine: must be auto or python or columnar; it is 'jvm'"):
        parse(engine="jvm")
    with pytest.raises(InvalidArgument, match="option engine: the columnar engine is not on Spark's class path"):
        parse(engine="columnar").check_engine()


def test_a_stream_is_never_overwritten() -> None:
    with pytest.raises(InvalidArgument, match=r'use \.mode\("append"\)'):
        parse().check_batch(overwrite=True)
    with pytest.raises(InvalidArgument, match="use append, or foreachBatch"):
        parse().check_streaming(overwrite=True)
    parse().check_batch(overwrite=False)
    parse().check_streaming(overwrite=False)


def test_a_streaming_query_refuses_a_transaction_id() -> None:
    options = parse(txnAppId="a", txnVersion="1")

    options.check_batch(overwrite=False)
    with pytest.raises(InvalidArgument, match="known by its checkpoint"):
        options.check_streaming(overwrite=False)
