"""The part that clients and daemons share, in floors: ``base``, ``format``, ``rpc``, and what stands on them.

Nothing here decides anything about streams: daemons and clients do. ``kera.core`` imports no other part, and each floor
only those below it (the contract is in ``pyproject.toml``).
"""
