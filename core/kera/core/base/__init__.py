"""The ground floor: clocks, settings, logs, turns of the event loop, files and directories of our own.

Nothing here knows chunks, messages or daemons. Only `kera.core.errors` is below it.
"""
