"""The lowest layer: clocks, settings, logs, turns of the event loop, files and directories of our own.

No module here depends on chunks, messages or daemons. Only `kera.core.errors` is below it.
"""
