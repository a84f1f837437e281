"""The ``kera`` command: daemons, a local cluster, streams, records in and out, measurements.

One file per group of commands; `app` puts them together. Nothing here is needed by a program: that is
`kera.client`. Modules of this package import daemons, pyarrow and gRPC only when a command needs them, so
that ``kera --help`` and ``kera --version`` are quick.
"""
