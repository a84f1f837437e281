"""Options of the format ``kera`` for reading: their names, their values, and which of them fit together.

Names, defaults and precedence are those of Spark's Kafka source where it has such an option. All checks that need no
connection happen here, when a DataFrame is made, so that a typing error never reaches a running query. Spark hands over
names in lower case. What is shared with the options for writing is at the end.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

from kera.core.errors import InvalidArgument, StreamletOutOfRange, UnknownStream
from kera.spark_connector.admission import DELAY_MAX_MS, Limits
from kera.spark_connector.places import Where, parse_time, parse_times, parse_where, span_ms

T = TypeVar("T")
D = TypeVar("D")

BOOTSTRAP = "kera.bootstrap.servers"
SUBSCRIBE = "subscribe"
PATTERN = "subscribePattern"
ASSIGN = "assign"
PATH = "path"
STARTING = "startingOffsets"
STARTING_BY_TIME = "startingOffsetsByTimestamp"
STARTING_TIME = "startingTimestamp"
STRATEGY = "startingOffsetsByTimestampStrategy"
ENDING = "endingOffsets"
ENDING_BY_TIME = "endingOffsetsByTimestamp"
ENDING_TIME = "endingTimestamp"
RECORDS_MAX = "maxOffsetsPerTrigger"
BYTES_MAX = "maxBytesPerTrigger"
RECORDS_MIN = "minOffsetsPerTrigger"
DELAY_MAX = "maxTriggerDelay"
PARTITIONS_MIN = "minPartitions"
PARTITION_RECORDS_MAX = "maxRecordsPerPartition"
FAIL_ON_DATA_LOSS = "failOnDataLoss"
HEADERS = "includeHeaders"
GROUP = "kera.group.id"
GROUP_PREFIX = "groupIdPrefix"
SHARED_MEMORY = "sharedMemory"
METADATA = "metadata"
ENGINE = "engine"
ON_MISMATCH = "onSchemaMismatch"

READING = (
    BOOTSTRAP,
    SUBSCRIBE,
    PATTERN,
    ASSIGN,
    PATH,
    STARTING,
    STARTING_BY_TIME,
    STARTING_TIME,
    STRATEGY,
    ENDING,
    ENDING_BY_TIME,
    ENDING_TIME,
    RECORDS_MAX,
    BYTES_MAX,
    RECORDS_MIN,
    DELAY_MAX,
    PARTITIONS_MIN,
    PARTITION_RECORDS_MAX,
    FAIL_ON_DATA_LOSS,
    HEADERS,
    GROUP,
    GROUP_PREFIX,
    SHARED_MEMORY,
    METADATA,
    ENGINE,
    ON_MISMATCH,
)
"""All names, in their canonical case."""

_WHICH = (SUBSCRIBE, PATH, PATTERN, ASSIGN)
_STARTS = (STARTING_TIME, STARTING_BY_TIME, STARTING)
"""The first that is given counts."""
_ENDS = (ENDING_TIME, ENDING_BY_TIME, ENDING)
_OF_STREAMS = {
    **dict.fromkeys((RECORDS_MAX, BYTES_MAX, RECORDS_MIN, DELAY_MAX), "bounds the micro-batches of a streaming query"),
    **dict.fromkeys((GROUP, GROUP_PREFIX), "names the cursor that a streaming query stores"),
}
"""What has no meaning in a batch query, and why."""
_OF_STREAM_LISTS = {BOOTSTRAP, METADATA, ENGINE, ON_MISMATCH, *_WHICH}
"""All that ``metadata=streams`` looks at."""
_OF_WRITING = {
    "stream": f"it names the stream to write to; to read one, use {SUBSCRIBE}",
    "txnAppId": "it is for writing",
    "txnVersion": "it is for writing",
}

GROUP_PREFIX_DEFAULT = "spark-kera-source"
TOKEN_CHARS = 8
"""Random characters at the end of a cursor's name."""
GROUP_CHARS_MAX = 200
"""As for every consumer group; see the coordinator."""
_GROUP = re.compile(r"[A-Za-z0-9._-]+")

SharedMemory = Literal["auto", "always", "never"]
Metadata = Literal["streams", "partitions"]
Engine = Literal["auto", "python", "columnar"]
OnMismatch = Literal["fail", "skip", "bytes"]
_AUTO: Literal["auto"] = "auto"
_FAIL: Literal["fail"] = "fail"

LOAD_ENGINE = (
    "To have it, make the session with kera.spark_connector.configure(builder), or start Spark with"
    " --jars $(python -m kera.spark_connector jar)"
)
"""How the columnar engine comes to Spark; for errors and warnings."""


@dataclass(frozen=True)
class Subscription:
    """Which streams, and which streamlets of them: exactly one of the three is given.

    With ``metadata=streams`` none has to be given: then it is the pattern for all.
    """

    names: tuple[str, ...] | None = None
    """Sorted, each once."""
    pattern: str | None = None
    """A regular expression for whole names."""
    assign: Mapping[str, tuple[int, ...]] | None = None
    """Streamlets per stream, sorted."""
    may_be_empty: bool = False
    """Whether it is no error that a pattern fits no stream: of ``metadata=streams``."""

    @property
    def named(self) -> tuple[str, ...] | None:
        """The names of all streams; None: those that a pattern fits, and new ones may come."""
        return tuple(sorted(self.assign)) if self.assign is not None else self.names

    def fits(self, stream: str) -> bool:
        """Whether a stream of this name is subscribed."""
        if self.named is not None:
            return stream in self.named
        return re.fullmatch(self.pattern or "", stream) is not None

    def select(self, there: Collection[str]) -> list[str]:
        """The streams of `there` (all names that the cluster has) that are subscribed, sorted."""
        return sorted(filter(self.fits, there))

    def missing(self, there: Collection[str]) -> list[str]:
        """The subscribed names that are not `there`, sorted; none of a pattern."""
        return sorted(set(self.named or ()).difference(there))

    def require(self, there: Collection[str]) -> list[str]:
        """`select`; raises `UnknownStream`, with a did-you-mean, when one is missing or no stream fits at all.

        For `load`, batches and the begin of a query. A query that runs goes on with `select`: what has gone since is up
        to `planning.next_ends`.
        """
        for name in self.missing(there):
            raise UnknownStream(f"no stream is called '{name}'{_did_you_mean(name, there)}", stream=name)
        selected = self.select(there)
        if not selected and not self.may_be_empty:
            raise UnknownStream(
                f"no stream fits the pattern '{self.pattern}'. It must fit the whole name; there are"
                f" {_listed(there) or 'no streams yet'}",
                pattern=self.pattern,
            )
        return selected

    def streamlets(self, stream: str, there: Collection[int]) -> list[int]:
        """Those of `there` (all that the stream has) that are subscribed, sorted.

        Raises `StreamletOutOfRange` for an assigned one that the stream does not have.
        """
        if self.assign is None:
            return sorted(there)
        wanted = self.assign.get(stream, ())
        absent = sorted(set(wanted).difference(there))
        if absent:
            raise StreamletOutOfRange(
                f"option {ASSIGN}: stream '{stream}' has no streamlet {absent[0]}; it has 0 to {max(there, default=0)}",
                stream=stream,
                streamlet=absent[0],
            )
        return sorted(wanted)


@dataclass(frozen=True)
class ReadOptions:
    """What a query asks for; see the table in docs/spark.md."""

    bootstrap: str
    """host:port of one or more coordinators, separated by commas."""
    subscription: Subscription
    starting: Where | None
    """None: not given. Use `batch_starting` or `stream_starting`."""
    ending: Where | None
    """None: not given. Use `batch_ending`."""
    limits: Limits
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
    """Who reads: Spark's JVM, in columns, or Python."""
    on_mismatch: OnMismatch
    """What becomes of a stream that does not have the columns of the others."""
    given: frozenset[str]
    """Names of the options that were given, in their canonical case."""

    @property
    def batch_starting(self) -> Where:
        """Where a batch query starts: by default at earliest."""
        return self.starting or Where(STARTING, "earliest")

    @property
    def batch_ending(self) -> Where:
        """Where a batch query ends: by default at latest."""
        return self.ending or Where(ENDING, "latest")

    @property
    def stream_starting(self) -> Where:
        """Where a streaming query without a checkpoint starts: by default at latest."""
        return self.starting or Where(STARTING, "latest")

    def group(self, stored: str, token: str) -> str:
        """The name of the query's cursor: ``kera.group.id``, else `stored` (what the checkpoint has, or empty),
        else a new one that ends with `token` (8 random hex digits, which the caller makes).
        """
        return self.group_id or stored or f"{self.group_id_prefix}-{token}"

    def check_batch(self) -> None:
        """Raise `InvalidArgument` for what makes no sense in a batch query."""
        for name, meaning in _OF_STREAMS.items():
            if name in self.given:
                raise _wrong(name, f"{meaning}; this is a batch query: leave it out, or use spark.readStream")
        if self.metadata == "streams":
            for name in sorted(self.given - _OF_STREAM_LISTS):
                raise _wrong(name, f"has no meaning with {METADATA}=streams, which lists streams: leave it out")
        if self.batch_starting.everywhere == "latest":
            raise _wrong(STARTING, "a batch query cannot start at latest: there is nothing behind it")
        if self.batch_ending.everywhere == "earliest":
            raise _wrong(ENDING, "a batch query cannot end at earliest: there is nothing before it")

    def check_streaming(self) -> None:
        """Raise `InvalidArgument` for what makes no sense in a streaming query."""
        for name in (*_ENDS, METADATA):
            if name in self.given:
                problem = "lists what there is now" if name == METADATA else "a streaming query has no end"
                raise _wrong(name, f"{problem}: leave it out, or read a batch with spark.read")

    def check_engine(self) -> None:
        """Raise `InvalidArgument` when Spark comes to Python, and must not: the JVM would have taken the query."""
        if self.engine == "columnar" and self.metadata is None:
            raise _wrong(
                ENGINE,
                f"the columnar engine is not on Spark's class path. {LOAD_ENGINE}. Or leave the option out",
                self.engine,
            )


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Check `options` and give them types; raises `InvalidArgument`.

    `check_batch` or `check_streaming` has to follow: only then it is known what they are for.
    """
    given = take(options, READING, elsewhere=_OF_WRITING)

    def value(option: str, parse: Callable[[str, str], T], default: D) -> T | D:
        return parse(option, given[option]) if option in given else default

    bootstrap = bootstrap_of(given)
    metadata = value(METADATA, _metadata, None)
    subscription = _subscription(given, listing=metadata == "streams")
    return ReadOptions(
        bootstrap=bootstrap,
        subscription=subscription,
        starting=_starting(given, subscription),
        ending=_where(given, _ENDS, subscription, "latest"),
        limits=_limits(given),
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


def _subscription(given: Mapping[str, str], *, listing: bool) -> Subscription:
    named = [name for name in _WHICH if name in given]
    if not named and listing:
        return Subscription(pattern=".*", may_be_empty=True)
    if len(named) != 1:
        raise InvalidArgument(
            f'say once what to read: exactly one of {SUBSCRIBE}, {PATTERN}, {ASSIGN}, or .load("name");'
            f" {'none is given' if not named else 'given are ' + _listed(named)}",
            option=SUBSCRIBE,
        )
    (option,) = named
    text = given[option].strip()
    if option == ASSIGN:
        return Subscription(assign=_assigned(text))
    if option == PATTERN:
        try:
            re.compile(text)
        except re.error as error:
            raise _wrong(PATTERN, f"is no regular expression (of Python's re): {error}", text) from None
        if not text:
            raise _wrong(PATTERN, "is empty; .* fits every name", text)
        return Subscription(pattern=text, may_be_empty=listing)
    names = sorted({name.strip() for name in text.split(",")} - {""})
    if not names:
        raise _wrong(option, "names no stream", text)
    if option == PATH and "," in text:
        raise InvalidArgument(
            f"load({text!r}): load takes one stream; for several use option {SUBSCRIBE}", option=PATH, value=text
        )
    return Subscription(names=tuple(names))


def _assigned(text: str) -> dict[str, tuple[int, ...]]:
    form = 'must have the form {"stream": [0, 1]}'
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(ASSIGN, form, text) from None
    if not isinstance(document, dict) or not document:
        raise _wrong(ASSIGN, form, text)
    for name, streamlets in document.items():
        if not isinstance(streamlets, list) or not streamlets:
            raise _wrong(ASSIGN, f"{form}: stream {name!r} has no list of streamlets", text)
        if any(type(streamlet) is not int or streamlet < 0 for streamlet in streamlets):
            raise _wrong(ASSIGN, f"{form}: a streamlet of {name!r} is no number from 0", text)
    return {name: tuple(sorted(set(streamlets))) for name, streamlets in document.items()}


def _starting(given: Mapping[str, str], subscription: Subscription) -> Where | None:
    where = _where(given, _STARTS, subscription, "earliest")
    if STRATEGY not in given:
        return replace(where, behind="error") if where is not None and where.by_time else where
    behind = cast("Literal['error', 'latest']", choice(STRATEGY, given[STRATEGY], ("error", "latest")))
    if where is None or not where.by_time:
        raise _wrong(
            STRATEGY, f"is for {STARTING_TIME} and {STARTING_BY_TIME}, and none of them is given: leave it out", behind
        )
    return replace(where, behind=behind)


def _where(
    given: Mapping[str, str],
    options: Sequence[str],
    subscription: Subscription,
    new: Literal["earliest", "latest"],
) -> Where | None:
    """What the first of `options` says; the others, too, must be in order. `new`: the place in unnamed streams."""
    said = [_said(option, given[option]) for option in options if option in given]
    for where in said:
        _check_named(where, subscription)
    if not said or said[0].streams is None:
        return said[0] if said else None
    # Streams of a pattern come and go, so nobody can name them all.
    return replace(said[0], unnamed=new if subscription.named is None else None)


def _said(option: str, text: str) -> Where:
    if option in (STARTING_TIME, ENDING_TIME):
        return Where(option, parse_time(option, text))
    return parse_times(option, text) if option in (STARTING_BY_TIME, ENDING_BY_TIME) else parse_where(option, text)


def _check_named(where: Where, subscription: Subscription) -> None:
    """Raise `InvalidArgument` where JSON names other streams or streamlets than are subscribed."""
    if where.streams is None:
        return
    for stream, streamlets in where.streams.items():
        if not subscription.fits(stream):
            raise _wrong(
                where.option,
                f"names stream '{stream}', which is not subscribed{_did_you_mean(stream, subscription.named or ())}",
            )
        if subscription.assign is not None and set(streamlets) != set(subscription.assign[stream]):
            raise _wrong(
                where.option,
                f"must name the streamlets that are assigned: of stream '{stream}' these are"
                f" {list(subscription.assign[stream])}, it names {sorted(streamlets)}",
            )
    unnamed = sorted(set(subscription.named or ()).difference(where.streams))
    if unnamed:
        raise _wrong(where.option, f"must name every stream that is subscribed; it leaves out {_listed(unnamed)}")


def _limits(given: Mapping[str, str]) -> Limits:
    numbers = {name: whole_number(name, given[name]) for name in (RECORDS_MAX, BYTES_MAX, RECORDS_MIN) if name in given}
    records_max, records_min = numbers.get(RECORDS_MAX), numbers.get(RECORDS_MIN)
    if records_max is not None and records_min is not None and records_min > records_max:
        raise _wrong(RECORDS_MIN, f"must be at most {RECORDS_MAX}, which is {records_max}", given[RECORDS_MIN])
    delay_max_ms = DELAY_MAX_MS
    if DELAY_MAX in given:
        delay_max_ms = duration_ms(DELAY_MAX, given[DELAY_MAX])
        if records_min is None:
            raise _wrong(DELAY_MAX, f"is for {RECORDS_MIN}, which is not given: leave it out", given[DELAY_MAX])
    return Limits(records_max, numbers.get(BYTES_MAX), records_min, delay_max_ms)


def _group_prefix(given: Mapping[str, str]) -> str:
    if GROUP_PREFIX not in given:
        return GROUP_PREFIX_DEFAULT
    if GROUP in given:
        raise _wrong(GROUP_PREFIX, f"has no meaning where {GROUP} gives the whole name: leave one of them out")
    return _name(GROUP_PREFIX, given[GROUP_PREFIX], GROUP_CHARS_MAX - TOKEN_CHARS - 1)


def _group(option: str, text: str) -> str:
    return _name(option, text, GROUP_CHARS_MAX)


def _name(option: str, text: str, chars_max: int) -> str:
    name = text.strip()
    if not _GROUP.fullmatch(name) or len(name) > chars_max or name in {".", ".."}:
        raise _wrong(option, f"must be 1 to {chars_max} letters, digits, dots, underscores and hyphens", text)
    return name


def _metadata(option: str, text: str) -> Metadata:
    return cast("Metadata", choice(option, text, ("streams", "partitions")))


def _shared_memory(option: str, text: str) -> SharedMemory:
    return cast("SharedMemory", choice(option, text, ("auto", "always", "never")))


def _engine_of(given: Mapping[str, str]) -> Engine:
    engine = cast("Engine", choice(ENGINE, given.get(ENGINE, _AUTO), ("auto", "python", "columnar")))
    if engine == "columnar" and ON_MISMATCH in given and _on_mismatch(ON_MISMATCH, given[ON_MISMATCH]) == "bytes":
        raise _wrong(
            ENGINE, f"with {ON_MISMATCH}=bytes Python reads: leave the option out, or set it to python", engine
        )
    return engine


def _on_mismatch(option: str, text: str) -> OnMismatch:
    return cast("OnMismatch", choice(option, text, ("fail", "skip", "bytes")))


# --- shared with the options for writing --------------------------------------------------------------------------


def take(
    options: Mapping[str, str], known: Sequence[str], *, elsewhere: Mapping[str, str] | None = None
) -> dict[str, str]:
    """`options` under their canonical names (those of `known`).

    Raises `InvalidArgument` for any other name: with a did-you-mean, or, for the names in `elsewhere` (canonical names
    of options of other uses), with what it says there, as in {"stream": "is for writing; to read, use subscribe"}.
    """
    canonical = {name.lower(): name for name in known}
    others = {name.lower(): name for name in elsewhere or {}}
    given: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() in canonical:
            given[canonical[name.lower()]] = value
        elif name.lower() in others:
            other = others[name.lower()]
            raise InvalidArgument(f"option {other} does not apply here: {(elsewhere or {})[other]}", option=other)
        else:
            close = difflib.get_close_matches(name.lower(), canonical, n=1, cutoff=0.6)
            hint = f"did you mean {canonical[close[0]]}?" if close else f"known are {_listed(known)}"
            raise InvalidArgument(f"unknown option {name}: {hint}", option=name)
    return given


def bootstrap_of(given: Mapping[str, str]) -> str:
    """The value of ``kera.bootstrap.servers``; raises `InvalidArgument` when it is missing."""
    bootstrap = given.get(BOOTSTRAP, "").strip()
    if not bootstrap:
        raise InvalidArgument(
            f"option {BOOTSTRAP} is missing: the address of the coordinator, as in 127.0.0.1:7400", option=BOOTSTRAP
        )
    return bootstrap


def whole_number(option: str, text: str) -> int:
    """A number from 1; raises `InvalidArgument` that names `option`."""
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or int(text) < 1:
        raise _wrong(option, "must be a whole number from 1", text)
    return int(text)


def flag(option: str, text: str) -> bool:
    """True or false; raises `InvalidArgument` that names `option`."""
    return choice(option, text, ("true", "false")) == "true"


def choice(option: str, text: str, words: Sequence[str]) -> str:
    """One of `words`, whatever its case; raises `InvalidArgument` that names `option`."""
    word = text.strip().lower()
    if word not in words:
        raise _wrong(option, f"must be {' or '.join(words)}{_did_you_mean(word, words)}", text)
    return word


def duration_ms(option: str, text: str) -> int:
    """``500ms``, ``10s``, ``5m``, ``1h``, ``1d`` in milliseconds; raises `InvalidArgument` that names `option`."""
    found = span_ms(text)
    if found is None:
        raise _wrong(option, "must be a number with a unit, ms, s, m, h or d, as in 10s", text)
    return found


def _wrong(option: str, problem: str, value: str | None = None) -> InvalidArgument:
    if value is None:
        return InvalidArgument(f"option {option}: {problem}", option=option)
    return InvalidArgument(f"option {option}: {problem}; it is {value!r}", option=option, value=value)


def _did_you_mean(name: str, there: Collection[str]) -> str:
    close = difflib.get_close_matches(name, there, n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""


def _listed(names: Collection[str], names_max: int = 30) -> str:
    shown = sorted(names, key=str.lower)
    more = f" and {len(shown) - names_max} more" if len(shown) > names_max else ""
    return ", ".join(shown[:names_max]) + more
