"""Whether a schema of Avro can read data written with another: the specification's schema resolution. Pure.

It is stricter where data could be read, but with another meaning, or not in all cases:

* bytes are not read as text, as they need not be text; nor in a union where text comes before bytes;
* logical types that differ (``timestamp-millis``, ``timestamp-micros``) do not match, nor decimals of another scale;
* in a union, the first branch whose name or type matches reads a value, as in fastavro; a later branch that could read
  it does not count;
* if data were written without a union and are read with one, the type must be spelled out in both schemas, or referred
  to by name in both: fastavro resolves nothing else there.
"""

from __future__ import annotations

from collections.abc import Sequence

from kera.server.schemas.avro.types import (
    SHOWN_MAX,
    Array,
    AvroSchema,
    Enum,
    Field,
    Fixed,
    Logical,
    Map,
    Named,
    Primitive,
    Record,
    Reference,
    Type,
    Union,
    word,
)
from kera.server.schemas.differences import Pair, below

_PROMOTIONS = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
}
_MATCHES = _PROMOTIONS | {("bytes", "string")}
"""Pairs of written and read types that match when a branch of a union is chosen."""


def compare(writer: AvroSchema, reader: AvroSchema, pair: Pair) -> None:
    """Report in `pair` why `reader` cannot read data that were written with `writer`."""
    _Resolution(writer, reader, pair).types(writer.root, reader.root, "")


class _Resolution:
    def __init__(self, writer: AvroSchema, reader: AvroSchema, pair: Pair) -> None:
        self._writer = writer
        self._reader = reader
        self._pair = pair
        self._seen: set[tuple[str, str]] = set()
        """Pairs of named types that were compared, or are being compared."""

    def types(self, writes: Type, reads: Type, path: str) -> None:
        """Compare the types at a path."""
        with self._pair.level():
            if isinstance(writes, Union):
                for branch in writes.branches:
                    self._branch(branch, reads, path)
            elif isinstance(reads, Union):
                self._in_union(writes, reads, path)
            else:
                self._plain(self._writer.resolve(writes), self._reader.resolve(reads), path)

    def _branch(self, writes: Type, reads: Type, path: str) -> None:
        """Compare a branch of the writer's union."""
        chosen = self._chosen(writes, reads.branches if isinstance(reads, Union) else [reads])
        if chosen is None:
            self._pair.say(
                path,
                self._pair.either(
                    reads=f"{word(reads)}, which has none for {word(writes)}, that it could be before",
                    writes=f"can be {word(writes)}, was {word(reads)}",
                ),
            )
        else:
            self._plain(self._writer.resolve(writes), self._reader.resolve(chosen), path)

    def _in_union(self, writes: Type, reads: Union, path: str) -> None:
        chosen = self._chosen(writes, reads.branches)
        if chosen is None:
            self._pair.differ(path, writes=word(writes), reads=word(reads))
            return
        known = self._writer.resolve(writes)
        if isinstance(known, Named) and isinstance(writes, Reference) != isinstance(chosen, Reference):
            self._pair.say(
                path,
                f"{known.name} is now within a union, or was, and is spelled out here on one side and only named on the"
                " other, which readers in Python do not resolve: define it in the same place",
            )
        self._plain(known, self._reader.resolve(chosen), path)

    def _chosen(self, writes: Type, branches: Sequence[Type]) -> Type | None:
        """Return the first branch that matches the name or type of the writer, the same type rather than a wider one.

        For bytes, fastavro chooses text if that comes before bytes.
        """
        first = next((branch for branch in branches if self._matches(writes, branch)), None)
        if isinstance(writes, Primitive) and isinstance(first, Primitive) and first.kind != "string":
            same = (each for each in branches if isinstance(each, Primitive) and each.kind == writes.kind)
            return next(same, first)
        return first

    def _matches(self, writes: Type, reads: Type) -> bool:
        self._pair.step()
        if isinstance(writes, Union) or isinstance(reads, Union):
            return True
        writes, reads = self._writer.resolve(writes), self._reader.resolve(reads)
        match writes, reads:
            case Fixed(), Fixed():
                matches = writes.size == reads.size and _same_name(writes, reads)
            case ((Record() | Enum() | Fixed()), (Record() | Enum() | Fixed())):
                matches = _same_name(writes, reads)
            case Array(items), Array(others):
                matches = self._matches(items, others)
            case Map(values), Map(others):
                matches = self._matches(values, others)
            case Primitive(kind), Primitive(other):
                matches = kind == other or (kind, other) in _MATCHES
            case _:
                matches = False
        return matches

    def _plain(self, writes: Type, reads: Type, path: str) -> None:
        """Compare types that are neither unions nor references."""
        match writes, reads:
            case Primitive(), Primitive():
                self._primitives(writes, reads, path)
            case Array(items), Array(others):
                self.types(items, others, f"{path}[]")
            case Map(values), Map(others):
                self.types(values, others, f"{path}{{}}")
            case ((Record() | Enum() | Fixed()), (Record() | Enum() | Fixed())) if type(writes) is type(reads):
                if _same_name(writes, reads):
                    self._named(writes, reads, path)
                else:
                    self._pair.differ(path, writes=word(writes), reads=f"{word(reads)}, without an alias")
            case _:
                self._pair.differ(path, writes=word(writes), reads=word(reads))

    def _primitives(self, writes: Primitive, reads: Primitive, path: str) -> None:
        if (writes.kind != reads.kind and (writes.kind, reads.kind) not in _PROMOTIONS) or _differ(
            writes.logical, reads.logical
        ):
            self._pair.differ(path, writes=word(writes), reads=word(reads))

    def _named(self, writes: Named, reads: Named, path: str) -> None:
        names = (writes.name, reads.name)
        if names in self._seen:
            return
        self._seen.add(names)
        match writes, reads:
            case Fixed(), Fixed():
                if writes.size != reads.size or _differ(writes.logical, reads.logical):
                    self._pair.differ(path, writes=word(writes), reads=word(reads))
            case Enum(), Enum():
                known = frozenset(reads.symbols)
                gone = [symbol for symbol in writes.symbols if symbol not in known]
                self._pair.step(len(writes.symbols))
                if gone and reads.default is None:
                    shown = ", ".join(gone[:SHOWN_MAX]) + (", …" if len(gone) > SHOWN_MAX else "")
                    self._pair.say(
                        path,
                        self._pair.either(
                            reads=f"enum {reads.name} has no longer {shown}, and no default",
                            writes=f"enum {writes.name} has {shown} more, and had no default",
                        ),
                    )
            case Record(), Record():
                self._records(writes, reads, path)
            case _:
                pass

    def _records(self, writes: Record, reads: Record, path: str) -> None:
        known = {name: field for field in reads.fields for name in field.aliases}
        known |= {field.name: field for field in reads.fields}
        found: dict[str, str] = {}
        """The writer's field for each field of the reader."""
        for field in writes.fields:
            self._pair.step()
            into = known.get(field.name)
            if into is None:
                continue
            at = below(path, into.name)
            if into.name in found:
                self._pair.say(at, f"goes by an alias for {found[into.name]} and {field.name}, which are two fields")
                continue
            found[into.name] = field.name
            self.types(field.type, into.type, at)
        for field in reads.fields:
            self._pair.step()
            if field.name not in found and not field.has_default:
                self._lacking(field, path)

    def _lacking(self, field: Field, path: str) -> None:
        self._pair.say(
            below(path, field.name),
            self._pair.either(reads="is new, and has no default", writes="is gone, and had no default"),
        )


def _same_name(writes: Named, reads: Named) -> bool:
    """Return whether the names match: without their namespaces, or by an alias of the reader."""
    own = writes.name.rpartition(".")[2]
    return own == reads.name.rpartition(".")[2] or writes.name in reads.aliases or own in reads.aliases


def _differ(writes: Logical | None, reads: Logical | None) -> bool:
    """Return whether values have different meanings. A type without a logical type agrees with any."""
    return writes is not None and reads is not None and writes != reads
