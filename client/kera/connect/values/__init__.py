"""Values of records that name their schema: encodes rows and JSON as Avro, or as JSON with a schema of the registry.

`source` wraps any source of a copy; other packages use only this module. `columns` derives schemas from columns,
`subject` chooses the schema of the registry with which a copy writes, `avro` and `json_values` encode. A repeated piece
is encoded into the same number of records with the same keys, so the target recognizes it even if the schema has
changed.
"""
