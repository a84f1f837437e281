"""Values that name their schemas, as columns of Spark: `from_kera`.

The driver asks the registry for the versions of a subject once, when a column is made; executors never ask.

============  ============================================================================================
`function`    the function for users, and the division of the work between Spark and Python workers
`subject`     the versions of a subject that the driver has fetched
`workers`     the work of a Python worker: Arrow in, Arrow out
`types`       one type for each schema: of Avro (`avro_types`), JSON (`json_types`), Protobuf (`protobuf_types`)
============  ============================================================================================
"""
