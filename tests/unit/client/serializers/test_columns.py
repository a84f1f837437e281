"""Models as Arrow columns, and back."""

import dataclasses
import datetime
import enum
import uuid
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NewType, TypeVar

import pyarrow as pa
import pydantic
import pytest

from kera.client import arrow_schema_of
from kera.client.serializers.columns import columns_of
from kera.core.errors import CannotDecode, CannotEncode, InvalidArgument

NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
CODE = uuid.UUID(int=7)
Id = NewType("Id", int)
T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Line:
    price: float
    note: str | None = None


class Address(pydantic.BaseModel):
    city: str


@dataclasses.dataclass
class Everything:
    number: Id
    small: Annotated[int, pa.int32()]
    real: float
    yes: bool
    text: str
    blob: bytes
    at: datetime.datetime
    local: Annotated[datetime.datetime, pa.timestamp("us")]
    day: datetime.date
    time: datetime.time
    span: datetime.timedelta
    cost: Decimal
    exact: Annotated[Decimal, pa.decimal128(10, 2)]
    color: Color
    level: Level
    size: Literal["s", "m"]
    code: uuid.UUID
    line: Line
    address: Address | None
    lines: list[Line]
    numbers: set[int]
    words: tuple[str, ...]
    maybe: list[int | None] | None
    tags: dict[str, int]
    nested: Mapping[str, Sequence[Line]]
    made: int = dataclasses.field(init=False, default=3)


FULL = Everything(
    number=Id(1),
    small=2,
    real=1.5,
    yes=True,
    text="ä",
    blob=b"\xff",
    at=NOON,
    local=NOON.replace(tzinfo=None),
    day=NOON.date(),
    time=datetime.time(1, 2, 3, 4),
    span=datetime.timedelta(microseconds=5),
    cost=Decimal("1.25"),
    exact=Decimal("1.25"),
    color=Color.BLUE,
    level=Level.LOW,
    size="m",
    code=CODE,
    line=Line(1.0, "n"),
    address=Address(city="Bonn"),
    lines=[Line(2.0), Line(3.0, "x")],
    numbers={1, 2},
    words=("a", "b"),
    maybe=[1, None],
    tags={"a": 1},
    nested={"a": [Line(4.0)], "b": []},
)
EMPTY = dataclasses.replace(FULL, address=None, lines=[], numbers=set(), words=(), maybe=None, tags={}, nested={})


class Order(pydantic.BaseModel):
    id: int = pydantic.Field(alias="orderId")
    cost: Decimal = pydantic.Field(max_digits=10, decimal_places=2, default=Decimal("0.00"))
    lines: list[Line] = []
    address: Address | None = None


def round_trip(*rows: Any) -> list[Any]:
    columns = columns_of(type(rows[0]))
    batch = columns.batch(rows, columns.schema, "s")
    batch.validate(full=True)
    assert batch.schema.equals(columns.schema)
    return [columns.row(row) for row in batch.to_pylist()]


def test_each_annotation_has_one_type() -> None:
    schema = arrow_schema_of(Everything)
    line = pa.struct([pa.field("price", pa.float64(), nullable=False), pa.field("note", pa.string())])
    assert {field.name: field.type for field in schema} == {
        "number": pa.int64(),
        "small": pa.int32(),
        "real": pa.float64(),
        "yes": pa.bool_(),
        "text": pa.string(),
        "blob": pa.binary(),
        "at": pa.timestamp("us", tz="UTC"),
        "local": pa.timestamp("us"),
        "day": pa.date32(),
        "time": pa.time64("us"),
        "span": pa.duration("us"),
        "cost": pa.decimal128(38, 18),
        "exact": pa.decimal128(10, 2),
        "color": pa.string(),
        "level": pa.int64(),
        "size": pa.string(),
        "code": pa.string(),
        "line": line,
        "address": pa.struct([pa.field("city", pa.string(), nullable=False)]),
        "lines": pa.list_(pa.field("item", line, nullable=False)),
        "numbers": pa.list_(pa.field("item", pa.int64(), nullable=False)),
        "words": pa.list_(pa.field("item", pa.string(), nullable=False)),
        "maybe": pa.list_(pa.int64()),
        "tags": pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)),
        "nested": pa.map_(
            pa.string(), pa.field("value", pa.list_(pa.field("item", line, nullable=False)), nullable=False)
        ),
    }
    assert {field.name for field in schema if field.nullable} == {"address", "maybe"}
    assert arrow_schema_of(Order).field("cost").type == pa.decimal128(10, 2)
    assert arrow_schema_of(Order).names == ["id", "cost", "lines", "address"]


def test_instances_read_back_the_same() -> None:
    assert round_trip(FULL, EMPTY, FULL) == [FULL, EMPTY, FULL]
    order = Order(orderId=1, cost=Decimal("1.25"), lines=[Line(1.0)])
    assert round_trip(order, order.model_copy(update={"address": Address(city="Bonn")}))[0] == order


class Node(pydantic.BaseModel):
    inner: "Node | None" = None


class Odd:
    pass


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


def with_field(annotation: Any) -> Any:
    return dataclasses.make_dataclass("Model", [("line", dataclasses.make_dataclass("Inner", [("field", annotation)]))])


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (object, "Arrow has no type"),
        (Any, "Arrow has no type"),
        (Odd, "Arrow has no type"),
        (int | str, "one of them, or T"),
        (list, r"list\[int\]"),
        (dict, r"dict\[str, int\]"),
        (tuple[int, str], "make a dataclass"),
        (dict[str | None, int], "names of a map"),
        (Literal["a", 1], "neither all text"),
        (Node, "contains itself"),
        ("Nowhere", "cannot be looked up"),
        (list[list[complex]], "Arrow has no type"),
    ],
)
def test_an_annotation_without_an_arrow_type_is_refused_with_its_path(annotation: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        arrow_schema_of(with_field(annotation))
    assert caught.value.attributes["field"].startswith("Model.line")
    assert annotation == "Nowhere" or "Model.line.field" in caught.value.message


def test_a_generic_model_uses_its_type_arguments() -> None:
    assert arrow_schema_of(Page[int]).field("items").type.value_type == pa.int64()
    assert round_trip(Page[int](items=[1])) == [Page[int](items=[1])]
    with pytest.raises(InvalidArgument, match=r"Page\.items\[\]"):
        arrow_schema_of(Page)


@pytest.mark.parametrize("model", [int, dict, FULL, None, "Order"])
def test_a_class_that_is_not_a_model_is_refused(model: Any) -> None:
    with pytest.raises(InvalidArgument, match="neither a dataclass nor"):
        arrow_schema_of(model)
    with pytest.raises(InvalidArgument, match="no fields"):
        arrow_schema_of(dataclasses.make_dataclass("Empty", []))


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"number": "x"}, "number", "str, not int"),
        ({"number": True}, "number", "bool, not int"),
        ({"number": None}, "number", "does not allow None"),
        ({"number": 1 << 70}, "number", "too large"),
        ({"small": 1 << 40}, "small", "too large"),
        ({"text": "\ud800"}, "text", "surrogates"),
        ({"blob": "x"}, "blob", "str, not bytes"),
        ({"at": NOON.replace(tzinfo=None)}, "at", "no time zone"),
        ({"local": NOON}, "local", "has a time zone"),
        ({"day": NOON}, "day", "datetime, not date"),
        ({"cost": Decimal("1e-30")}, "cost", "[Rr]escal"),
        ({"cost": Decimal("NaN")}, "cost", "NaN"),
        ({"cost": Decimal("-1e-999999999")}, "cost", "no place"),  # the library would end the process here
        ({"cost": Decimal("0e-999999999")}, "cost", "no place"),
        ({"cost": Decimal("1e999999999")}, "cost", "no place"),
        ({"cost": Decimal("1e30")}, "cost", "[Pp]recision"),
        ({"color": "green"}, "color", "'green' is not a valid Color"),
        ({"lines": Line(1.0)}, "lines", "Line, not list"),
        ({"lines": [Line(1.0), Line("x")]}, "lines[].price", "str, not float"),  # type: ignore[arg-type]
        ({"lines": [Line(1.0), None]}, "lines[]", "does not allow None"),
        ({"lines": [Odd()]}, "lines[]", "Odd, not Line"),
        ({"line": None}, "line", "does not allow None"),
        ({"tags": {"a": None}}, "tags{}", "does not allow None"),
        ({"tags": {None: 1}}, "tags{}", "does not allow None"),
        ({"tags": [1]}, "tags", "not a mapping"),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_refused_with_its_row_and_field(
    changes: Any, field: str, words: str
) -> None:
    bad = dataclasses.replace(FULL, **changes)
    columns = columns_of(Everything)
    with pytest.raises(CannotEncode, match=words) as caught:
        columns.batch([FULL, EMPTY, bad, FULL], columns.schema, "orders")
    assert caught.value.attributes["field"] == field
    assert caught.value.attributes["row"] == 2
    assert caught.value.attributes["stream"] == "orders"
    assert f"field {field} of row 2" in caught.value.message


def test_a_row_of_another_model_is_refused() -> None:
    @dataclasses.dataclass
    class Longer(Line):
        more: int = 0

    columns = columns_of(Line)
    with pytest.raises(CannotEncode, match="Longer, not Line"):
        columns.batch([Line(1.0), Longer(1.0)], columns.schema, "s")
    with pytest.raises(CannotEncode, match="int, not Line"):
        columns.batch([Line(1.0), 7], columns.schema, "s")


def test_the_stream_may_have_wider_types_and_more_columns() -> None:
    schema = pa.schema(
        [pa.field("note", pa.large_string()), pa.field("more", pa.int64()), pa.field("price", pa.float32())]
    )
    batch = columns_of(Line).batch([Line(1.5, "x")], schema, "s")
    assert batch.to_pylist() == [{"note": "x", "price": 1.5}]
    for other, words in (
        (pa.schema([("price", pa.float64())]), "no such column"),
        (pa.schema([("price", pa.string()), ("note", pa.string())]), "price"),
    ):
        with pytest.raises(CannotEncode, match=words):
            columns_of(Line).batch([Line(1.5, "x")], other, "s")


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"number": 1},
        {"color": "green"},
        {"code": "no UUID"},
        {"size": "xl"},
        {"line": {"note": "x"}},
        {"number": None},
    ],
)
def test_a_row_that_does_not_fit_the_model_is_refused(row: dict[str, Any]) -> None:
    columns = columns_of(Everything)
    whole = columns.batch([FULL], columns.schema, "s").to_pylist()[0]
    with pytest.raises(CannotDecode):
        columns.row({**whole, **row} if row and row != {"number": 1} else row)


def test_a_column_missing_in_older_rows_reads_as_the_models_default() -> None:
    @dataclasses.dataclass
    class Newer:
        number: int
        color: Color = Color.RED
        text: str | None = "default"

    columns = columns_of(Newer)
    assert columns.row({"number": 1}) == Newer(1)
    assert columns.row({"number": 1, "color": None, "text": None}) == Newer(1, Color.RED, None)
    columns.check(pa.schema([("number", pa.int64())]), "s")
    with pytest.raises(InvalidArgument, match="no column 'number', which Newer needs"):
        columns.check(pa.schema([("other", pa.int64())]), "s")


def test_a_time_outside_of_pythons_years_is_refused() -> None:
    columns = columns_of(Everything)
    whole = columns.batch([FULL], columns.schema, "s").to_pylist()[0]
    for name in ("at", "local", "day"):
        with pytest.raises(CannotDecode, match="its years are 1 to 9999"):
            columns.row({**whole, name: 1 << 60})


def test_pydantic_models_decide_on_time_zones_and_excluded_fields() -> None:
    class Times(pydantic.BaseModel):
        aware: pydantic.AwareDatetime
        naive: pydantic.NaiveDatetime
        secret: str = pydantic.Field("hidden", exclude=True)

    assert arrow_schema_of(Times).types == [pa.timestamp("us", tz="UTC"), pa.timestamp("us")]
    times = Times(aware=NOON, naive=NOON.replace(tzinfo=None))
    assert round_trip(times) == [times]


def test_models_that_would_lose_data_are_refused() -> None:
    class Anything(pydantic.BaseModel, extra="allow"):
        number: int

    class Numbers(pydantic.RootModel[list[int]]):
        pass

    @dataclasses.dataclass
    class Initialised:
        number: int
        other: dataclasses.InitVar[int]

    for model, words in ((Anything, "does not name"), (Numbers, "no fields"), (Initialised, "without 'other'")):
        with pytest.raises(InvalidArgument, match=words):
            arrow_schema_of(model)


def test_models_may_hold_the_values_of_enumerations() -> None:
    class Colored(pydantic.BaseModel, use_enum_values=True):
        colors: list[Color]

    assert round_trip(Colored(colors=[Color.RED])) == [Colored(colors=[Color.RED])]


def test_a_row_that_fails_a_validator_is_refused() -> None:
    class Small(pydantic.BaseModel):
        number: int = pydantic.Field(lt=10)

    with pytest.raises(CannotDecode, match="number: Input should be less than 10"):
        columns_of(Small).row({"number": 10})
