"""How much is sent at once to a broker that holds answers back, as a quota is used up."""

from __future__ import annotations

THROTTLED_MS_MAX = 1000
"""For which an answer is held back as a quota is used up; after that, requests are smaller. Brokers hold none back for
longer than 2 s, so that large ones would use more than the quota says."""


class QuotaPace:
    """The size of the requests to one broker."""

    def __init__(self, request_bytes_max: int) -> None:
        self.bytes_max = request_bytes_max
        """Size of a request now: smaller while a quota makes it wait for long."""
        self.throttled = False
        """The broker held the last answer back: what is sent in advance would only wait there, and its time be up."""
        self._request_bytes_max = request_bytes_max

    def held_back(self, ms: int) -> None:
        """For how long the last answer was."""
        self.throttled = ms > 0
        if ms > THROTTLED_MS_MAX:
            self.bytes_max = max(1, self.bytes_max // 2)
        elif ms < THROTTLED_MS_MAX // 4:
            self.bytes_max = min(self.bytes_max * 2, self._request_bytes_max)
