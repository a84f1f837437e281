"""Whether a cluster has kept what it promised: a history of what clients saw, and what it must look like.

Values are unique: each says which producer has sent it, and as which of its records. So whatever is read tells where it
comes from, and the check needs no more than what clients were told. It does no I/O: who makes the history, and from
which cluster, is left to others.
"""
