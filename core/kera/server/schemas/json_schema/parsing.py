"""Parses JSON Schemas of draft 6 and later. Pure: external documents (``$ref`` to http: or file:) are never fetched.

The value of each keyword is checked, so that the rules can rely on it; keywords that no draft has are kept unchanged.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from kera.core.base.strict_json import shown
from kera.core.errors import InvalidSchema
from kera.core.schemas.json_text import parsed_json

SCHEMAS_MAX = 10_000
"""Maximum of schemas within a definition."""
PATTERN_CHARS_MAX = 1_000
TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")
_DRAFTS = {
    "json-schema.org/draft-06/schema": True,
    "json-schema.org/draft-07/schema": True,
    "json-schema.org/draft/2019-09/schema": False,
    "json-schema.org/draft/2020-12/schema": False,
}
"""Supported drafts, and whether ``$ref`` makes keywords beside it ineffective."""
_ONE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""Keywords whose value is a schema; those below have lists of schemas, objects with schemas, and so on."""
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = frozenset(
    {
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
    }
)
_NUMBERS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
_TEXTS = frozenset({"$anchor", "$comment", "$id", "$schema", "description", "format", "pattern", "title"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords without effect on validity, also those of OpenAPI: a discriminator only repeats a oneOf."""

Schema = Mapping[str, Any] | bool


@dataclass(slots=True, eq=False)
class JsonSchema:
    """A parsed definition."""

    root: Schema
    targets: Mapping[str, Schema]
    """The targets of references, by the text of the ``$ref``."""


def parsed_json_schema(definition: str) -> JsonSchema:
    """Parse the schema in `definition`. Raises `InvalidSchema`."""
    document = parsed_json(definition, "the schema")
    reader = _Reader(document)
    reader.schema(document, "", is_root=True)
    targets = reader.resolved()
    reader.check_ends(targets)
    return JsonSchema(document, targets)


class _Reader:
    def __init__(self, document: Any) -> None:
        self._document = document
        self._left = SCHEMAS_MAX
        self._read: dict[int, Schema] = {}
        """Schemas that were read, by `id`: they live as long as the document."""
        self._anchors: dict[str, Schema] = {}
        self._references: dict[str, str] = {}
        """References to resolve, each with the path of its first use."""
        self._hides = False

    def schema(self, schema: Any, path: str, *, is_root: bool = False) -> None:
        """Check a schema and the schemas within it."""
        self._left -= 1
        if self._left < 0:
            raise InvalidSchema(f"the schema has more than {SCHEMAS_MAX} schemas in it", limit=SCHEMAS_MAX)
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _invalid(path, f"{shown(schema)} is not a schema: it is an object, true or false")
        self._read[id(schema)] = schema
        if is_root:
            self._hides = _draft(schema)
        for keyword, value in schema.items():
            self._keyword(schema, keyword, value, f"{path}/{keyword}", is_root=is_root)
        if self._hides and "$ref" in schema and schema.keys() - ANNOTATIONS - {"$ref"}:
            raise _invalid(path, "in this draft $ref hides what stands beside it: use allOf, or draft 2020-12")

    def _keyword(self, schema: dict[str, Any], keyword: str, value: Any, path: str, *, is_root: bool) -> None:
        if keyword in {"$id", "$schema"} and not is_root:
            raise _invalid(path, f"{keyword} is taken of the whole schema only")
        if keyword in _TEXTS and not isinstance(value, str):
            raise _invalid(path, f"{shown(value)} is not text")
        if keyword in _REFERENCES:
            self._reference(value, path)
        elif keyword == "$anchor":
            if value in self._anchors:
                raise _invalid(path, f"the anchor {shown(value)} is there twice")
            self._anchors[value] = schema
        elif keyword in _ONE:
            self.schema(value, path)
        elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            self._list(keyword, value, path)
        elif keyword == "items":
            self.schema(value, path)
        elif keyword in _MAPS or keyword == "dependencies":
            self._map(keyword, value, path)
        else:
            _check_value(keyword, value, path)

    def _reference(self, value: Any, path: str) -> None:
        if not isinstance(value, str):
            raise _invalid(path, f"{shown(value)} is not a reference")
        if not value.startswith("#"):
            raise _invalid(
                path,
                f"{shown(value)} is in another document, and nothing is fetched: put it below $defs, and refer to it as"
                " #/$defs/NAME",
            )
        self._references.setdefault(value, path)

    def _list(self, keyword: str, value: Any, path: str) -> None:
        if not isinstance(value, list) or not value:
            raise _invalid(path, "it is a list of schemas")
        if keyword == "items" and not self._hides and "2019-09" not in str(self._document.get("$schema", "")):
            raise _invalid(
                path, "a list of items is called prefixItems since draft 2020-12; say which draft in $schema"
            )
        for at, each in enumerate(value):
            self.schema(each, f"{path}/{at}")

    def _map(self, keyword: str, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise _invalid(path, "it is an object with schemas")
        for name, each in value.items():
            if keyword == "patternProperties":
                _check_pattern(name, path)
            if keyword == "dependencies" and isinstance(each, list):
                _check_names(each, f"{path}/{name}")
            else:
                self.schema(each, f"{path}/{name}")

    def resolved(self) -> dict[str, Schema]:
        """Return the targets of all references. Raises `InvalidSchema`."""
        return {reference: self._target(reference, path) for reference, path in self._references.items()}

    def check_ends(self, targets: Mapping[str, Schema]) -> None:
        """Refuse a schema that refers to itself for the same value, as validating would never end.

        Raises `InvalidSchema`.
        """
        done: set[int] = set()
        for start in self._read.values():
            within: set[int] = set()
            todo: list[tuple[Schema, bool]] = [(start, False)]
            while todo:
                schema, leaves = todo.pop()
                if leaves:
                    within.discard(id(schema))
                    done.add(id(schema))
                elif id(schema) in within:
                    raise InvalidSchema(
                        "the schema refers to itself about the same value, which never ends: see its $ref"
                    )
                elif isinstance(schema, dict) and id(schema) not in done:
                    within.add(id(schema))
                    todo.append((schema, True))
                    todo += [(each, False) for each in _about_the_same(schema, targets)]

    def _target(self, reference: str, path: str) -> Schema:
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            if pointer not in self._anchors:
                raise _invalid(path, f"there is no anchor {shown(pointer)}")
            return self._anchors[pointer]
        found: Any = self._document
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and re.fullmatch("[0-9]{1,6}", name) and int(name) < len(found):
                found = found[int(name)]
            else:
                raise _invalid(path, f"the schema has no value at {shown(reference)}")
        if not isinstance(found, bool) and id(found) not in self._read:
            raise _invalid(path, f"{shown(reference)} is not a schema")
        return found  # type: ignore[no-any-return]


def _about_the_same(schema: dict[str, Any], targets: Mapping[str, Schema]) -> list[Schema]:
    """Return the schemas within `schema` that apply to the same value, and not to its parts."""
    found = [schema[word] for word in ("not", "if", "then", "else") if word in schema]
    found += [each for word in ("allOf", "anyOf", "oneOf") for each in schema.get(word, ())]
    found += [targets[schema[word]] for word in _REFERENCES if word in schema]
    for word in ("dependentSchemas", "dependencies"):
        found += [each for each in schema.get(word, {}).values() if not isinstance(each, list)]
    return found


def _draft(schema: dict[str, Any]) -> bool:
    """Return whether ``$ref`` makes keywords beside it ineffective. Raises `InvalidSchema`."""
    named = schema.get("$schema")
    if named is None:
        return False
    known = _DRAFTS.get(re.sub(r"^https?://", "", named).removesuffix("#")) if isinstance(named, str) else None
    if known is None:
        raise _invalid("/$schema", f"{shown(named)} is not a supported draft: use draft 6, 7, 2019-09 and 2020-12")
    return known


def _check_value(keyword: str, value: Any, path: str) -> None:
    if keyword == "type":
        kinds = value if isinstance(value, list) else [value]
        if (
            not kinds
            or not all(isinstance(each, str) and each in TYPES for each in kinds)
            or len(set(kinds)) < len(kinds)
        ):
            raise _invalid(path, f"{shown(value)} is neither a type nor a list of types: {', '.join(TYPES)}")
    elif keyword == "enum" and (not isinstance(value, list) or not value):
        raise _invalid(path, "it is a list of values")
    elif keyword == "required":
        _check_names(value, path)
    elif keyword in _COUNTS and not (_is_number(value) and value >= 0 and value == int(value)):
        raise _invalid(path, f"{shown(value)} is not a whole number from 0")
    elif keyword in _NUMBERS and not (_is_number(value) and (keyword != "multipleOf" or value > 0)):
        raise _invalid(path, f"{shown(value)} is not a number that is allowed here")
    elif keyword == "uniqueItems" and not isinstance(value, bool):
        raise _invalid(path, f"{shown(value)} is neither true nor false")
    elif keyword == "pattern":
        _check_pattern(value, path)
    elif keyword == "dependentRequired":
        if not isinstance(value, dict):
            raise _invalid(path, "it is an object with lists of names")
        for name, each in value.items():
            _check_names(each, f"{path}/{name}")


def _check_names(value: Any, path: str) -> None:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value) or len(set(value)) < len(value):
        raise _invalid(path, "it is a list of names, each once")


def _check_pattern(pattern: str, path: str) -> None:
    """Check that a pattern is valid. It is never matched here. Raises `InvalidSchema`."""
    if len(pattern) > PATTERN_CHARS_MAX:
        raise _invalid(path, f"a pattern has at most {PATTERN_CHARS_MAX} characters", limit=PATTERN_CHARS_MAX)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _invalid(path, f"{shown(pattern)} is not a regular expression that Python knows: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _invalid(path: str, reason: str, **attributes: Any) -> InvalidSchema:
    path = path if len(path) <= 200 else f"{path[:200]}…"
    return InvalidSchema(f"the schema, at {path or '/'}: {reason}", path=path, **attributes)
