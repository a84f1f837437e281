"""Types of Avro, each with a value: in Python, and as the default in a schema."""

import itertools
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

from hypothesis import strategies as st


class Typed(NamedTuple):
    """A type, one of its values, and the JSON of the same value as a default."""

    type: Any
    value: Any
    default: Any


_NAMES = itertools.count()
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROS_MIN = (datetime.min.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
MICROS_MAX = (datetime.max.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


def _name() -> str:
    return f"T{next(_NAMES)}"


def _latin(data: bytes) -> str:
    return data.decode("latin-1")


def _ints(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << bits), (1 << bits) - 1) | st.sampled_from([-(1 << bits), (1 << bits) - 1, 0])


def _logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def _moment(micros: int, *, local: bool) -> datetime:
    found = EPOCH + timedelta(microseconds=micros)
    return found.replace(tzinfo=None) if local else found


def _decimal(unscaled: int, scale: int, size: int | None) -> Typed:
    data = unscaled.to_bytes(size or (unscaled.bit_length() + 8) // 8, "big", signed=True)
    kind = "bytes" if size is None else {"type": "fixed", "name": _name(), "size": size}
    known = kind if isinstance(kind, dict) else {"type": kind}
    sign, digits = int(unscaled < 0), tuple(int(each) for each in str(abs(unscaled)))
    value = Decimal((sign, digits, -scale))
    return Typed({**known, "logicalType": "decimal", "precision": 18, "scale": scale}, value, _latin(data))


def _moments() -> st.SearchStrategy[Typed]:
    micros = st.integers(MICROS_MIN, MICROS_MAX) | st.sampled_from([MICROS_MIN, MICROS_MAX, -1, 0])
    return st.one_of(
        st.builds(
            lambda at, local: Typed(
                _logical("long", f"{'local-' * local}timestamp-micros"), _moment(at, local=local), at
            ),
            micros,
            st.booleans(),
        ),
        st.builds(
            lambda at, local: Typed(
                _logical("long", f"{'local-' * local}timestamp-millis"),
                _moment(at // 1000 * 1000, local=local),
                at // 1000,
            ),
            micros,
            st.booleans(),
        ),
        st.dates().map(lambda day: Typed(_logical("int", "date"), day, (day - date(1970, 1, 1)).days)),
        st.times().map(
            lambda at: Typed(
                _logical("long", "time-micros"),
                at,
                ((at.hour * 60 + at.minute) * 60 + at.second) * 1_000_000 + at.microsecond,
            )
        ),
        st.builds(
            lambda h, m, s, ms: Typed(
                _logical("int", "time-millis"), time(h, m, s, ms * 1000), ((h * 60 + m) * 60 + s) * 1000 + ms
            ),
            st.integers(0, 23),
            st.integers(0, 59),
            st.integers(0, 59),
            st.integers(0, 999),
        ),
    )


def leaves() -> st.SearchStrategy[Typed]:
    """Every type that contains no other types."""
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    doubles = st.floats(allow_nan=False, allow_infinity=False)
    unscaled = st.integers(-(10**18) + 1, 10**18 - 1) | st.sampled_from([0, -1, 127, 128, -128, -129])
    return st.one_of(
        st.just(Typed("null", None, None)),
        st.booleans().map(lambda each: Typed("boolean", each, each)),
        _ints(31).map(lambda each: Typed("int", each, each)),
        _ints(63).map(lambda each: Typed({"type": "long"}, each, each)),
        floats.map(lambda each: Typed("float", each, each)),
        doubles.map(lambda each: Typed("double", each, each)),
        st.integers(-1000, 1000).map(lambda each: Typed({"type": "double"}, float(each), each)),
        st.text(max_size=5).map(lambda each: Typed("string", each, each)),
        st.binary(max_size=5).map(lambda each: Typed("bytes", each, _latin(each))),
        st.binary(max_size=5).map(
            lambda each: Typed({"type": "fixed", "name": _name(), "size": len(each)}, each, _latin(each))
        ),
        st.binary(min_size=12, max_size=12).map(
            lambda each: Typed(
                {"type": "fixed", "name": _name(), "size": 12, "logicalType": "duration"}, each, _latin(each)
            )
        ),
        st.sampled_from("ABC").map(
            lambda each: Typed({"type": "enum", "name": _name(), "symbols": ["A", "B", "C"]}, each, each)
        ),
        st.uuids().map(lambda each: Typed(_logical("string", "uuid"), UUID(str(each)), str(each))),
        st.builds(_decimal, unscaled, st.integers(0, 18), st.sampled_from([None, 8, 12])),
        _moments(),
    )


def _of_record(fields: list[tuple[Typed, bool]]) -> Typed:
    """A record whose default leaves out the fields that have their own defaults."""
    types, value, default = [], {}, {}
    for number, (each, own) in enumerate(fields):
        name = f"f{number}"
        types.append({"name": name, "type": each.type, **({"default": each.default} if own else {})})
        value[name] = each.value
        if not own:
            default[name] = each.default
    return Typed({"type": "record", "name": _name(), "fields": types}, value, default)


def _extended(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    return st.one_of(
        inner.map(lambda each: Typed({"type": "array", "items": each.type}, [each.value] * 2, [each.default] * 2)),
        inner.map(lambda each: Typed({"type": "map", "values": each.type}, {"é": each.value}, {"é": each.default})),
        inner.map(lambda each: Typed({"type": "array", "items": each.type}, [], [])),
        st.lists(st.tuples(inner, st.booleans()), max_size=3).map(_of_record),
        inner.filter(lambda each: each.type != "null" and not isinstance(each.type, list)).flatmap(
            lambda each: st.sampled_from(
                [
                    Typed([each.type, "null"], each.value, each.default),
                    Typed(["null", each.type], each.value, each.default),
                    Typed(["null", each.type], None, None),
                ]
            )
        ),
    )


def typed_values() -> st.SearchStrategy[Typed]:
    """Values of every type, nested or not."""
    return st.recursive(leaves(), _extended, max_leaves=4)


def with_field(typed: Typed, *, default: bool) -> dict[str, Any]:
    """A record with a field of the type after another field, with or without the default."""
    field = {"name": "f", "type": typed.type, **({"default": typed.default} if default else {})}
    return {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}, field]}


WITHOUT_FIELD: dict[str, Any] = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}
