"""Types and bounds of single values in JSON Schemas. Pure.

Written values are described by a *conjunction*: several schemas that all hold (a schema, the target of its ``$ref``,
the members of its ``allOf``), each without these keywords.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from kera.server.schemas.differences import Pair

Plain = Mapping[str, Any]
ALL_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string"})
"""All types; ``integer`` is included in number."""
SHOWN_MAX = 8


def types_of(conjunction: Iterable[Plain]) -> frozenset[str]:
    """Return the types that values may have: ``integer`` only if other numbers are not allowed."""
    found = ALL_TYPES
    for schema in conjunction:
        if "type" in schema:
            kinds = schema["type"]
            found = _both(found, frozenset([kinds] if isinstance(kinds, str) else kinds))
        if (values := own_values(schema)) is not None:
            found = _both(found, frozenset(map(type_of, values)))
    return found


def _both(some: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    both = some & others
    if "integer" in some | others and "number" in some | others and not {"number"} <= both:
        both |= {"integer"}
    return both - {"integer"} if "number" in both else both


def type_of(value: Any) -> str:
    """Return the type of a value."""
    match value:
        case None:
            kind = "null"
        case bool():
            kind = "boolean"
        case int() | float():
            kind = "integer" if value == int(value) else "number"
        case str():
            kind = "string"
        case list():
            kind = "array"
        case _:
            kind = "object"
    return kind


def own_values(schema: Plain) -> list[Any] | None:
    """Return the values that a schema lists; None: it does not list values."""
    values: list[Any] | None = schema.get("enum")
    if "const" in schema:
        return [schema["const"]]
    return values


def values_of(conjunction: Iterable[Plain]) -> list[Any] | None:
    """Return a list that includes all allowed values; None: the values are not listed."""
    lists = [values for schema in conjunction if (values := own_values(schema)) is not None]
    return min(lists, key=len) if lists else None


def key_of(value: Any) -> str:
    """Return a key that is the same for equal values: 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_normal(each) for each in value]
    if isinstance(value, dict):
        return {name: _normal(each) for name, each in value.items()}
    return value


def compare_types(writes: Sequence[Plain], reads: Plain, pair: Pair, path: str) -> bool:
    """Compare the types; return whether the reader allows all of them, so that other keywords can be compared."""
    if "type" not in reads:
        return True
    written, read = types_of(writes), types_of([{"type": reads["type"]}])
    lacking = {kind for kind in written if kind not in read and not (kind == "integer" and "number" in read)}
    if not lacking:
        return True
    pair.differ(path, writes=_listed(written), reads=_listed(read))
    return False


def _listed(kinds: frozenset[str]) -> str:
    return "anything" if kinds == ALL_TYPES else " or ".join(sorted(kinds)) or "nothing"


def compare_values(writes: Sequence[Plain], reads: Plain, pair: Pair, path: str) -> None:
    """Compare ``enum`` and ``const``."""
    allowed = own_values(reads)
    if allowed is None:
        return
    written = values_of(writes)
    if written is None:
        if types_of(writes) <= {"null"} and None in allowed:
            return
        pair.differ(path, writes="any value", reads=f"one of {_some(allowed)}")
        return
    pair.step(len(written) + len(allowed))
    known = set(map(key_of, allowed))
    gone = [value for value in written if key_of(value) not in known]
    if gone:
        pair.say(
            path,
            pair.either(
                reads=f"{_some(gone)} is no longer one of its values",
                writes=f"{_some(gone)} is one of its values, and was not",
            ),
        )


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(json.dumps(value)[:40] for value in values[:SHOWN_MAX])
    return shown + (", …" if len(values) > SHOWN_MAX else "")


def compare_bounds(writes: Sequence[Plain], reads: Plain, pair: Pair, path: str) -> None:
    """Compare the bounds of numbers, and of the lengths of texts, lists and objects."""
    kinds, values = types_of(writes), values_of(writes)
    for kind, lower, upper, measure in _LENGTHS:
        if kind in kinds:
            some = None if values is None else [measure(value) for value in values if type_of(value) == kind]
            _at_least(writes, reads, lower, some, pair, path)
            _at_most(writes, reads, upper, some, pair, path)
    if kinds & {"number", "integer"}:
        some = None if values is None else [value for value in values if type_of(value) in {"number", "integer"}]
        _numbers(writes, reads, some, pair, path)
        _multiples(writes, reads, kinds, some, pair, path)
    if "string" in kinds:
        for keyword in ("pattern", "format", "contentEncoding", "contentMediaType"):
            if keyword in reads and not any(schema.get(keyword) == reads[keyword] for schema in writes):
                before = next((f"{keyword} {schema[keyword]}" for schema in writes if keyword in schema), None)
                pair.differ(path, writes=before or f"without {keyword}", reads=f"{keyword} {reads[keyword]}")
    if "array" in kinds and reads.get("uniqueItems") and not any(schema.get("uniqueItems") for schema in writes):
        pair.say(path, pair.either(reads="items have to be unique now", writes="items need not be unique any more"))


_LENGTHS: Sequence[tuple[str, str, str, Callable[[Any], int]]] = (
    ("string", "minLength", "maxLength", len),
    ("array", "minItems", "maxItems", len),
    ("object", "minProperties", "maxProperties", len),
)


def _at_least(
    writes: Sequence[Plain], reads: Plain, keyword: str, values: list[Any] | None, pair: Pair, path: str
) -> None:
    wanted = reads.get(keyword, 0)
    known = [schema[keyword] for schema in writes if keyword in schema]
    if values is not None:
        known.append(min(values, default=wanted))
    if wanted > max(known, default=0):
        pair.differ(path, writes=f"{keyword} {max(known, default=0)}", reads=f"{keyword} {wanted}")


def _at_most(
    writes: Sequence[Plain], reads: Plain, keyword: str, values: list[Any] | None, pair: Pair, path: str
) -> None:
    if keyword not in reads:
        return
    known = [schema[keyword] for schema in writes if keyword in schema]
    if values is not None:
        known.append(max(values, default=reads[keyword]))
    if not known or min(known) > reads[keyword]:
        before = f"{keyword} {min(known)}" if known else f"without {keyword}"
        pair.differ(path, writes=before, reads=f"{keyword} {reads[keyword]}")


def _numbers(writes: Sequence[Plain], reads: Plain, values: list[Any] | None, pair: Pair, path: str) -> None:
    for sign, inclusive, exclusive in ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum")):
        known = _bound(writes, sign, inclusive, exclusive)
        if values is not None:
            of_values = min((sign * value for value in values), default=None)
            known = max(
                [each for each in (known, None if of_values is None else (of_values, False)) if each], default=known
            )
        wanted = _bound([reads], sign, inclusive, exclusive)
        if wanted is not None and (known is None or known < wanted):
            pair.differ(path, writes=_bound_word(known, sign), reads=_bound_word(wanted, sign))


def _bound(schemas: Iterable[Plain], sign: int, inclusive: str, exclusive: str) -> tuple[Any, bool] | None:
    """Return the strongest bound, times `sign`, and whether the bound itself is excluded."""
    found = [
        (sign * schema[word], word == exclusive)
        for schema in schemas
        for word in (inclusive, exclusive)
        if word in schema
    ]
    return max(found, default=None)


def _bound_word(bound: tuple[Any, bool] | None, sign: int) -> str:
    if bound is None:
        return "without minimum" if sign > 0 else "without maximum"
    word = "minimum" if sign > 0 else "maximum"
    return f"exclusive {word} {sign * bound[0]}" if bound[1] else f"{word} {sign * bound[0]}"


def _multiples(
    writes: Sequence[Plain], reads: Plain, kinds: frozenset[str], values: list[Any] | None, pair: Pair, path: str
) -> None:
    if "multipleOf" not in reads:
        return
    of = Fraction(str(reads["multipleOf"]))
    known = [Fraction(str(schema["multipleOf"])) for schema in writes if "multipleOf" in schema]
    if "number" not in kinds:
        known.append(Fraction(1))
    taken = any((each / of).denominator == 1 for each in known)
    if values is not None and not taken:
        taken = all((Fraction(str(value)) / of).denominator == 1 for value in values)
    if not taken:
        before = next((f"multipleOf {schema['multipleOf']}" for schema in writes if "multipleOf" in schema), None)
        pair.differ(path, writes=before or "without multipleOf", reads=f"multipleOf {reads['multipleOf']}")
