"""Schemas of the values and keys of records, which a registry keeps: what all parts agree on about them. No I/O.

Streams with columns of their own have a schema of Arrow's besides, and need none of this: see `kera.core.schema`.
"""
