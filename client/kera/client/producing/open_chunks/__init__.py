"""Accepted records and small batches, in open chunks, until these are closed and queued in their lanes.

``records`` and ``batches`` accept, ``accumulator`` and ``gathering`` collect, ``stream_writer`` closes.
"""
