"""Applies the logical types of a reader's Avro schema to values of a writer whose schema has other logical types.

fastavro converts by the writer's schema. The registry lets a field change from a plain number to a date, and the other
way round: the reader decides what the number means. So the writer's parsed schema takes over the reader's logical
types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ATTRIBUTES = ("logicalType", "precision", "scale")
_NAMED = {"record", "error", "enum", "fixed"}


class Adoption:
    """Transfers logical types from a reader's parsed schema to a writer's; takes the named types of each."""

    def __init__(self, written: dict[str, Any], wanted: dict[str, Any]) -> None:
        self._written = written
        self._wanted = wanted
        self._seen: set[tuple[str, str]] = set()

    def adopted(self, writes: Any, reads: Any) -> Any:
        """Return `writes` with the logical types of `reads`, as far as both match. Changes named types in place."""
        if isinstance(writes, list):
            return [self.adopted(each, reads) for each in writes]
        spelled = writes if not isinstance(writes, str) else self._written.get(writes, writes)
        if isinstance(reads, list):
            reads = next((each for each in reads if self._go_together(spelled, each)), None)
        reads = self._wanted.get(reads, reads) if isinstance(reads, str) else reads
        if not self._go_together(spelled, reads):
            return writes
        kind = _kind_of(spelled)
        if kind in _NAMED:
            self._named(kind, spelled, reads)
            return writes
        if kind in {"array", "map"}:
            inner = "items" if kind == "array" else "values"
            return {**spelled, inner: self.adopted(spelled[inner], reads[inner])}
        primitive = dict(spelled) if isinstance(spelled, Mapping) else {"type": kind}
        _take_over(primitive, reads)
        return primitive if "logicalType" in primitive else kind

    def _named(self, kind: str, writes: dict[str, Any], reads: Mapping[str, Any]) -> None:
        if kind == "fixed":
            _take_over(writes, reads)
        elif kind != "enum":
            self._of_record(writes, reads)

    def _of_record(self, writes: Mapping[str, Any], reads: Mapping[str, Any]) -> None:
        names = (writes["name"], reads["name"])
        if names in self._seen:
            return
        self._seen.add(names)
        wanted = {alias: field for field in reads["fields"] for alias in field.get("aliases", ())}
        wanted |= {field["name"]: field for field in reads["fields"]}
        for field in writes["fields"]:
            if field["name"] in wanted:
                field["type"] = self.adopted(field["type"], wanted[field["name"]]["type"])

    def _go_together(self, writes: Any, reads: Any) -> bool:
        reads = self._wanted.get(reads, reads) if isinstance(reads, str) else reads
        kind = _kind_of(writes)
        if reads is None or isinstance(reads, list) or kind != _kind_of(reads):
            return False
        if kind not in _NAMED:
            return True
        own, aliases = writes["name"].rpartition(".")[2], reads.get("aliases", ())
        return own == reads["name"].rpartition(".")[2] or writes["name"] in aliases or own in aliases


def _kind_of(schema: Any) -> Any:
    return schema["type"] if isinstance(schema, Mapping) else schema


def _take_over(writes: dict[str, Any], reads: Any) -> None:
    for name in _ATTRIBUTES:
        writes.pop(name, None)
        if isinstance(reads, Mapping) and name in reads:
            writes[name] = reads[name]
