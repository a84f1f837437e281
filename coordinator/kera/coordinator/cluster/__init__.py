"""A coordinator's knowledge of its cluster, and its connections to the members.

``state`` holds all of it: ``keys`` of the records, ``catalog`` (streams; ``intervals`` and ``starts`` are parts of
their records, ``recovering`` what is known of those that are recovered),
``membership`` (brokers and backups; ``admission``, ``feature_level``), ``changing`` (the lock of changes), ``brokers``,
``backups`` and ``peers`` (calls). ``placement`` and ``validation`` decide without knowing anybody. What is done with it
is left to ``recovery``, ``operations`` and ``consumer_groups``.
"""
