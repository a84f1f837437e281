"""A cluster on this machine: daemons as child processes, started, watched and stopped.

``cluster`` is what others use; ``child`` handles one process, ``directory`` what a cluster leaves, ``log_tail`` why one
has failed, ``running`` a cluster for code that is not asynchronous. It is not part of the SDK, and needs nothing of it.
"""
