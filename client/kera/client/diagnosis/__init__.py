"""Diagnoses a cluster, for ``kera cluster health``, ``kera doctor``, ``kera top`` and the console.

findings  ok, warning or problem, with advice: as text, as JSON, as an exit code
asking    asks the coordinator and each daemon
cluster   judges their answers; pure
"""
