"""Imports gRPC so that it writes nothing to standard error by itself.

Its core logs lost connections and forks there, into the terminal of whoever uses a client. Errors say it better. gRPC
reads the variable when it is imported, so it is set only meanwhile: child processes have the environment as it was.

A program that sets `VERBOSITY` gets what it asked for, and one that has imported gRPC before keeps its choice. So do
daemons, which import it first and put its words into their log (`kera.core.rpc.grpc_words`).
"""

import os
import sys

VERBOSITY = "GRPC_VERBOSITY"
"""The environment variable by which people who look for a defect ask for more."""

if "grpc" not in sys.modules and not os.environ.get(VERBOSITY):
    os.environ[VERBOSITY] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[VERBOSITY]
