"""A stream as the document that ``kera stream list`` and ``describe`` print."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kera.client import EntryBounds, StreamDescription


def stream_document(stream: StreamDescription, bounds: dict[int, list[EntryBounds]] | None = None) -> dict[str, Any]:
    """`stream` as JSON; with `bounds`, also what each entry holds. Offsets have their older names beside them."""
    document: dict[str, Any] = {
        "name": stream.name,
        "stream_id": stream.stream_id,
        "created_us": stream.created_us,
        "created_by": stream.created_by,
        "config": dataclasses.asdict(stream.config),
        "typed": stream.typed,
        "schema_id": stream.schema_id,
        "schema": [
            {"name": field.name, "type": str(field.type), "nullable": field.nullable} for field in stream.schema
        ],
        "key_column": stream.key_column,
        "timestamp_column": stream.timestamp_column,
        "streamlets": [
            {
                "streamlet": streamlet,
                "broker_id": assignment.broker_id,
                "broker_epoch": assignment.broker_epoch,
            }
            for streamlet, assignment in sorted(stream.assignments.items())
        ],
    }
    if bounds is not None:
        for streamlet in document["streamlets"]:
            streamlet["entries"] = [
                {
                    "first_offset": bound.first_record,
                    "end_offset": bound.next_record,
                    "first_record": bound.first_record,
                    "next_record": bound.next_record,
                    "length_bytes": bound.length_bytes,
                    "start": bound.start._asdict(),
                    "end": bound.end._asdict(),
                }
                for bound in bounds.get(streamlet["streamlet"], [])
            ]
    return document
