"""A cluster on this machine: daemons as child processes, started, watched and stopped.

Other packages use ``cluster``, or ``node`` for the brokers of one host. ``running`` wraps a cluster for synchronous
code, ``child`` runs one process and finds in its log why it failed, ``directory`` locks and removes a cluster's
directory, and ``daemon_command`` builds command lines. This package is not part of the SDK, and does not use it.
"""
