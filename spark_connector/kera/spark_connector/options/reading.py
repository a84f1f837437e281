"""Options of the format ``kera`` for reading: their values, and which of them fit together.

Defaults and precedence are those of Spark's Kafka source where it has such an option. All checks that need no
connection happen here, when a DataFrame is made, so that a typo never reaches a running query. Spark passes option
names in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

from kera.spark_connector.connection import Connection
from kera.spark_connector.options.connecting import connection_of
from kera.spark_connector.options.engines import Engine, engine_of, not_loaded
from kera.spark_connector.options.epochs import cadence_of, tells_epoch
from kera.spark_connector.options.names import (
    ASSIGN,
    BYTES_MAX,
    CONNECTING,
    DELAY_MAX,
    ENDING,
    ENDING_BY_TIME,
    ENDING_TIME,
    ENGINE,
    EPOCH,
    EPOCH_COLUMN,
    EPOCHS_EXACTLY,
    EPOCHS_MAX,
    FAIL_ON_DATA_LOSS,
    GROUP,
    GROUP_PREFIX,
    HEADERS,
    LATENCY_TARGET,
    METADATA,
    ON_MISMATCH,
    PARTITION_RECORDS_MAX,
    PARTITIONS_MIN,
    PATH,
    PATTERN,
    READING,
    RECORDS_MAX,
    RECORDS_MIN,
    SHARED_MEMORY,
    STARTING,
    STARTING_BY_TIME,
    STARTING_TIME,
    STRATEGY,
    SUBSCRIBE,
)
from kera.spark_connector.options.places import parse_time, parse_times, parse_where
from kera.spark_connector.options.subscription import Subscription, subscription_of
from kera.spark_connector.options.values import (
    choice,
    did_you_mean,
    duration_ms,
    flag,
    listed,
    take,
    target_ms,
    whole_number,
    wrong,
)
from kera.spark_connector.planning.admission import DELAY_MAX_MS, BatchLimits
from kera.spark_connector.planning.epochs import Cadence
from kera.spark_connector.planning.places import Where

T = TypeVar("T")
D = TypeVar("D")

_STARTS = (STARTING_TIME, STARTING_BY_TIME, STARTING)
"""The first that is given counts."""
_ENDS = (ENDING_TIME, ENDING_BY_TIME, ENDING)
_OF_STREAMS = {
    **dict.fromkeys((RECORDS_MAX, BYTES_MAX, RECORDS_MIN, DELAY_MAX), "bounds the micro-batches of a streaming query"),
    **dict.fromkeys(
        (EPOCH, EPOCHS_MAX, EPOCHS_EXACTLY), "says with which epochs micro-batches of a streaming query end"
    ),
    EPOCH_COLUMN: "tells the epochs of the micro-batches of a streaming query",
    LATENCY_TARGET: "paces the micro-batches of a streaming query",
    **dict.fromkeys((GROUP, GROUP_PREFIX), "names the cursor that a streaming query stores"),
}
"""Options without a meaning in a batch query, and why."""
_OF_STREAM_LISTS = {*CONNECTING, METADATA, ENGINE, ON_MISMATCH, SUBSCRIBE, PATH, PATTERN, ASSIGN}
"""All options that ``metadata=streams`` uses."""
_OF_WRITING = {
    "stream": f"it names the stream to write to; to read one, use {SUBSCRIBE}",
    "txnAppId": "it is for writing",
    "txnVersion": "it is for writing",
}

LATENCY_TARGET_MIN_MS = 100
"""Even planning a micro-batch takes Spark longer than a smaller target."""

GROUP_PREFIX_DEFAULT = "spark-kera-source"
TOKEN_CHARS = 8
"""Random characters at the end of a cursor's name."""
GROUP_CHARS_MAX = 200
"""As for every consumer group; see the coordinator."""
_GROUP = re.compile(r"[A-Za-z0-9._-]+")

SharedMemory = Literal["auto", "always", "never"]
Metadata = Literal["streams", "partitions"]
OnMismatch = Literal["fail", "skip", "bytes"]
_AUTO: Literal["auto"] = "auto"
_FAIL: Literal["fail"] = "fail"


@dataclass(frozen=True)
class ReadOptions:
    """The options of a reading query; see the table in docs/spark.md."""

    connection: Connection
    subscription: Subscription
    starting: Where | None
    """None: not given. Use `batch_starting` or `stream_starting`."""
    ending: Where | None
    """None: not given. Use `batch_ending`."""
    limits: BatchLimits
    cadence: Cadence | None
    """How micro-batches end with epochs; None: they end anywhere."""
    include_epoch: bool
    partitions_min: int | None
    records_per_partition_max: int | None
    fail_on_data_loss: bool
    include_headers: bool
    group_id: str | None
    """The exact name of the query's cursor; None: made from `group_id_prefix`."""
    group_id_prefix: str
    shared_memory: SharedMemory
    metadata: Metadata | None
    engine: Engine
    """The reading engine: Spark's JVM, in columns, or Python."""
    on_mismatch: OnMismatch
    """How to treat a stream whose columns differ from those of the others."""
    given: frozenset[str]
    """Names of the options that were given, in their canonical case."""

    @property
    def batch_starting(self) -> Where:
        """The place where a batch query starts, by default earliest."""
        return self.starting or Where(STARTING, "earliest")

    @property
    def batch_ending(self) -> Where:
        """The place where a batch query ends, by default latest."""
        return self.ending or Where(ENDING, "latest")

    @property
    def stream_starting(self) -> Where:
        """The place where a streaming query without a checkpoint starts, by default latest."""
        return self.starting or Where(STARTING, "latest")

    def group(self, stored: str, token: str) -> str:
        """Return the name of the query's cursor.

        It is ``kera.group.id``, else `stored` (the name in the checkpoint, or empty), else a new name that ends with
        `token` (8 random hex digits, which the caller makes).
        """
        return self.group_id or stored or f"{self.group_id_prefix}-{token}"

    def check_batch(self) -> None:
        """Raise `InvalidArgument` for options that make no sense in a batch query."""
        for name, meaning in _OF_STREAMS.items():
            if name in self.given:
                raise wrong(name, f"{meaning}; this is a batch query: leave it out, or use spark.readStream")
        if self.metadata == "streams":
            for name in sorted(self.given - _OF_STREAM_LISTS):
                raise wrong(name, f"has no meaning with {METADATA}=streams, which lists streams: leave it out")
        if self.batch_starting.everywhere == "latest":
            raise wrong(STARTING, "a batch query cannot start at latest: it would read no records")
        if self.batch_ending.everywhere == "earliest":
            raise wrong(ENDING, "a batch query cannot end at earliest: it would read no records")

    def check_streaming(self) -> None:
        """Raise `InvalidArgument` for options that make no sense in a streaming query."""
        for name in (*_ENDS, METADATA):
            if name in self.given:
                problem = "lists what there is now" if name == METADATA else "a streaming query has no end"
                raise wrong(name, f"{problem}: leave it out, or read a batch with spark.read")

    def check_real_time(self) -> None:
        """Raise `InvalidArgument` for options that make no sense in real-time mode."""
        if self.limits.latency_target_ms is not None:
            raise wrong(
                LATENCY_TARGET,
                "has no meaning in real-time mode, which hands on every record at once: leave it out, or use another"
                " trigger",
            )

    def check_engine(self) -> None:
        """Raise `InvalidArgument` if the columnar engine was required, and Spark calls Python all the same."""
        if self.engine == "columnar" and self.metadata is None:
            raise not_loaded(self.engine)


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Check `options` and give them types; raises `InvalidArgument`.

    Call `check_batch` or `check_streaming` next, once the kind of query is known.
    """
    given = take(options, READING, elsewhere=_OF_WRITING)

    def value(option: str, parse: Callable[[str, str], T], default: D) -> T | D:
        return parse(option, given[option]) if option in given else default

    connection = connection_of(given)
    metadata = value(METADATA, _metadata, None)
    subscription = subscription_of(given, listing=metadata == "streams")
    return ReadOptions(
        connection=connection,
        subscription=subscription,
        starting=_starting(given, subscription),
        ending=_where(given, _ENDS, subscription, "latest"),
        limits=_limits(given),
        cadence=cadence_of(given),
        include_epoch=tells_epoch(given),
        partitions_min=value(PARTITIONS_MIN, whole_number, None),
        records_per_partition_max=value(PARTITION_RECORDS_MAX, whole_number, None),
        fail_on_data_loss=value(FAIL_ON_DATA_LOSS, flag, True),  # noqa: FBT003  # the default
        include_headers=value(HEADERS, flag, False),  # noqa: FBT003  # the default
        group_id=value(GROUP, _group, None),
        group_id_prefix=_group_prefix(given),
        shared_memory=value(SHARED_MEMORY, _shared_memory, _AUTO),
        metadata=metadata,
        engine=_engine_of(given),
        on_mismatch=value(ON_MISMATCH, _on_mismatch, _FAIL),
        given=frozenset(given),
    )


def _starting(given: Mapping[str, str], subscription: Subscription) -> Where | None:
    where = _where(given, _STARTS, subscription, "earliest")
    if STRATEGY not in given:
        return replace(where, behind="error") if where is not None and where.by_time else where
    behind = cast("Literal['error', 'latest']", choice(STRATEGY, given[STRATEGY], ("error", "latest")))
    if where is None or not where.by_time:
        raise wrong(
            STRATEGY, f"is for {STARTING_TIME} and {STARTING_BY_TIME}, and none of them is given: leave it out", behind
        )
    return replace(where, behind=behind)


def _where(
    given: Mapping[str, str],
    options: Sequence[str],
    subscription: Subscription,
    new: Literal["earliest", "latest"],
) -> Where | None:
    """Return the place of the first of `options` that is given. The others must be valid, too.

    `new`: the place in streams that the option does not name.
    """
    said = [_said(option, given[option]) for option in options if option in given]
    for where in said:
        _check_named(where, subscription)
    if not said or said[0].streams is None:
        return said[0] if said else None
    # Streams that fit a pattern come and go, so a user cannot name them all.
    return replace(said[0], unnamed=new if subscription.named is None else None)


def _said(option: str, text: str) -> Where:
    if option in (STARTING_TIME, ENDING_TIME):
        return Where(option, parse_time(option, text))
    return parse_times(option, text) if option in (STARTING_BY_TIME, ENDING_BY_TIME) else parse_where(option, text)


def _check_named(where: Where, subscription: Subscription) -> None:
    """Raise `InvalidArgument` if the JSON names other streams or streamlets than the subscribed ones."""
    if where.streams is None:
        return
    for stream, streamlets in where.streams.items():
        if not subscription.fits(stream):
            raise wrong(
                where.option,
                f"names stream '{stream}', which is not subscribed{did_you_mean(stream, subscription.named or ())}",
            )
        if subscription.assign is not None and set(streamlets) != set(subscription.assign[stream]):
            raise wrong(
                where.option,
                f"must name the assigned streamlets: stream '{stream}' has {list(subscription.assign[stream])}, the"
                f" option names {sorted(streamlets)}",
            )
    unnamed = sorted(set(subscription.named or ()).difference(where.streams))
    if unnamed:
        raise wrong(where.option, f"must name every stream that is subscribed; it leaves out {listed(unnamed)}")


def _limits(given: Mapping[str, str]) -> BatchLimits:
    numbers = {name: whole_number(name, given[name]) for name in (RECORDS_MAX, BYTES_MAX, RECORDS_MIN) if name in given}
    records_max, records_min = numbers.get(RECORDS_MAX), numbers.get(RECORDS_MIN)
    if records_max is not None and records_min is not None and records_min > records_max:
        raise wrong(RECORDS_MIN, f"must be at most {RECORDS_MAX}, which is {records_max}", given[RECORDS_MIN])
    delay_max_ms = DELAY_MAX_MS
    if DELAY_MAX in given:
        delay_max_ms = duration_ms(DELAY_MAX, given[DELAY_MAX])
        if records_min is None:
            raise wrong(DELAY_MAX, f"is for {RECORDS_MIN}, which is not given: leave it out", given[DELAY_MAX])
    late_ms = _latency_target(LATENCY_TARGET, given[LATENCY_TARGET]) if LATENCY_TARGET in given else None
    return BatchLimits(records_max, numbers.get(BYTES_MAX), records_min, delay_max_ms, late_ms)


def _latency_target(option: str, text: str) -> int:
    why = (
        "which is less than any micro-batch takes. For less leave it out and use real-time mode, trigger(realTime=...)"
    )
    return target_ms(option, text, least_ms=LATENCY_TARGET_MIN_MS, why=why)


def _group_prefix(given: Mapping[str, str]) -> str:
    if GROUP_PREFIX not in given:
        return GROUP_PREFIX_DEFAULT
    if GROUP in given:
        raise wrong(GROUP_PREFIX, f"has no meaning where {GROUP} gives the whole name: leave one of them out")
    return _name(GROUP_PREFIX, given[GROUP_PREFIX], GROUP_CHARS_MAX - TOKEN_CHARS - 1)


def _group(option: str, text: str) -> str:
    return _name(option, text, GROUP_CHARS_MAX)


def _name(option: str, text: str, chars_max: int) -> str:
    name = text.strip()
    if not _GROUP.fullmatch(name) or len(name) > chars_max or name in {".", ".."}:
        raise wrong(option, f"must be 1 to {chars_max} letters, digits, dots, underscores and hyphens", text)
    return name


def _metadata(option: str, text: str) -> Metadata:
    return cast("Metadata", choice(option, text, ("streams", "partitions")))


def _shared_memory(option: str, text: str) -> SharedMemory:
    return cast("SharedMemory", choice(option, text, ("auto", "always", "never")))


def _engine_of(given: Mapping[str, str]) -> Engine:
    engine = engine_of(given)
    if engine == "columnar" and ON_MISMATCH in given and _on_mismatch(ON_MISMATCH, given[ON_MISMATCH]) == "bytes":
        raise wrong(ENGINE, f"with {ON_MISMATCH}=bytes Python reads: leave the option out, or set it to python", engine)
    return engine


def _on_mismatch(option: str, text: str) -> OnMismatch:
    return cast("OnMismatch", choice(option, text, ("fail", "skip", "bytes")))
