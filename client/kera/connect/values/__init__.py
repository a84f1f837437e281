"""Values of records that name their schema: rows and JSON become Avro, or JSON with a schema of the registry.

`source` wraps any source of a copy, and is all that others use. `columns` derives schemas from columns, `subject` says
which schema of the registry a copy writes with, `avro` and `json_values` encode. Repeating a piece encodes it into the
same number of records with the same keys, so the target recognises it whatever the schema is by then.
"""
