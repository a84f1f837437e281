"""Options for reading: their checks, and errors that name the option, its value and the way out."""

import json
from typing import Any

import pytest

from kera.core.base.ids import Position
from kera.core.errors import InvalidArgument, StreamletOutOfRange, UnknownStream
from kera.spark_connector.options.epochs import EPOCHS_TOLD_MAX
from kera.spark_connector.options.names import READING
from kera.spark_connector.options.reading import ReadOptions, parse_read_options
from kera.spark_connector.options.subscription import Subscription
from kera.spark_connector.options.values import choice, duration_ms, flag, take, whole_number
from kera.spark_connector.planning.admission import BatchLimits
from kera.spark_connector.planning.epochs import Cadence
from kera.spark_connector.planning.places import Time, Where

BOOTSTRAP = {"kera.bootstrap.servers": "127.0.0.1:7400"}
NEEDED = {**BOOTSTRAP, "subscribe": "flights"}
OFFSETS = '{"flights": {"0": -2}}'
TIMES = '{"flights": {"0": 1000}}'


def parse(**more: str) -> ReadOptions:
    return parse_read_options({**NEEDED, **more})


def reads(**which: str) -> Subscription:
    return parse_read_options({**BOOTSTRAP, **which}).subscription


# --- names --------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_kafka_source() -> None:
    options = parse()

    assert options.connection.bootstrap == "127.0.0.1:7400"
    assert options.subscription == Subscription(names=("flights",))
    assert options.batch_starting == Where("startingOffsets", "earliest")
    assert options.batch_ending == Where("endingOffsets", "latest")
    assert options.stream_starting == Where("startingOffsets", "latest")
    assert options.limits == BatchLimits(None, None, None, 900_000)
    assert (options.partitions_min, options.records_per_partition_max) == (None, None)
    assert (options.fail_on_data_loss, options.include_headers) == (True, False)
    assert (options.group_id, options.group_id_prefix) == (None, "spark-kera-source")
    assert (options.shared_memory, options.metadata, options.engine) == ("auto", None, "auto")


def test_every_option_is_accepted() -> None:
    options = parse(
        maxOffsetsPerTrigger="1000",
        maxBytesPerTrigger="5000000",
        minOffsetsPerTrigger="10",
        maxTriggerDelay="5m",
        latencyTarget="2s",
        minPartitions="8",
        maxRecordsPerPartition="100",
        failOnDataLoss="false",
        includeHeaders="TRUE",
        groupIdPrefix="reports",
        sharedMemory="Never",
    )

    assert options.limits == BatchLimits(1000, 5_000_000, 10, 300_000, 2_000)
    assert (options.partitions_min, options.records_per_partition_max) == (8, 100)
    assert (options.fail_on_data_loss, options.include_headers) == (False, True)
    assert (options.group_id_prefix, options.shared_memory) == ("reports", "never")
    assert options.given == {*NEEDED} | {
        "maxOffsetsPerTrigger",
        "maxBytesPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "latencyTarget",
        "minPartitions",
        "maxRecordsPerPartition",
        "failOnDataLoss",
        "includeHeaders",
        "groupIdPrefix",
        "sharedMemory",
    }


def test_option_names_are_accepted_in_any_case() -> None:
    assert parse(maxoffsetspertrigger="10").limits.records_max == 10
    assert parse(MAXOffsetsPerTrigger="10").limits.records_max == 10


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("startingOffset", "startingOffsets"),
        ("starting_offsets", "startingOffsets"),
        ("startingTimestamps", "startingTimestamp"),
        ("bootstrap.servers", "kera.bootstrap.servers"),
        ("kafka.bootstrap.servers", "kera.bootstrap.servers"),
        ("kafka.group.id", "kera.group.id"),
        ("suscribe", "subscribe"),
        ("subscribe_pattern", "subscribePattern"),
        ("maxOffsetPerTriger", "maxOffsetsPerTrigger"),
        ("failOnDataloss ", "failOnDataLoss"),
        ("minPartition", "minPartitions"),
        ("shared_memory", "sharedMemory"),
    ],
)
def test_an_unknown_option_gets_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(InvalidArgument, match=f"unknown option {typed}: did you mean {meant}\\?"):
        parse(**{typed: "x"})


@pytest.mark.parametrize("name", READING)
def test_a_name_with_a_missing_letter_gets_the_right_suggestion(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"unknown option .*: did you mean") as caught:
        parse(**{name[:-1]: "x"})

    assert f"did you mean {name}?" in str(caught.value)


def test_the_error_for_an_option_without_a_similar_name_lists_all_options() -> None:
    with pytest.raises(InvalidArgument, match="unknown option zzz: known are") as caught:
        parse(zzz="1")

    assert all(name in str(caught.value) for name in READING)


@pytest.mark.parametrize("name", ["stream", "txnAppId", "TXNVERSION"])
def test_the_error_for_a_write_option_says_that_it_is_for_writing(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"does not apply here: .*(for writing|to write to)") as caught:
        parse(**{name: "x"})

    assert caught.value.attributes["option"].lower() == name.lower()


def test_options_from_elsewhere_are_refused_with_a_given_hint() -> None:
    assert take({"STREAM": "a"}, ("stream",)) == {"stream": "a"}
    with pytest.raises(InvalidArgument, match="option subscribe does not apply here: use stream"):
        take({"Subscribe": "a"}, ("stream",), elsewhere={"subscribe": "use stream"})


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "flights"}, "option kera.bootstrap.servers is missing: .*as in 127.0.0.1:7400"),
        ({**NEEDED, "kera.bootstrap.servers": " "}, "option kera.bootstrap.servers is missing"),
        (
            {**NEEDED, "maxOffsetsPerTrigger": "0"},
            "option maxOffsetsPerTrigger: must be a whole number from 1; it is '0'",
        ),
        ({**NEEDED, "maxOffsetsPerTrigger": "many"}, "whole number from 1; it is 'many'"),
        ({**NEEDED, "maxBytesPerTrigger": "1.5"}, "option maxBytesPerTrigger: must be a whole number"),
        ({**NEEDED, "minOffsetsPerTrigger": "-1"}, "option minOffsetsPerTrigger: must be a whole number"),
        ({**NEEDED, "minPartitions": "²"}, "option minPartitions: must be a whole number"),
        ({**NEEDED, "maxRecordsPerPartition": ""}, "option maxRecordsPerPartition: must be a whole number"),
        (
            {**NEEDED, "maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"},
            "option minOffsetsPerTrigger: must be at most maxOffsetsPerTrigger, which is 5; it is '6'",
        ),
        ({**NEEDED, "minOffsetsPerTrigger": "6", "maxTriggerDelay": "10"}, "number with a unit.*as in 10s; it is '10'"),
        (
            {**NEEDED, "maxTriggerDelay": "10s"},
            "option maxTriggerDelay: is for minOffsetsPerTrigger, which is not given",
        ),
        ({**NEEDED, "latencyTarget": "2"}, "option latencyTarget: must be a number with a unit"),
        ({**NEEDED, "latencyTarget": "0s"}, "latencyTarget: must be at least 100ms.*trigger.realTime.*; it is '0s'"),
        ({**NEEDED, "latencyTarget": "2s", "epoch": "10s"}, "option latencyTarget: .*with epoch they .*leave it out"),
        ({**NEEDED, "maxOffsetsPerTrigger": "2", "epoch": "10s"}, "option maxOffsetsPerTrigger: .*maxEpochsPerTrigger"),
        ({**NEEDED, "latencyTarget": "-1s"}, "option latencyTarget: must be a number with a unit.*it is '-1s'"),
        ({**NEEDED, "latencyTarget": "1ms"}, "latencyTarget: must be at least 100ms.*it is '1ms'"),
        ({**NEEDED, "latencyTarget": "99999999999h"}, "option latencyTarget: must be at most a day"),
        ({**NEEDED, "maxRecordsPerTrigger": "5"}, "unknown option maxRecordsPerTrigger: did you mean maxOffsetsPer"),
        ({**NEEDED, "lingerMs": "5"}, "unknown option lingerMs: did you mean latencyTarget"),
        ({**NEEDED, "latencyTarget": "25h"}, "option latencyTarget: must be at most a day; it is '25h'"),
        ({**NEEDED, "failOnDataLoss": "no"}, "option failOnDataLoss: must be true or false; it is 'no'"),
        ({**NEEDED, "includeHeaders": "yes"}, "option includeHeaders: must be true or false; it is 'yes'"),
        ({**NEEDED, "sharedMemory": "nevr"}, "auto or always or never: did you mean never\\?; it is 'nevr'"),
        ({**NEEDED, "metadata": "stream"}, "streams or partitions: did you mean streams\\?; it is 'stream'"),
        ({**NEEDED, "kera.group.id": "a b"}, "option kera.group.id: must be 1 to 200 letters.*; it is 'a b'"),
        ({**NEEDED, "kera.group.id": ".."}, "option kera.group.id: must be"),
        ({**NEEDED, "groupIdPrefix": "x" * 192}, "option groupIdPrefix: must be 1 to 191 letters"),
        (
            {**NEEDED, "groupIdPrefix": "a", "kera.group.id": "b"},
            "option groupIdPrefix: has no meaning where kera.group.id gives the whole name",
        ),
        (
            {**NEEDED, "startingOffsets": "soon"},
            "option startingOffsets: must be 'earliest', 'latest' or a JSON object",
        ),
        ({**NEEDED, "startingTimestamp": "soon"}, 'option startingTimestamp: "soon" is not a time'),
        ({**NEEDED, "endingOffsetsByTimestamp": "1000"}, "option endingOffsetsByTimestamp: must have the form"),
        (
            {**NEEDED, "startingOffsetsByTimestampStrategy": "latest"},
            "option startingOffsetsByTimestampStrategy: is for startingTimestamp and startingOffsetsByTimestamp",
        ),
        (
            {**NEEDED, "startingOffsets": "earliest", "startingOffsetsByTimestampStrategy": "latest"},
            "option startingOffsetsByTimestampStrategy: is for",
        ),
        (
            {**NEEDED, "startingTimestamp": "0", "startingOffsetsByTimestampStrategy": "earliest"},
            "option startingOffsetsByTimestampStrategy: must be error or latest.*; it is 'earliest'",
        ),
    ],
)
def test_the_error_for_a_wrong_value_says_what_is_expected(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse_read_options(options)

    assert caught.value.attributes["option"] in str(caught.value)


def test_values_are_accepted_in_any_case_and_with_spaces() -> None:
    assert whole_number("n", " 12 ") == 12
    assert (flag("f", "True"), flag("f", " false ")) == (True, False)
    assert choice("c", "AUTO", ("auto", "never")) == "auto"
    assert duration_ms("d", "10s") == 10_000


# --- subscribed streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "subscription"),
    [
        ({"subscribe": "b, a,,b"}, Subscription(names=("a", "b"))),
        ({"path": "flights"}, Subscription(names=("flights",))),
        ({"subscribePattern": "fl.*"}, Subscription(pattern="fl.*")),
        ({"assign": '{"a": [2, 0, 2], "b": [1]}'}, Subscription(assign={"a": (0, 2), "b": (1,)})),
        ({"metadata": "streams"}, Subscription(pattern=".*", may_be_empty=True)),
        ({"metadata": "streams", "subscribePattern": "a.*"}, Subscription(pattern="a.*", may_be_empty=True)),
        ({"metadata": "streams", "subscribe": "a"}, Subscription(names=("a",))),
    ],
)
def test_streams_can_be_named_in_each_of_four_ways(which: dict[str, str], subscription: Subscription) -> None:
    assert reads(**which) == subscription


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ({}, r"exactly one of subscribe, subscribePattern, assign, or .load\(\"name\"\); none is given"),
        ({"metadata": "partitions"}, "none is given"),
        ({"subscribe": "a", "path": "b"}, "exactly one of .*; given are path, subscribe"),
        ({"subscribe": "a", "subscribePattern": "b"}, "given are subscribe, subscribePattern"),
        ({"subscribePattern": "a", "assign": "{}"}, "given are assign, subscribePattern"),
        ({"subscribe": " , "}, "option subscribe: names no stream; it is ','"),
        ({"path": "a,b"}, "load takes one stream; for several use option subscribe"),
        ({"subscribePattern": "a("}, r"option subscribePattern: is not a regular expression .*; it is 'a\('"),
        ({"subscribePattern": ""}, r"option subscribePattern: is empty; \.\* fits every name"),
        ({"assign": "a"}, r'option assign: must have the form {"stream": \[0, 1\]}; it is \'a\''),
        ({"assign": "[]"}, "option assign: must have the form"),
        ({"assign": "{}"}, "option assign: must have the form"),
        ({"assign": '{"a": []}'}, "stream 'a' has no list of streamlets"),
        ({"assign": '{"a": 0}'}, "stream 'a' has no list of streamlets"),
        ({"assign": '{"a": ["0"]}'}, "a streamlet of 'a' is not a number from 0"),
        ({"assign": '{"a": [true]}'}, "a streamlet of 'a' is not a number from 0"),
        ({"assign": '{"a": [-1]}'}, "a streamlet of 'a' is not a number from 0"),
    ],
)
def test_streams_must_be_named_in_exactly_one_way(which: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        reads(**which)


def test_a_pattern_selects_the_streams_whose_whole_name_matches() -> None:
    subscription = reads(subscribePattern="fl.*|trains")

    assert subscription.select(["trains", "flights", "old-flights", "trains2", "fl"]) == ["fl", "flights", "trains"]
    assert subscription.missing(["boats"]) == []
    with pytest.raises(UnknownStream, match=r"no stream fits the pattern 'fl\.\*\|trains'.*there are boats"):
        subscription.require(["boats"])


def test_listing_streams_may_find_none() -> None:
    assert reads(metadata="streams").require([]) == []
    with pytest.raises(UnknownStream, match="no stream is called 'flights'"):
        reads(metadata="streams", subscribe="flights").require([])


def test_named_streams_that_do_not_exist_are_reported() -> None:
    for subscription in (reads(subscribe="flights,trains"), reads(assign='{"flights": [0], "trains": [0]}')):
        assert subscription.select(["boats", "flights"]) == ["flights"]
        assert subscription.missing(["boats", "flights"]) == ["trains"]
        assert subscription.require(["flights", "trains", "boats"]) == ["flights", "trains"]
        with pytest.raises(UnknownStream, match="no stream is called 'trains': did you mean train\\?") as caught:
            subscription.require(["flights", "train"])
        assert caught.value.attributes == {"stream": "trains"}


def test_only_the_assigned_streamlets_are_selected() -> None:
    subscription = reads(assign='{"flights": [3, 1]}')

    assert subscription.streamlets("flights", range(4)) == [1, 3]
    assert reads(subscribe="flights").streamlets("flights", range(2)) == [0, 1]
    with pytest.raises(StreamletOutOfRange, match="option assign: stream 'flights' has no streamlet 3; it has 0 to 2"):
        subscription.streamlets("flights", range(3))


# --- starts and ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "offsets"), [("starting", "batch_starting"), ("ending", "batch_ending")])
def test_one_timestamp_overrides_timestamps_per_streamlet_and_these_override_offsets(begin: str, offsets: str) -> None:
    options = {f"{begin}Offsets": OFFSETS, f"{begin}OffsetsByTimestamp": TIMES, f"{begin}Timestamp": "2000"}

    where: Where = getattr(parse(**options), offsets)
    assert (where.option, where.everywhere) == (f"{begin}Timestamp", Time(epoch_us=2_000_000))
    del options[f"{begin}Timestamp"]
    where = getattr(parse(**options), offsets)
    assert (where.option, where.streams) == (f"{begin}OffsetsByTimestamp", {"flights": {0: Time(epoch_us=10**6)}})
    del options[f"{begin}OffsetsByTimestamp"]
    where = getattr(parse(**options), offsets)
    assert (where.option, where.streams) == (f"{begin}Offsets", {"flights": {0: "earliest"}})


def test_an_overridden_option_is_still_checked() -> None:
    with pytest.raises(InvalidArgument, match="option startingOffsets: must be"):
        parse(startingTimestamp="0", startingOffsets="soon")


def test_a_start_time_behind_the_end_is_an_error_unless_the_strategy_is_latest() -> None:
    assert parse(startingTimestamp="0").stream_starting.behind == "error"
    assert parse(startingOffsetsByTimestamp=TIMES).stream_starting.behind == "error"
    latest = parse(startingTimestamp="0", startingOffsetsByTimestampStrategy="Latest")
    assert latest.stream_starting.behind == "latest"
    assert parse(endingTimestamp="0").batch_ending.behind == "latest"


def test_offsets_in_json_have_the_form_of_kafka() -> None:
    starting = parse(startingOffsets='{"flights": {"0": -2, "1": [[1, 2, 64], "latest"]}}').stream_starting

    assert starting.streams == {"flights": {0: "earliest", 1: [Position(1, 2, 64), "latest"]}}


@pytest.mark.parametrize("option", ["startingOffsets", "startingOffsetsByTimestamp", "endingOffsets"])
@pytest.mark.parametrize(
    ("which", "named", "words"),
    [
        ({"subscribe": "flights"}, {"flihgts": {"0": -1}}, "'flihgts', which is not subscribed: did you mean flights"),
        ({"subscribe": "flights,trains"}, {"flights": {"0": -1}}, "must name every stream .*it leaves out trains"),
        ({"subscribePattern": "fl.*"}, {"trains": {"0": -1}}, "'trains', which is not subscribed"),
        ({"assign": '{"a": [0, 2]}'}, {"a": {"0": -1}}, r"stream 'a' has \[0, 2\], the option names \[0\]"),
        ({"assign": '{"a": [0]}'}, {"a": {"0": -1, "1": -1}}, r"has \[0\], the option names \[0, 1\]"),
    ],
)
def test_json_must_name_the_subscribed_streams_and_streamlets(
    option: str, which: dict[str, str], named: dict[str, Any], words: str
) -> None:
    if "Timestamp" in option:
        named = {stream: dict.fromkeys(streamlets, 1000) for stream, streamlets in named.items()}

    with pytest.raises(InvalidArgument, match=f"option {option}: .*{words}"):
        parse_read_options({**BOOTSTRAP, **which, option: json.dumps(named)})


def test_streams_of_a_pattern_need_not_be_named_in_json() -> None:
    options = parse_read_options(
        {**BOOTSTRAP, "subscribePattern": ".*", "startingOffsets": OFFSETS, "endingOffsets": OFFSETS}
    )

    assert (options.batch_starting.unnamed, options.batch_ending.unnamed) == ("earliest", "latest")
    assert parse(startingOffsets=OFFSETS).batch_starting.unnamed is None


# --- batch and streaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"startingOffsets": "latest"}, "option startingOffsets: a batch query cannot start at latest"),
        ({"endingOffsets": "earliest"}, "option endingOffsets: a batch query cannot end at earliest"),
        ({"maxOffsetsPerTrigger": "1"}, "option maxOffsetsPerTrigger: bounds the micro-batches .*leave it out"),
        ({"maxBytesPerTrigger": "1"}, "option maxBytesPerTrigger: bounds the micro-batches .*spark.readStream"),
        ({"minOffsetsPerTrigger": "1"}, "option minOffsetsPerTrigger: bounds the micro-batches"),
        ({"minOffsetsPerTrigger": "1", "maxTriggerDelay": "1s"}, "option (min|maxTrigger)"),
        ({"latencyTarget": "2s"}, "option latencyTarget: paces the micro-batches .*leave it out"),
        ({"kera.group.id": "a"}, "option kera.group.id: names the cursor that a streaming query stores"),
        ({"groupIdPrefix": "a"}, "option groupIdPrefix: names the cursor"),
        ({"metadata": "streams", "minPartitions": "3"}, "option minPartitions: has no meaning with metadata=streams"),
        (
            {"metadata": "streams", "startingOffsets": "earliest"},
            "option startingOffsets: has no meaning with metadata",
        ),
    ],
)
def test_options_without_meaning_in_a_batch_query_are_refused(wrong: dict[str, str], words: str) -> None:
    options = parse(**wrong)

    with pytest.raises(InvalidArgument, match=words):
        options.check_batch()


def test_options_with_a_meaning_in_a_batch_query_are_accepted() -> None:
    parse(
        startingOffsets="earliest", endingOffsets="latest", minPartitions="9", maxRecordsPerPartition="9"
    ).check_batch()
    parse(startingTimestamp="-2h", endingTimestamp="-1h", failOnDataLoss="false", sharedMemory="always").check_batch()
    parse(metadata="partitions", startingOffsets="earliest", includeHeaders="true").check_batch()
    parse(metadata="streams").check_batch()
    parse(startingOffsets="latest", startingTimestamp="0").check_batch()  # the time overrides the offsets


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endingOffsets", "latest"),
        ("endingOffsetsByTimestamp", TIMES),
        ("endingTimestamp", "0"),
        ("metadata", "partitions"),
    ],
)
def test_options_without_meaning_in_a_streaming_query_are_refused(name: str, value: str) -> None:
    options = parse(**{name: value})

    with pytest.raises(InvalidArgument, match=f"option {name}: .*leave it out, or read a batch with spark.read"):
        options.check_streaming()


def test_options_with_a_meaning_in_a_streaming_query_are_accepted() -> None:
    parse(startingOffsets="latest", maxOffsetsPerTrigger="5", minPartitions="3", groupIdPrefix="a").check_streaming()
    parse(minOffsetsPerTrigger="5", maxTriggerDelay="1h", maxRecordsPerPartition="3").check_streaming()
    parse(**{"kera.group.id": "reports", "maxBytesPerTrigger": "9"}).check_streaming()


def test_the_name_of_the_cursor_is_the_given_the_stored_or_a_new_one() -> None:
    assert parse(**{"kera.group.id": "reports"}).group("spark-kera-source-0", "1a2b3c4d") == "reports"
    assert parse().group("spark-kera-source-0", "1a2b3c4d") == "spark-kera-source-0"
    assert parse(groupIdPrefix="reports").group("", "1a2b3c4d") == "reports-1a2b3c4d"
    assert parse().group("", "1a2b3c4d") == "spark-kera-source-1a2b3c4d"


# --- the engine ---------------------------------------------------------------------------------------------


def test_python_refuses_the_columnar_engine_and_says_how_to_load_it() -> None:
    with pytest.raises(InvalidArgument, match="option engine: the columnar engine is not on") as caught:
        parse(engine="columnar").check_engine()
    assert "kera.spark_connector.configure(builder)" in caught.value.message
    assert "--jars $(python -m kera.spark_connector jar)" in caught.value.message

    for engine in ("auto", "python", "Python"):
        parse(engine=engine).check_engine()
    parse(metadata="partitions", engine="columnar").check_engine()  # Python always serves metadata


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="option engine: must be auto or python or columnar: did you mean"):
        parse(engine="columns")


# --- streams with other columns -------------------------------------------------------------------------------------


def test_the_handling_of_streams_with_other_columns_is_an_option() -> None:
    assert parse().on_mismatch == "fail"
    assert [parse(onSchemaMismatch=word).on_mismatch for word in ("skip", "Bytes")] == ["skip", "bytes"]
    with pytest.raises(InvalidArgument, match="option onSchemaMismatch: must be fail or skip or bytes"):
        parse(onSchemaMismatch="ignore")


def test_the_columnar_engine_refuses_to_read_whole_chunks() -> None:
    with pytest.raises(InvalidArgument, match="option engine: with onSchemaMismatch=bytes Python reads"):
        parse(onSchemaMismatch="bytes", engine="columnar")
    assert parse(onSchemaMismatch="bytes", engine="python").on_mismatch == "bytes"


# --- epochs -------------------------------------------------------------------------------------------------


def test_options_of_epochs_are_accepted() -> None:
    assert parse().cadence is None
    assert parse(epoch="10s").cadence == Cadence(10_000)
    assert parse(epoch="1m", maxEpochsPerTrigger="6").cadence == Cadence(60_000, at_most=6)
    told = parse(epoch="500ms", epochsPerTrigger="2", includeEpoch="true")
    assert told.cadence == Cadence(500, exactly=2, at_most=EPOCHS_TOLD_MAX)
    assert told.include_epoch
    assert parse(epoch="10s", includeEpoch="true").cadence == Cadence(10_000, at_most=EPOCHS_TOLD_MAX)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": "ten"}, "option epoch: must be a number with a unit"),
        ({"epoch": "0s"}, "option epoch: must be from 1ms to 366d; it is '0s'"),
        ({"epoch": "367d"}, "option epoch: must be from 1ms to 366d; it is '367d'"),
        ({"epochsPerTrigger": "2"}, "option epochsPerTrigger: is for epoch, which is not given"),
        ({"maxEpochsPerTrigger": "2"}, "option maxEpochsPerTrigger: is for epoch, which is not given"),
        ({"includeEpoch": "true"}, "option includeEpoch: is for epoch, which is not given"),
        ({"epoch": "1s", "epochsPerTrigger": "0"}, "option epochsPerTrigger: must be a whole number from 1"),
        (
            {"epoch": "1s", "epochsPerTrigger": "2", "maxEpochsPerTrigger": "2"},
            "option maxEpochsPerTrigger: has no meaning where epochsPerTrigger says how many",
        ),
        ({"epoch": "1s", "maxOffsetsPerTrigger": "2"}, "option maxOffsetsPerTrigger: counts what happens to be there"),
        ({"epoch": "1s", "maxBytesPerTrigger": "2"}, "option maxBytesPerTrigger: counts what happens to be there"),
        ({"epoch": "1s", "minOffsetsPerTrigger": "2"}, "option minOffsetsPerTrigger: counts what happens to be there"),
        (
            {"epoch": "1s", "epochsPerTrigger": "257", "includeEpoch": "true"},
            "option epochsPerTrigger: with includeEpoch must be at most 256; it is '257'",
        ),
        (
            {"epoch": "1s", "startingTimestamp": "0", "startingOffsetsByTimestampStrategy": "latest"},
            "option startingOffsetsByTimestampStrategy: has no meaning with epoch",
        ),
    ],
)
def test_wrong_or_contradicting_options_of_epochs_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("option", ["epochsPerTrigger", "maxEpochsPerTrigger", "includeEpoch"])
def test_a_batch_query_refuses_epochs(option: str) -> None:
    options = parse(epoch="1s", **{option: "true" if option == "includeEpoch" else "1"})
    with pytest.raises(InvalidArgument, match="this is a batch query"):
        options.check_batch()
