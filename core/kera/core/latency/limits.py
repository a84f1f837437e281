"""Limits of latency constraints, and of the time for which brokers hold chunks back for one.

The first the coordinator checks, and clients say it before they ask; the second the coordinator splits by, and
producers know of it.
"""

LIMIT_US_MIN, LIMIT_US_MAX = 1_000, 3_600_000_000
WINDOW_MS_MIN, WINDOW_MS_MAX = 1_000, 3_600_000
"""From the interval in which clients measure."""
HELD_US_MAX = 500_000
"""For longer a broker holds nothing back: two requests a second cost next to nothing, and what is not on backups may be
lost."""
HELD_REQUESTS_MAX = 3
"""So many requests of a writer wait for that at most: with one more all go at once, as it may have no more to send.

With no more requests in flight than that, a producer has none held.
"""
