"""`from_kera`: a column of values that name their schemas, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa

from kera.core.errors import InvalidArgument
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import FRAME_BYTES
from kera.spark_connector.columns import columns_of
from kera.spark_connector.decoding import json_types
from kera.spark_connector.decoding.subject import Subject, fetch
from kera.spark_connector.decoding.workers import Decoder, Undecodable
from kera.spark_connector.options.connecting import connection_of
from kera.spark_connector.portal import shared

if TYPE_CHECKING:
    from pyspark.sql import Column

_REST = 1 << 30
"""Length for the rest of a value, larger than any value."""


def from_kera(
    column: Column | str, subject: str, options: Mapping[str, str], *, undecodable: Undecodable = "fail"
) -> Column:
    """Decode values of a subject (``STREAM-value``, ``STREAM-key``) into a column with the fields of its schema.

    `options` are the options for reading the stream, at least ``kera.bootstrap.servers``. This call fetches the
    versions of the subject. The newest version defines the fields, and values of older versions are converted to it.
    Python workers decode Avro and Protobuf; they need ``kera[serializers]``. Spark itself decodes JSON, even values
    that do not name their schemas.

    `undecodable`: ``fail`` ends the query at a value that cannot be read; with ``null`` such a value is null (for JSON,
    all of its fields are). Raises `InvalidArgument` for a schema that cannot be a column, with the path to that part,
    `UnknownSubject`, and the errors of a client that cannot reach the cluster.
    """
    if undecodable not in get_args(Undecodable):
        raise InvalidArgument(f"undecodable is {undecodable!r}, and takes fail or null", field="undecodable")
    with shared(connection_of({name: str(value) for name, value in options.items()})) as portal:
        found = portal.call(lambda client: fetch(client, subject))
    if found.latest.schema_type is SchemaType.JSON:
        return _json(column, found, undecodable)
    if found.latest.schema_type is SchemaType.ARROW:
        raise InvalidArgument(
            f"subject {subject!r} has schemas of Arrow: its stream has columns, which Spark reads already",
            subject=subject,
        )
    return _decoded(column, Decoder(found, undecodable))


def _json(column: Column | str, subject: Subject, undecodable: Undecodable) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    value = F.col(column) if isinstance(column, str) else column
    payload = F.substring(value, FRAME_BYTES + 1, _REST)
    named = F.substring(value, 1, 1) == F.lit(bytearray(1))
    text = F.when(named, payload).otherwise(value).cast("string")
    kind = _spark_type(json_types.arrow_type_of(subject.latest.definition))
    mode = "FAILFAST" if undecodable == "fail" else "PERMISSIVE"
    return F.from_json(text, kind, {"mode": mode})


def _decoded(column: Column | str, decoder: Decoder) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    kind = _spark_type(decoder.arrow_type)
    arrow_udf: Any = getattr(F, "arrow_udf", None)
    if arrow_udf is None:  # before Spark 4.1
        return F.udf(decoder.row, kind, useArrow=False)(column)  # with Arrow it needs pandas

    def decoded(values: pa.Array) -> pa.Array:  # Spark derives the kind of function from these hints
        return decoder.array(values)

    return arrow_udf(decoded, kind)(column)  # type: ignore[no-any-return]


def _spark_type(kind: pa.DataType) -> Any:
    return columns_of(pa.schema([("value", kind)]), typed=True)["value"].dataType
