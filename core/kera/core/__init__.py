"""The part that clients and daemons share, in layers: ``base``, ``format``, ``rpc``, and the packages on top of them.

Decisions about streams are not made here, but by daemons and clients. ``kera.core`` imports no other part, and each
layer imports only those below it (the contract is in ``pyproject.toml``).
"""
