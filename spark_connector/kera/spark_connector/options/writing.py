"""Options of the format ``kera`` for writing. All checks that need no connection happen here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kera.core.errors import InvalidArgument
from kera.spark_connector.connection import Connection
from kera.spark_connector.options.connecting import connection_of
from kera.spark_connector.options.engines import Engine, engine_of, not_loaded
from kera.spark_connector.options.names import (
    APP_ID,
    ASSIGN,
    LATENCY_TARGET,
    PATH,
    PATTERN,
    READING,
    STREAM,
    SUBSCRIBE,
    VERSION,
    WRITING,
)
from kera.spark_connector.options.values import take, target_ms

SPARKS_OWN = ("checkpointLocation", "queryName")
"""Options that are meant for Spark, which it passes on to the source all the same."""
FOR_READING = {
    **dict.fromkeys(set(READING) - set(WRITING), "is for reading"),
    **dict.fromkeys((SUBSCRIBE, PATTERN, ASSIGN), f"is for reading; to write, use {STREAM}"),
}
LATENCY_TARGET_MIN_MS = 10
VERSION_MAX = (1 << 32) - 2
"""The version becomes a producer's epoch, which starts at 1 and has 32 bits."""


@dataclass(frozen=True)
class WriteOptions:
    """The options of a writing query; see the table in docs/spark.md."""

    connection: Connection
    stream: str | None
    """The stream to write to; None: each row names it, in its column ``stream``."""
    app_id: str | None
    """The name under which a batch is written; None: a name that is used only once."""
    version: int
    """The number of the batch under this name."""
    engine: Engine = "auto"
    latency_target_ms: int | None = None
    """How long after its task has got a row it may be stored; None: when its chunk is full, or the task ends."""

    def check_engine(self) -> None:
        """Raise `InvalidArgument` if the columnar engine was required, and Spark calls Python all the same."""
        if self.engine == "columnar":
            raise not_loaded(self.engine)

    def check_batch(self, *, overwrite: bool) -> None:
        """Raise `InvalidArgument` if a batch query cannot do what the options ask."""
        if overwrite:
            raise InvalidArgument('a stream only grows: use .mode("append")', mode="overwrite")

    def check_streaming(self, *, overwrite: bool) -> None:
        """Raise `InvalidArgument` if a streaming query cannot do what the options ask."""
        if overwrite:
            raise InvalidArgument(
                "output mode complete would replace what the stream has, and a stream only grows: use append,"
                f" or foreachBatch and in it df.write with {APP_ID} and {VERSION}",
                mode="complete",
            )
        if self.app_id is not None:
            raise InvalidArgument(
                f"option {APP_ID} is for batch queries; a streaming query is known by its checkpoint", option=APP_ID
            )


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Check `options` and give them types; raises `InvalidArgument`. `check_batch` or `check_streaming` follows."""
    own = {name.lower() for name in SPARKS_OWN}
    given = take(
        {name: text for name, text in options.items() if name.lower() not in own}, WRITING, elsewhere=FOR_READING
    )
    names = [given[name].strip() for name in (STREAM, PATH) if given.get(name, "").strip()]
    if len(names) > 1:
        raise InvalidArgument(
            f'name the stream once: .option("{STREAM}", "name") or the argument of save() or start()', option=STREAM
        )
    app_id = given.get(APP_ID, "").strip() or None
    if (app_id is None) != (VERSION not in given):
        missing = APP_ID if app_id is None else VERSION
        raise InvalidArgument(f"options {APP_ID} and {VERSION} go together; {missing} is missing", option=missing)
    return WriteOptions(
        connection_of(given),
        names[0] if names else None,
        app_id,
        _version(given),
        engine_of(given),
        _latency_target(given),
    )


def _latency_target(given: Mapping[str, str]) -> int | None:
    if LATENCY_TARGET not in given:
        return None
    why = "as storing takes some of it"
    return target_ms(LATENCY_TARGET, given[LATENCY_TARGET], least_ms=LATENCY_TARGET_MIN_MS, why=why)


def _version(given: Mapping[str, str]) -> int:
    text = given.get(VERSION, "0").strip()
    if not (text.isascii() and text.isdigit()) or int(text) > VERSION_MAX:
        raise InvalidArgument(
            f"option {VERSION}: must be a whole number from 0 to {VERSION_MAX}; it is {text!r}",
            option=VERSION,
            value=text,
        )
    return int(text)
