"""Whether a Protobuf message can read data written as another. Pure.

Fields are matched by their numbers. A field may be renamed, and unknown fields are ignored. A type may become a wider
one with the same encoding. Some changes are refused although the data could be decoded: values that would be cut off
(int64 read as int32), bytes read as text, another sign, several values read as one, a number that had been reserved, a
name with another number, other defaults, and fields of which only one counts because they are now in a oneof.
"""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Kind

from kera.server.schemas.differences import Pair, below
from kera.server.schemas.protobuf.parsing import ProtoEnum, ProtoField, ProtoMessage, ProtoSchema

_WIDER = {
    Kind.TYPE_BOOL: {Kind.TYPE_INT32, Kind.TYPE_INT64, Kind.TYPE_UINT32, Kind.TYPE_UINT64},
    Kind.TYPE_INT32: {Kind.TYPE_INT64},
    Kind.TYPE_UINT32: {Kind.TYPE_UINT64, Kind.TYPE_INT64},
    Kind.TYPE_ENUM: {Kind.TYPE_INT32, Kind.TYPE_INT64},
    Kind.TYPE_SINT32: {Kind.TYPE_SINT64},
    Kind.TYPE_STRING: {Kind.TYPE_BYTES},
}
SHOWN_MAX = 8


def compare(writer: ProtoSchema, reader: ProtoSchema, pair: Pair) -> None:
    """Report in `pair` why `reader` cannot read data that were written with `writer`."""
    _Resolution(writer, reader, pair).messages(writer.root, reader.root, "")


class _Resolution:
    def __init__(self, writer: ProtoSchema, reader: ProtoSchema, pair: Pair) -> None:
        self._writer = writer
        self._reader = reader
        self._pair = pair
        self._seen: set[tuple[str, str]] = set()

    def messages(self, writes: ProtoMessage, reads: ProtoMessage, path: str) -> None:
        """Compare two messages, each pair once."""
        if (writes.name, reads.name) in self._seen:
            return
        self._seen.add((writes.name, reads.name))
        with self._pair.level():
            numbers = {field.name: field.number for field in writes.fields.values()}
            for number, field in reads.fields.items():
                self._pair.step()
                known = writes.fields.get(number)
                at = below(path, field.name)
                if known is not None:
                    self._fields(known, field, at)
                    continue
                if field.required:
                    self._pair.say(
                        at, self._pair.either(reads="is new, and required", writes="is gone, and was required")
                    )
                if field.name in numbers:
                    self._pair.differ(at, writes=f"number {numbers[field.name]}", reads=f"number {number}")
            self._oneofs(writes, reads, path)
            self._reserved(*((writes, reads) if self._pair.new_reads else (reads, writes)), path)

    def _fields(self, writes: ProtoField, reads: ProtoField, path: str) -> None:
        if reads.required and not writes.required:
            self._pair.differ(path, writes="optional", reads="required")
        if writes.repeated and not reads.repeated:
            self._pair.differ(path, writes=writes.word, reads=reads.word)
            return
        if writes.default != reads.default:
            self._pair.differ(path, writes=f"default {writes.default!r}", reads=f"default {reads.default!r}")
        if writes.kind != reads.kind:
            if reads.kind not in _WIDER.get(writes.kind, ()) or writes.repeated != reads.repeated:  # type: ignore[call-overload]
                self._pair.differ(path, writes=writes.word, reads=reads.word)
        elif writes.kind in {Kind.TYPE_MESSAGE, Kind.TYPE_GROUP}:
            self.messages(self._writer.messages[writes.type_name], self._reader.messages[reads.type_name], path)
        elif writes.kind == Kind.TYPE_ENUM:
            self._enums(self._writer.enums[writes.type_name], self._reader.enums[reads.type_name], path)

    def _enums(self, writes: ProtoEnum, reads: ProtoEnum, path: str) -> None:
        self._pair.step(len(writes.values))
        gone = [names[0] for number, names in writes.values.items() if number not in reads.values]
        if gone and reads.closed:
            shown = ", ".join(gone[:SHOWN_MAX]) + (", …" if len(gone) > SHOWN_MAX else "")
            self._pair.say(
                path,
                self._pair.either(
                    reads=f"enum {reads.name} has no longer {shown}", writes=f"enum {writes.name} has {shown} more"
                ),
            )
        for number, names in writes.values.items():
            others = reads.values.get(number, ())
            if others and not set(names) & set(others):
                self._pair.differ(path, writes=f"{number} is {names[0]}", reads=f"{number} is {others[0]}")

    def _oneofs(self, writes: ProtoMessage, reads: ProtoMessage, path: str) -> None:
        """Compare fields that share a oneof at the reader: the last one of them counts."""
        together: dict[str, list[ProtoField]] = {}
        for number, field in reads.fields.items():
            self._pair.step()
            known = writes.fields.get(number)
            if field.oneof and known is not None:
                together.setdefault(field.oneof, []).append(known)
        for name, fields in together.items():
            if len(fields) > 1 and (len({field.oneof for field in fields}) > 1 or not fields[0].oneof):
                shown = ", ".join(field.name for field in fields[:SHOWN_MAX])
                self._pair.say(
                    path,
                    self._pair.either(
                        reads=f"{shown} are in oneof {name} now, so that only one of them counts",
                        writes=f"{shown} were in oneof {name}, so that only one of them counts",
                    ),
                )

    def _reserved(self, old: ProtoMessage, new: ProtoMessage, path: str) -> None:
        """Report the use of a number or name that was reserved: old values may still have their former meaning."""
        for number, field in new.fields.items():
            self._pair.step(1 + len(old.reserved))
            if number not in old.fields and any(start <= number < end for start, end in old.reserved):
                self._pair.say(below(path, field.name), f"its number {number} was reserved")
            if field.name in old.reserved_names:
                self._pair.say(below(path, field.name), "its name was reserved")
