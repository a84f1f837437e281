"""Whether a version of a schema may follow another one: the rules of Arrow, Avro, JSON Schema and Protobuf.

`kera.core.schemas` has the part that clients and daemons share.
"""
