"""Consumers that share streams: which consumer holds which groups, its progress, and its end (thesis 6.2.3).

``consumer_group`` decides and never waits; ``members`` and ``progress`` are parts of it. ``service`` answers remote
calls and stores changes. ``uses`` finds consumer groups that are no longer used. Consumers read records from brokers
directly.
"""
