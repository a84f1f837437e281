"""Whether a reader's JSON Schema allows all values that a writer's schema allows. Pure.

Keywords that these rules do not understand count as a difference, and are named: keywords that no draft has, and
conditions (``if``, ``not``, ``dependentSchemas``, …) that are not literally the same. Keywords that begin with ``x-``
are ignored.

In one point the rules assume what writers usually do, not all that their schemas allow: a writer whose schema does not
mention ``additionalProperties`` writes only the properties that it names. So a field with a new name may be added, as
people expect. A writer with ``"additionalProperties": true`` may write any property.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kera.server.schemas.differences import Pair, below
from kera.server.schemas.json_schema.parsing import ANNOTATIONS, JsonSchema, Schema
from kera.server.schemas.json_schema.values import (
    Plain,
    compare_bounds,
    compare_types,
    compare_values,
    key_of,
    own_values,
    type_of,
    types_of,
    values_of,
)

_UNDERSTOOD = ANNOTATIONS | {
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contentEncoding",
    "contentMediaType",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
    "uniqueItems",
}
_REFERENCES = frozenset({"$dynamicRef", "$recursiveRef"})
"""References whose targets are unknown here."""
_ONLY_OF = {
    "object": {"dependencies", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties"},
    "array": {"contains", "maxContains", "minContains", "unevaluatedItems"},
    "string": {"contentSchema"},
}
"""Conditions that apply only to values of one type."""


_Compared = tuple[tuple[int, ...], int | tuple[int, ...]]
_Seen = set[_Compared]


class _Written(NamedTuple):
    """The values that are written: all schemas in `all` hold, and none of those in `none`."""

    all: tuple[Plain, ...]
    none: tuple[Schema, ...] = ()
    """Branches of a ``oneOf`` that do not hold, since another branch does."""


def compare(writer: JsonSchema, reader: JsonSchema, pair: Pair) -> None:
    """Report in `pair` which values `writer` allows and `reader` does not."""
    resolution = _Resolution(writer, reader, pair)
    resolution.schemas([writer.root], reader.root, "")


class _Resolution:
    def __init__(
        self,
        writer: JsonSchema,
        reader: JsonSchema,
        pair: Pair,
        within: _Resolution | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """`within`: the comparison of which this one is a tentative part; `strict`: a writer that does not mention
        `additionalProperties` may write any property.
        """
        self._writer = writer
        self._reader = reader
        self._pair = pair
        self._strict = strict
        self.strict_seen: dict[int, _Seen] = {} if within is None else within.strict_seen
        """`seen` of strict comparisons, by `id` of the writer: these start each other, and could recur for ever."""
        self.seen: _Seen = set() if within is None else within.seen
        """Pairs that were compared, or are being compared, by `id`, as schemas live as long as the documents."""
        if strict:
            self.seen = self.strict_seen.setdefault(id(writer), set())
        self._added: list[_Compared] = []
        """Pairs that this comparison has added to `seen`; they are removed again if it was only tentative."""
        self.rests: dict[tuple[int, str], list[Plain]] = {} if within is None else within.rests
        """Schemas without one keyword, by the `id` of the schema and the keyword."""
        self.kept: list[object] = [] if within is None else within.kept
        """Objects made during the comparison, kept because their `id` is used."""

    def schemas(self, writes: Sequence[Schema], reads: Schema, path: str, none: tuple[Schema, ...] = ()) -> None:
        """Compare the schemas at a path: of the writer, all of `writes` hold, and none of `none`."""
        key = (tuple(map(id, writes)), id(reads))
        if key in self.seen:
            return
        self.seen.add(key)
        self._added.append(key)
        flat = self._flat(writes, self._writer)
        if flat is None:  # nothing is written
            return
        self._written(_Written(tuple(flat), none), reads, path)

    def _written(self, writes: _Written, reads: Schema, path: str) -> None:
        with self._pair.level():
            wanted = self._flat([reads], self._reader)
            if wanted is None:
                self._pair.say(
                    path, self._pair.either(reads="is no longer allowed", writes="is new, and was not allowed")
                )
            elif wanted:
                self._alternatives(writes, wanted, path)

    def _flat(self, schemas: Iterable[Schema], document: JsonSchema) -> list[Plain] | None:
        """Return all schemas that have to hold, with ``$ref`` and ``allOf`` resolved; None: no value is allowed."""
        found: list[Plain] = []
        seen: set[int] = set()
        todo = list(schemas)[::-1]
        while todo:
            self._pair.step()
            schema = todo.pop()
            if isinstance(schema, bool):
                if not schema:
                    return None
                continue
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            found.append(schema)
            if "$ref" in schema:
                todo.append(document.targets[schema["$ref"]])
            todo += schema.get("allOf", ())[::-1]
        return [schema for schema in found if schema.keys() - ANNOTATIONS - {"$ref", "allOf"}]

    # -- branches --------------------------------------------------------------------------------------------------

    def _alternatives(self, writes: _Written, reads: list[Plain], path: str) -> None:
        """Compare each branch of the writer's schemas separately, and each pair only once."""
        key = (tuple(map(id, (*writes.all, *writes.none))), tuple(map(id, reads)))
        if key in self.seen:
            return
        self.seen.add(key)
        self._added.append(key)
        for at, schema in enumerate(writes.all):
            for word in ("anyOf", "oneOf"):
                if word not in schema:
                    continue
                others = (*writes.all[:at], *self._rest(schema, word), *writes.all[at + 1 :])
                for branch in schema[word]:
                    flat = self._flat([branch], self._writer)
                    if flat is None:
                        continue
                    none = tuple(each for each in schema[word] if each is not branch) if word == "oneOf" else ()
                    with self._pair.level():
                        self._alternatives(_Written((*others, *flat), (*writes.none, *none)), reads, path)
                return
        if not types_of(writes.all):
            return  # there are no such values
        self._unknown(writes, reads, path)
        for schema in reads:
            self._plain(writes, schema, path)

    def _rest(self, schema: Plain, word: str) -> list[Plain]:
        """Return a schema without a keyword; empty if the rest has no effect."""
        key = (id(schema), word)
        if key not in self.rests:
            rest = {name: value for name, value in schema.items() if name != word}
            self.rests[key] = [rest] if rest.keys() - ANNOTATIONS - {"$ref", "allOf"} else []
        return self.rests[key]

    def _plain(self, writes: _Written, reads: Plain, path: str) -> None:
        self._pair.step(len(writes.all))
        for word in ("anyOf", "oneOf"):
            if word in reads:
                self._one_of(writes, reads[word], path, only=word == "oneOf")
        if not compare_types(writes.all, reads, self._pair, path):
            return
        compare_values(writes.all, reads, self._pair, path)
        compare_bounds(writes.all, reads, self._pair, path)
        kinds = types_of(writes.all)
        if "object" in kinds:
            self._objects(writes.all, reads, path)
        if "array" in kinds:
            self._arrays(writes.all, reads, path)

    def _one_of(self, writes: _Written, branches: Sequence[Schema], path: str, *, only: bool) -> None:
        """Check that the written values match one of the reader's branches, separately for each type of values."""
        kinds, values = types_of(writes.all), values_of(writes.all)
        if len(kinds) > 1:
            for kind in sorted(kinds):
                narrowed: Plain = {"type": kind}
                if values is not None:
                    narrowed = {"enum": [value for value in values if type_of(value) == kind]}
                    self._pair.step(len(values))
                self.kept.append(narrowed)
                self._one_of(_Written((*writes.all, narrowed), writes.none), branches, path, only=only)
            return
        closest: Pair | None = None
        for branch in branches:
            tried = self._tried(writes, branch, path)
            if not tried.found:
                if only:
                    self._others(writes, [each for each in branches if each is not branch], path)
                return
            if closest is None or len(tried.found) < len(closest.found):
                closest = tried
        if closest is not None and len(branches) > 1:
            alike = [branch for branch in branches if self._types(branch, self._reader) & kinds]
            if len(alike) == 1:
                closest = self._tried(writes, alike[0], path)
            elif not alike:
                shown = " or ".join(sorted({kind for branch in branches for kind in self._types(branch, self._reader)}))
                self._pair.differ(path, writes=" or ".join(sorted(kinds)), reads=shown or "nothing")
                return
        for difference in closest.found if closest is not None else ():
            self._pair.say(*difference)

    def _tried(self, writes: _Written, reads: Schema, path: str) -> Pair:
        """Return the differences that a branch would report."""
        tried = self._pair.tried()
        resolution = _Resolution(self._writer, self._reader, tried, self, strict=self._strict)
        resolution._written(writes, reads, path)
        self.seen.difference_update(resolution._added)
        return tried

    def _others(self, writes: _Written, others: Sequence[Schema], path: str) -> None:
        """Check that the other branches of a ``oneOf`` exclude the written values, as only one branch may apply."""
        for other in others:
            if not self._excluded(writes, other):
                self._pair.say(path, "it is unknown whether only one branch of oneOf applies")
                return

    def _excluded(self, writes: _Written, other: Schema) -> bool:
        flat = self._flat([other], self._reader)
        if flat is None or not _overlap(types_of(writes.all), types_of(flat)):
            return True
        if self._told_apart(writes.all, flat):
            return True
        for none in writes.none:
            backwards = _Resolution(self._reader, self._writer, self._pair.tried(), self, strict=True)
            backwards.schemas([other], none, "")
            backwards.seen.difference_update(backwards._added)
            if not backwards._pair.found:
                return True
        return False

    def _told_apart(self, writes: Sequence[Plain], reads: Sequence[Plain]) -> bool:
        """Return whether a required property, or the value itself, has disjoint sets of values in both."""
        names = {name for schema in writes for name in schema.get("required", ())}
        pairs: list[tuple[list[Schema], list[Schema]]] = [(list(writes), list(reads))]
        pairs += [(_property(writes, name), _property(reads, name)) for name in names]
        for some, others in pairs:
            ours = self._flat(some, self._writer)
            theirs = self._flat(others, self._reader)
            if ours is None or theirs is None:
                return True
            for one in ours:
                for another in theirs:
                    values, more = own_values(one), own_values(another)
                    if (
                        values is not None
                        and more is not None
                        and not set(map(key_of, values)) & set(map(key_of, more))
                    ):
                        return True
        return False

    def _types(self, schema: Schema, document: JsonSchema) -> frozenset[str]:
        flat = self._flat([schema], document)
        return frozenset() if flat is None else types_of(flat)

    # -- unknown keywords ------------------------------------------------------------------------------------------

    def _unknown(self, writes: _Written, reads: Sequence[Plain], path: str) -> None:
        """Report keywords that are not understood, unless they are the same in both schemas."""
        kinds = types_of(writes.all)
        elsewhere = {word for kind, words in _ONLY_OF.items() if kind not in kinds for word in words}
        for schemas, others in ((reads, writes.all), (writes.all, reads)):
            for schema in schemas:
                self._pair.step()
                for word in schema.keys() - _UNDERSTOOD - elsewhere:
                    if word.startswith("x-") or (schemas is writes.all and _restricts(word)):
                        continue
                    same = any(word in other and key_of(other[word]) == key_of(schema[word]) for other in others)
                    if not same or word in _REFERENCES or _has_references(schema[word]):
                        self._pair.say(
                            path, f"{word!r} is not understood here, and may have another meaning than before"
                        )

    # -- objects and lists -----------------------------------------------------------------------------------------

    def _objects(self, writes: Sequence[Plain], reads: Plain, path: str) -> None:
        required = {name for schema in writes for name in schema.get("required", ())}
        named = {name for schema in writes for name in schema.get("properties", ())}
        for name in reads.get("required", ()):
            self._pair.step()
            if name not in required:
                was = "was optional" if name in named else "is new"
                self._pair.say(
                    below(path, name),
                    self._pair.either(
                        reads=f"{was}, and is required now",
                        writes="is optional now, and was required" if name in named else "is gone, and was required",
                    ),
                )
        if not reads.keys() & {"properties", "patternProperties", "additionalProperties"}:
            return
        if not self._patterns(writes, reads, path):
            return
        for name in dict.fromkeys((*sorted(named), *reads.get("properties", ()))):
            self._pair.step(len(writes))
            if self._is_written(writes, name):
                self.schemas(_property(writes, name), _property_of(reads, name), below(path, name))
        if self._is_written(writes, None):
            self.schemas(_others_of(writes), reads.get("additionalProperties", True), f"{path}{{}}")

    def _is_written(self, schemas: Sequence[Plain], name: str | None) -> bool:
        """Return whether a writer may write the property `name`; None: any property that is not named."""
        says_any = self._strict
        for schema in schemas:
            additional = schema.get("additionalProperties")
            if name is not None and name in schema.get("properties", {}):
                says_any = True
            elif additional is False:
                return False
            elif additional is not None:
                says_any = True
        return says_any

    def _patterns(self, writes: Sequence[Plain], reads: Plain, path: str) -> bool:
        """Compare patterns of names. They have to be the same, as matching a pattern could take for ever.

        Returns False if they are not.
        """
        ours = {pattern: value for schema in writes for pattern, value in schema.get("patternProperties", {}).items()}
        theirs: Mapping[str, Schema] = reads.get("patternProperties", {})
        known = {name for schema in writes for name in schema.get("properties", ())}
        if ours.keys() != theirs.keys() or (ours and reads.get("properties", {}).keys() - known):
            self._pair.say(path, "'patternProperties' is not understood where its patterns are others than before")
            return False
        for pattern, value in ours.items():
            self.schemas([value], theirs[pattern], f"{path}{{}}")
        return True

    def _arrays(self, writes: Sequence[Plain], reads: Plain, path: str) -> None:
        first, rest = _items(reads)
        most = min((schema["maxItems"] for schema in writes if "maxItems" in schema), default=None)
        ours = [_items(schema) for schema in writes]
        length = max([len(first), *(len(prefix) for prefix, _ in ours)])
        for at in range(length):
            self._pair.step(len(ours))
            if most is not None and at >= most:
                return
            there = [prefix[at] if at < len(prefix) else after for prefix, after in ours]
            if any(each is False for each in there):
                return
            self.schemas(there, first[at] if at < len(first) else rest, f"{path}[{at}]")
        if most is None or most > length:
            self.schemas([after for _, after in ours], rest, f"{path}[]")


def _property(schemas: Sequence[Plain], name: str) -> list[Schema]:
    return [_property_of(schema, name) for schema in schemas]


def _property_of(schema: Plain, name: str) -> Schema:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    return properties[name] if name in properties else schema.get("additionalProperties", True)


def _others_of(schemas: Sequence[Plain]) -> list[Schema]:
    return [schema.get("additionalProperties", True) for schema in schemas]


def _items(schema: Plain) -> tuple[Sequence[Schema], Schema]:
    """Return the schemas of the first items, and the schema of the rest, by the keywords of any draft."""
    items: Any = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", ()), items


def _overlap(some: frozenset[str], others: frozenset[str]) -> bool:
    both = some & others
    numbers = {"integer", "number"}
    return bool(both or (some & numbers and others & numbers))


def _restricts(word: str) -> bool:
    """Return whether a keyword only restricts values: such a condition on the writer's side does no harm."""
    return word in {each for words in _ONLY_OF.values() for each in words} | {"not", "if", "then", "else"}


def _has_references(value: Any) -> bool:
    """Return whether a value has references, so that the same text may have another meaning."""
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            if "$ref" in each or _REFERENCES & each.keys():
                return True
            todo += each.values()
        elif isinstance(each, list):
            todo += each
    return False
