"""Imports gRPC so that it writes nothing to standard error, and leaves child processes alone.

Its core logs lost connections and forks to standard error, into the terminal of whoever uses a client. Errors say it
better. Its handlers of forks start threads in the child on what is the parent's; some children crashed of that. A child
whose parent has an open channel does not use gRPC at all (`kera.core.rpc.grpc_forks`).

gRPC reads its variables when it is imported, so they are set only meanwhile: other processes have the environment as it
was. A variable that is set already counts, and a program that has imported gRPC before keeps its choice. So do daemons,
which import it first and put its words into their log (`kera.core.rpc.grpc_words`).
"""

import os
import sys

VERBOSITY = "GRPC_VERBOSITY"
"""The environment variable by which people who look for a defect ask for more."""
_CHOICES = {VERBOSITY: "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}

if "grpc" not in sys.modules:
    _chosen = {name: value for name, value in _CHOICES.items() if name not in os.environ}
    os.environ.update(_chosen)
    try:
        import grpc  # noqa: F401
    finally:
        for _name in _chosen:
            del os.environ[_name]
