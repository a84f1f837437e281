"""Parses definitions, and finds changes in a new one that break readers. Pure; each kind of schema has its own rules.

A large definition takes a while, so an event loop should do this in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kera.core.errors import InvalidSchema
from kera.core.schemas.kinds import Compatibility, SchemaType
from kera.core.schemas.limits import checked_message, checked_text
from kera.server.schemas import arrow
from kera.server.schemas.arrow import parsed_arrow
from kera.server.schemas.avro import rules as avro
from kera.server.schemas.avro.parsing import parsed_avro
from kera.server.schemas.differences import DIFFERENCES_MAX, Budget, Pair
from kera.server.schemas.json_schema import rules as json_schema
from kera.server.schemas.json_schema.parsing import parsed_json_schema
from kera.server.schemas.protobuf import rules as protobuf
from kera.server.schemas.protobuf.parsing import parsed_protobuf

CHARS_PER_STEP = 32
"""Parsing an earlier definition costs one step for this many characters."""
Compare = Callable[[Any, Any, Pair], None]
_RULES: dict[SchemaType, Compare] = {
    SchemaType.AVRO: avro.compare,
    SchemaType.JSON: json_schema.compare,
    SchemaType.PROTOBUF: protobuf.compare,
    SchemaType.ARROW: arrow.compare,
}


class Definition(NamedTuple):
    """The definition of a schema, as its author has written it."""

    schema_type: SchemaType
    text: str
    message: str = ""
    """Name of a Protobuf message, see `RegisteredSchema`."""

    def parsed(self) -> Any:
        """Parse the definition into the form that its rules use.

        Raises `InvalidSchema`, also for definitions that the registry does not accept.
        """
        checked_text(self.text)
        checked_message(self.message, self.schema_type)
        match self.schema_type:
            case SchemaType.AVRO:
                return parsed_avro(self.text)
            case SchemaType.JSON:
                return parsed_json_schema(self.text)
            case SchemaType.PROTOBUF:
                return parsed_protobuf(self.text, self.message)
            case SchemaType.ARROW:
                return parsed_arrow(self.text)


class Version(NamedTuple):
    """A registered version of a subject's schema."""

    number: int
    definition: Definition


def incompatibilities(new: Definition, earlier: Iterable[Version], mode: Compatibility) -> list[str]:
    """Return the incompatibilities if `new` follows `earlier`, as a text for each field; empty: none.

    `earlier`: the oldest first. Raises `InvalidSchema`, also if the comparison would take too long.
    """
    try:
        return _compared(new, list(earlier)[::-1], mode)
    except RecursionError:
        raise InvalidSchema("the schema is nested too deep to be compared") from None


def _compared(new: Definition, versions: list[Version], mode: Compatibility) -> list[str]:
    parsed, budget = new.parsed(), Budget()
    found: dict[str, None] = {}
    if mode is Compatibility.NONE:
        return []
    for version in versions if mode.transitive else versions[:1]:
        if version.definition.schema_type is not new.schema_type:
            found[
                f"the schema: {new.schema_type}, was {version.definition.schema_type} in version {version.number}"
            ] = None
            continue
        budget.spend(len(version.definition.text) // CHARS_PER_STEP)
        old = version.definition.parsed()
        for new_reads in (True, False):
            if mode.backward if new_reads else mode.forward:
                pair = Pair(budget, new_reads=new_reads)
                _RULES[new.schema_type](*((old, parsed) if new_reads else (parsed, old)), pair)
                found |= dict.fromkeys(_said(pair, version.number))
        if len(found) > DIFFERENCES_MAX:
            break
    said = list(found)
    return said if len(said) <= DIFFERENCES_MAX else [*said[:DIFFERENCES_MAX], "and more"]


def _said(pair: Pair, version: int) -> Iterable[str]:
    end = f"it cannot read version {version}" if pair.new_reads else f"readers of version {version} cannot read it"
    for path, reason in pair.found:
        yield f"{f'field {path}' if path else 'the schema'}: {reason}: {end}"
