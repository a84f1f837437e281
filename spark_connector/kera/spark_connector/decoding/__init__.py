"""Values that name their schemas, as columns of Spark: `from_kera`.

The driver asks the registry for the versions of a subject, once, when a column is made; executors ask nobody.

============  ============================================================================================
`function`    what users call; what is done of it by Spark itself, and what by Python workers
`subject`     what the driver has fetched of a subject
`workers`     what a Python worker does: Arrow in, Arrow out
`types`       one type for each schema: of Avro (`avro_types`), JSON (`json_types`), Protobuf (`protobuf_types`)
============  ============================================================================================
"""
