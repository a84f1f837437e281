"""Options of the format ``kera``: their names, their values, and which of them fit together.

Names and defaults are those of Spark's Kafka source where it has such an option. All checks that need no connection
happen here, when a DataFrame is made, so that a typing error never reaches a running query. Spark hands over names in
lower case.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from kera.core.errors import InvalidArgument
from kera.spark_connector.offsets import EARLIEST_PLACES, LATEST_PLACES, Places, parse_places

BOOTSTRAP = "kera.bootstrap.servers"
SUBSCRIBE = "subscribe"
PATH = "path"
STARTING = "startingOffsets"
ENDING = "endingOffsets"
RECORDS_MAX = "maxOffsetsPerTrigger"

KNOWN = (BOOTSTRAP, SUBSCRIBE, PATH, STARTING, ENDING, RECORDS_MAX)
_CANONICAL = {name.lower(): name for name in KNOWN}


@dataclass(frozen=True)
class KeraOptions:
    """What a query asks for; see the table in docs/spark.md."""

    bootstrap: str
    """host:port of one or more coordinators, separated by commas."""
    stream: str
    starting: Places | None
    """None: not given."""
    ending: Places | None
    """None: not given."""
    records_per_trigger_max: int | None

    @property
    def batch_starting(self) -> Places:
        """Where a batch query starts."""
        return self.starting or EARLIEST_PLACES

    @property
    def batch_ending(self) -> Places:
        """Where a batch query ends."""
        return self.ending or LATEST_PLACES

    @property
    def stream_starting(self) -> Places:
        """Where a streaming query without a checkpoint starts."""
        return self.starting or LATEST_PLACES

    def check_batch(self) -> None:
        """Raise `InvalidArgument` for what makes no sense in a batch query."""
        if self.batch_starting == LATEST_PLACES:
            raise InvalidArgument(f"option {STARTING}: a batch query cannot start at latest", option=STARTING)
        if self.batch_ending == EARLIEST_PLACES:
            raise InvalidArgument(f"option {ENDING}: a batch query cannot end at earliest", option=ENDING)
        if self.records_per_trigger_max is not None:
            raise InvalidArgument(
                f"option {RECORDS_MAX} bounds the micro-batches of a streaming query; this is a batch query",
                option=RECORDS_MAX,
            )

    def check_streaming(self) -> None:
        """Raise `InvalidArgument` for what makes no sense in a streaming query."""
        if self.ending is not None:
            raise InvalidArgument(f"option {ENDING}: a streaming query has no end", option=ENDING)


def parse_options(options: Mapping[str, str]) -> KeraOptions:
    """Check `options` and give them types; raises `InvalidArgument`."""
    given: dict[str, str] = {}
    for name, value in options.items():
        canonical = _CANONICAL.get(name.lower())
        if canonical is None:
            raise _unknown(name)
        given[canonical] = value
    bootstrap = given.get(BOOTSTRAP, "").strip()
    if not bootstrap:
        raise InvalidArgument(
            f"option {BOOTSTRAP} is missing: the address of the coordinator, as in 127.0.0.1:7400", option=BOOTSTRAP
        )
    stream = _stream(given)
    return KeraOptions(
        bootstrap=bootstrap,
        stream=stream,
        starting=parse_places(STARTING, given[STARTING], stream) if STARTING in given else None,
        ending=parse_places(ENDING, given[ENDING], stream) if ENDING in given else None,
        records_per_trigger_max=_positive(RECORDS_MAX, given[RECORDS_MAX]) if RECORDS_MAX in given else None,
    )


def _stream(given: Mapping[str, str]) -> str:
    names = [given[name].strip() for name in (SUBSCRIBE, PATH) if given.get(name, "").strip()]
    if len(names) != 1:
        raise InvalidArgument(
            f'name the stream once: .option("{SUBSCRIBE}", "name") or .load("name")',
            option=SUBSCRIBE,
        )
    if "," in names[0]:
        raise InvalidArgument(
            f"option {SUBSCRIBE}: one stream per DataFrame; it is {names[0]!r}. Union several DataFrames",
            option=SUBSCRIBE,
            value=names[0],
        )
    return names[0]


def _positive(option: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise InvalidArgument(
            f"option {option}: must be a whole number from 1; it is {text!r}", option=option, value=text
        )
    return value


def _unknown(name: str) -> InvalidArgument:
    close = difflib.get_close_matches(name.lower(), _CANONICAL, n=1, cutoff=0.6)
    hint = f"did you mean {_CANONICAL[close[0]]}?" if close else f"known are {', '.join(sorted(KNOWN, key=str.lower))}"
    return InvalidArgument(f"unknown option {name}: {hint}", option=name)
