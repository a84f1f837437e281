"""Imports gRPC so that it writes nothing to standard error, and leaves child processes alone.

gRPC's core logs lost connections and forks to standard error, into the terminal of the user of a client. Our errors say
it better. Its fork handlers start threads in the child that work on the parent's state; some children crashed because
of that. A child whose parent has an open channel does not use gRPC at all (`kera.core.rpc.grpc_forks`).

gRPC reads its variables when it is imported, so they are set only during the import: other processes get an unchanged
environment. A variable that is already set has precedence, and a program that has imported gRPC before keeps its
choice. So do daemons, which import it first and put its output into their log (`kera.core.rpc.grpc_words`).
"""

import os
import sys

VERBOSITY = "GRPC_VERBOSITY"
"""The environment variable with which people who look for a defect turn on gRPC's logs."""
_CHOICES = {VERBOSITY: "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}

if "grpc" not in sys.modules:
    _chosen = {name: value for name, value in _CHOICES.items() if name not in os.environ}
    os.environ.update(_chosen)
    try:
        import grpc  # noqa: F401
    finally:
        for _name in _chosen:
            del os.environ[_name]
