"""The format of stored and sent data: chunks, their headers and checksums, payloads, schemas, punctuations.

Pure functions on bytes and Arrow arrays. Functions that also exist in C have their twins in Python here
(`kera.core.native`). No module here opens a file or a connection.
"""
