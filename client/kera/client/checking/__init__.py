"""Checks whether a cluster has kept its promises: a history of what clients saw, and the rules for it.

Values are unique: each names its producer, and its number among that producer's records. So each record that is read
shows its origin, and the check only needs the answers that clients got. It does no I/O: callers record the history.
"""
