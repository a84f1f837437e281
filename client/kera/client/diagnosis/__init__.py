"""Finds out how a cluster is, for ``kera cluster health``, ``kera doctor``, ``kera top`` and the console.

findings  ok, warning or problem, with what to do: as text, as JSON, as an exit code
asking    asks the coordinator and each daemon
cluster   judges their answers; pure
"""
