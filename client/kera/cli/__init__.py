"""The ``kera`` command: daemons, a local cluster, streams, records in and out, measurements.

One file per group of commands; `app` puts them together. Programs use `kera.client`, not this package. Its modules
import daemons, pyarrow and gRPC only when a command needs them, so that ``kera --help`` and ``kera --version`` are
quick.
"""
