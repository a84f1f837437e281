"""Limits of latency constraints, and of the time for which brokers hold chunks back for them.

The coordinator checks the limits of constraints, and clients check them before they send a request. The coordinator
uses the limits of holding back when it splits a constraint, and producers take them into account.
"""

LIMIT_US_MIN, LIMIT_US_MAX = 1_000, 3_600_000_000
WINDOW_MS_MIN, WINDOW_MS_MAX = 1_000, 3_600_000
"""The minimum is the interval in which clients measure."""
HELD_US_MAX = 500_000
"""A broker holds no chunk back for longer: two requests a second cost next to nothing, and chunks that are not on
backups may be lost."""
HELD_REQUESTS_MAX = 3
"""Maximum of held requests of one writer: with one more, all are sent at once, as the writer may be out of requests.

A producer whose maximum of requests in flight is not above this has none held.
"""
