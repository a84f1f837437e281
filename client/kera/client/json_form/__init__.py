"""Rows and records as JSON, without loss: the form of ``kera consume --json`` and ``kera produce --json``.

Copies to and from files of JSON lines and the web console use the same form. ``docs/json.md`` describes it for users.

Promises: `rows_of_lines` and `records_of_lines` read back what `row_lines` and `record_lines` write, as the same values
of the same types, for all types that a stream may have. All output is valid JSON. Input is stored exactly, or refused
with an error that names the line, and the field or the column of the line.

`writing` and `reading` convert columns, `building` and `leaves` make arrays from parsed values, `records` has the form
of records of streams without their own columns, `texts` parses and lays out JSON. Nothing here does I/O.
"""

from kera.client.json_form.reading import rows_of_lines
from kera.client.json_form.records import record_lines, records_of_lines
from kera.client.json_form.texts import laid_out
from kera.client.json_form.writing import row_lines, row_texts, texts_of

__all__ = ["laid_out", "record_lines", "records_of_lines", "row_lines", "row_texts", "rows_of_lines", "texts_of"]
