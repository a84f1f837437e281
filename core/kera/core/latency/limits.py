"""What a latency constraint may say: the coordinator checks it, and clients say it before they ask."""

LIMIT_US_MIN, LIMIT_US_MAX = 1_000, 3_600_000_000
WINDOW_MS_MIN, WINDOW_MS_MAX = 1_000, 3_600_000
"""From the interval in which clients measure."""
HELD_US_MAX = 500_000
"""For longer a broker holds nothing back: two requests a second cost next to nothing, and what is not on backups may be
lost."""
