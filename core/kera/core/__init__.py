"""Shared by all parts of KerA: the chunk format, ids, errors, settings, telemetry and the RPC layer.

Nothing here decides anything about streams: daemons and clients do. ``kera.core`` imports no other part.
"""
