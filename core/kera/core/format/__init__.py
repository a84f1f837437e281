"""The format of what is stored and sent: chunks, their headers and checksums, payloads, schemas, punctuations.

Pure functions on bytes and Arrow arrays. What is done in C has its twin here (`kera.core.native`). Nothing here opens a
file or a connection.
"""
