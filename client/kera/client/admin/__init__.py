"""Administration: streams, consumer groups, brokers and backups, and places in streams.

``admin`` is what users have; ``consumer_groups`` are consumer groups from outside, ``control`` is what the cluster is
doing, ``locating`` finds records by place, number or time.
"""
