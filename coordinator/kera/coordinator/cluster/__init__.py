"""A coordinator's knowledge of its cluster, and its connections to the members.

``state`` holds all of it. ``keys`` names the records. ``catalog`` has the streams; ``intervals`` and ``starts`` are
parts of their records, and ``recovering`` is what is known of streamlets under recovery. ``membership`` has the brokers
and backups (``admission``, ``feature_level``). ``changing`` is the lock of changes. ``broker_calls``, ``backup_calls``
and ``peers`` make the calls. ``placement`` and ``validation`` decide from their arguments alone. The operations are
left to ``recovery``, ``operations`` and ``consumer_groups``.
"""
