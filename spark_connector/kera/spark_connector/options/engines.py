"""The option ``engine``: who moves the rows, the JVM or Python workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from kera.core.errors import InvalidArgument
from kera.spark_connector.options.names import ENGINE
from kera.spark_connector.options.values import choice, wrong

Engine = Literal["auto", "python", "columnar"]
_AUTO: Literal["auto"] = "auto"

LOAD_ENGINE = (
    "To have it, make the session with kera.spark_connector.configure(builder), or start Spark with"
    " --jars $(python -m kera.spark_connector jar)"
)
"""How a Spark session gets the columnar engine; for errors and warnings."""


def engine_of(given: Mapping[str, str]) -> Engine:
    """Return the engine of the options; raises `InvalidArgument` for any other word."""
    return cast("Engine", choice(ENGINE, given.get(ENGINE, _AUTO), ("auto", "python", "columnar")))


def not_loaded(engine: Engine) -> InvalidArgument:
    """Return the error for a query of the columnar engine that reaches Python: the JVM has not taken it."""
    return wrong(
        ENGINE, f"the columnar engine is not on Spark's class path. {LOAD_ENGINE}. Or leave the option out", engine
    )
