"""Administration: streams, consumer groups, brokers and backups, and places in streams.

Users have ``admin``; ``consumer_groups`` looks at consumer groups from outside, ``control`` shows and controls the
activities of the cluster, ``locating`` finds records by place, number or time.
"""
